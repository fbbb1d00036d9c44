"""The conformance suite over real container engines; `make test-engines` starts them."""

import os
import signal
import subprocess
import sys

import pytest
from conformance.backends import BACKENDS
from conformance.core import CASES, ROOT, cases_for, play

from sandbox.base import Limits
from sandbox.docker_backend import DockerProvider

ENGINES = {"docker": "DOCKERD_SOCKET", "podman": "PODMAN_SOCKET"}
PAIRS = [(engine, item.name) for engine in ENGINES for item in cases_for(BACKENDS[engine])]

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]


@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_engine(engine: str, name: str) -> None:
    if ENGINES[engine] not in os.environ:
        pytest.skip(f"{ENGINES[engine]} is not set: run `make test-engines`, which starts {engine}")
    play(CASES[name], BACKENDS[engine])


DOOMED = """
import asyncio, os, signal, sys
from sandbox.base import Image, Limits
from sandbox.docker_backend import DockerProvider

async def main():
    provider = DockerProvider(address=sys.argv[1])
    await provider.create({}, Limits(), image=Image(name=sys.argv[2]))
    os.kill(provider._sentinel._process.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_a_killed_owner_without_a_sentinel_left_is_reaped(engine: str) -> None:
    if ENGINES[engine] not in os.environ:
        pytest.skip(f"{ENGINES[engine]} is not set: run `make test-engines`, which starts {engine}")
    backend = BACKENDS[engine]
    provider = DockerProvider(address=os.environ[ENGINES[engine]])
    command = [sys.executable, "-c", DOOMED, os.environ[ENGINES[engine]], str(backend.image.name)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    living = await provider.create({}, Limits(), image=backend.image)
    assert len(backend.traces()) == 4  # two containers and their volumes
    assert await provider.reap() == 1
    assert len(backend.traces()) == 2 and (await living.exec("echo alive", 10)).output == "alive\n"
    await provider.close()
    assert not backend.traces()
