"""bfloat16: what the gate of `make parity` lets pass and what not, and the sites that stay in float32.

Rounding one more intermediate to bfloat16 moves the divergence less than other roundings do by chance. So
the sites that must not be rounded are compared with float64 one by one.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.model import attention, block, gdn
from jaxrl.model.hub import load_hub
from jaxrl.model.moe import MoE
from jaxrl.model.norms import l2_norm
from tools.parity_cases import KINDS, Comparison

DATA = Path(__file__).parents[1] / "data" / "hf" / "small"
SITE_GATE = 2e-6  # float32 over some twenty terms; one rounding to bfloat16 is up to 4e-3 of the value


@pytest.fixture(autouse=True)
def x64():
    jax.clear_caches()  # of traces made with another form of a function
    with jax.enable_x64(True):
        yield
    jax.clear_caches()


def excess(kind: str) -> float:
    """Divergence from float64 over what is allowed, all cases together: some hundred tokens."""
    results = list(Comparison(DATA, kind, "bfloat16").results())
    assert {"single", "packed", "decode after padded prefill, prompts of 2"} <= {r.case for r in results}
    return sum(result.error for result in results) / sum(result.gate for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_is_below_twice_the_references(kind):
    assert excess(kind) < 1


def plain_weight(x, weight, *, eps):
    return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * weight).astype(x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "mistake"),
    [
        (gdn, "l2_norm", lambda x: x.astype(jnp.float32)),
        (attention, "apply_rope", lambda x, rope: x),
        (block, "rms_norm", plain_weight),
    ],
)
def test_mistakes_are_far_above_it(module, name, mistake, monkeypatch):
    monkeypatch.setattr(module, name, mistake)
    assert excess("moe") > 3


def rounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_the_router_is_not_rounded():
    moe = load_hub(DATA / "moe_hub", dtype="bfloat16").layers[0].mlp
    assert isinstance(moe, MoE)
    x = rounded(np.random.default_rng(0).standard_normal((200, moe.router[...].shape[0])))
    logits = x @ np.asarray(moe.router[...], np.float64)
    got = np.asarray(moe.probabilities(jnp.asarray(x, jnp.bfloat16)), np.float64)
    assert np.abs(got - softmax(logits)).max() < SITE_GATE
    assert np.abs(softmax(rounded(logits)) - softmax(logits)).max() > 100 * SITE_GATE


def test_the_keys_norm_is_not_rounded():
    x = rounded(np.random.default_rng(1).standard_normal((200, 24)))
    unit = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    got = np.asarray(l2_norm(jnp.asarray(x, jnp.bfloat16)), np.float64)
    assert np.abs(got - unit).max() < SITE_GATE
    assert np.abs(rounded(unit) - unit).max() > 100 * SITE_GATE
