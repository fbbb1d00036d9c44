"""Every length: chunked rule against the recurrence in float64, values and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.gated_delta_rule import gated_delta_rule

B, K, N, H, J = 1, 1, 2, 6, 5
LONGEST = 130
ALONG_TIME = ("q_BTKH", "k_BTKH", "v_BTNJ", "g_BTN", "beta_BTN")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def inputs(T, seed):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, T, K, H))
    beta = 1 / (1 + np.exp(-rng.standard_normal((B, T, N))))
    return {
        "q_BTKH": q * H**-0.5,
        "k_BTKH": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v_BTNJ": rng.standard_normal((B, T, N, J)),
        "g_BTN": -np.exp(rng.uniform(-6, 3, (B, T, N))),
        "beta_BTN": beta,
        "initial_state_BNHJ": rng.standard_normal((B, N, H, J)),
    }


def outputs_and_gradients(arrays, cotangents, implementation):
    def run(arrays):
        rest = {name: x for name, x in arrays.items() if name not in ("q_BTKH", "k_BTKH")}
        return gated_delta_rule(arrays["q_BTKH"], arrays["k_BTKH"], **rest, implementation=implementation)

    out, pull = jax.vjp(run, arrays)
    return out, pull(cotangents)[0]


@jax.jit
def recurrence(arrays, cotangents):
    return outputs_and_gradients(arrays, cotangents, "recurrent")


def lengthened(x):
    """Idle tokens behind the real ones: the recurrence is the same, and compiles once for all lengths."""
    return np.pad(x, ((0, 0), (0, LONGEST - x.shape[1])) + ((0, 0),) * (x.ndim - 2))


def check(T, seed):
    arrays = inputs(T, seed)
    rng = np.random.default_rng(seed + 1)
    cotangents = rng.standard_normal((B, T, N, J)), rng.standard_normal((B, N, H, J))
    got = jax.jit(lambda a, c: outputs_and_gradients(a, c, "xla"))(arrays, cotangents)
    longer = {name: lengthened(x) if name in ALONG_TIME else x for name, x in arrays.items()}
    want = recurrence(longer, (lengthened(cotangents[0]), cotangents[1]))
    want = jax.tree.map(lambda a, b: b[:, :T] if b.shape[1] == LONGEST else b, got, want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert a.shape == b.shape and a.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("T", [0, 1, 2, 31, 64, 97])
def test_some_lengths(T):
    check(T, seed=T)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_length():
    for T in range(LONGEST + 1):
        check(T, seed=1000 + T)


@pytest.mark.parametrize("decay", [0.0, 90.0, 1000.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_finite_for_identical_keys_and_rows_of_zeros(decay, dtype):
    arrays = inputs(70, seed=0)
    arrays["k_BTKH"][:] = arrays["k_BTKH"][:, :1]
    arrays["g_BTN"] = np.full((B, 70, N), -decay)
    for name in ("q_BTKH", "k_BTKH", "v_BTNJ"):
        arrays[name][:, 20:30] = 0
    arrays["beta_BTN"][:] = 1
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    cotangents = jnp.ones((B, 70, N, J), dtype), jnp.ones((B, N, H, J), dtype)
    got, want = (
        jax.jit(lambda a, c, how=how: outputs_and_gradients(a, c, how))(arrays, cotangents)
        for how in ("xla", "recurrent")
    )
    tolerance = 1e-10 if dtype == "float64" else 1e-3
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
