"""The conformance suite over real container engines; `make test-engines` starts them."""

import os

import pytest
from conformance.backends import BACKENDS
from conformance.core import CASES, cases_for, play

ENGINES = {"docker": "DOCKERD_SOCKET", "podman": "PODMAN_SOCKET"}
PAIRS = [(engine, item.name) for engine in ENGINES for item in cases_for(BACKENDS[engine])]

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]


@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_engine(engine: str, name: str) -> None:
    if ENGINES[engine] not in os.environ:
        pytest.skip(f"{ENGINES[engine]} is not set: run `make test-engines`, which starts {engine}")
    play(CASES[name], BACKENDS[engine])
