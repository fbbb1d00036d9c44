"""Greedy tokens equal those of Hugging Face `generate`; traces by tools/hf_generate.py."""

from pathlib import Path

import jax
import pytest

from jaxrl.engine.engine import EngineOptions
from tools.generate_cases import KINDS, verdicts

DATA = Path(__file__).parents[1] / "data" / "hf" / "small"
OPTIONS = EngineOptions(
    slots=5, context=352, prefill_rows=3, prefill_buckets=(8, 64), decode_steps=4, poison_freed=True
)


@pytest.fixture(autouse=True)
def x64():
    jax.config.update("jax_enable_x64", True)  # for the device thread, too
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_greedy_tokens_equal_the_reference(kind, dtype):
    for way, verdict in verdicts(DATA, kind, dtype, OPTIONS).items():
        assert verdict.holds, (way, verdict)
