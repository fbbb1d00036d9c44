"""Every case of `make parity` on small committed traces: decode, multi-token prediction and paddings, too."""

from pathlib import Path

import jax
import pytest

from tools.parity_cases import KINDS, Comparison

DATA = Path(__file__).parents[1] / "data" / "hf" / "small"


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_case_holds(kind, dtype):
    results = list(Comparison(DATA, kind, dtype).results())
    cases = {result.case for result in results}
    assert {"multi-token prediction", "decode after padded prefill", "left-padded", "packed"} <= cases
    assert not [result for result in results if not result.holds]
