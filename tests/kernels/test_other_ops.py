"""Causal convolution, attention and the expert layer against float64 NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import attention
from kernels.attention import reference as attention_reference
from kernels.causal_conv1d import causal_conv1d
from kernels.causal_conv1d import reference as conv_reference
from kernels.grouped_matmul import expert_mlp
from kernels.grouped_matmul import reference as expert_reference


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def conv_cases(T):
    segments = np.sort(np.random.default_rng(T).integers(0, 3, (3, T)), axis=1).astype(np.int32)
    yield {}
    yield {"segment_ids_BT": segments}
    yield {"taps_BXD": normal(2, 3, 3, 5)}
    yield {"taps_BXD": normal(2, 3, 3, 5), "counts_B": np.array([0, T // 2, T])}


@pytest.mark.parametrize("T", [1, 2, 3, 9])
def test_conv(T):
    x, weight = normal(0, 3, T, 5), normal(1, 4, 5)
    for case in conv_cases(T):
        want = conv_reference.causal_conv1d(x, weight, **case)
        given: dict[str, Any] = {name: jnp.asarray(v) for name, v in case.items()}
        got = causal_conv1d(jnp.asarray(x), jnp.asarray(weight), **given)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13, err_msg=str(case.keys()))


@pytest.mark.parametrize(("T", "K"), [(1, 1), (1, 2), (7, 1), (7, 2), (7, 4)])
def test_attention(T, K):
    q, k, v = normal(0, 2, T, 4, 6), normal(1, 2, 9, K, 6), normal(2, 2, 9, K, 6)
    mask = np.random.default_rng(3).uniform(size=(2, T, 9)) < 0.6
    mask[1, 0] = False
    want = attention_reference.attention(q, k, v_BSKH=v, mask_BTS=mask, scale=0.4)
    got = attention(*map(jnp.asarray, (q, k)), v_BSKH=jnp.asarray(v), mask_BTS=jnp.asarray(mask), scale=0.4)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


def test_attention_gradient_is_zero_where_nothing_is_allowed():
    q, k, v = normal(0, 1, 3, 2, 4), normal(1, 1, 3, 1, 4), normal(2, 1, 3, 1, 4)
    mask = np.tri(3, dtype=bool)[None] & np.array([True, True, False])[None, :, None]

    def loss(q):
        return attention(
            q, jnp.asarray(k), v_BSKH=jnp.asarray(v), mask_BTS=jnp.asarray(mask), scale=1e4
        ).sum()

    gradient = jax.grad(loss)(jnp.asarray(q))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, 2], 0)


def expert_inputs():
    combine = np.random.default_rng(4).uniform(size=(11, 6))
    combine[np.argsort(np.argsort(combine, axis=1), axis=1) < 4] = 0
    combine[3] = [0, 0, 0, 0, 0, 1.0]
    return normal(0, 11, 5), combine, normal(1, 6, 5, 8), normal(2, 6, 4, 5)


@pytest.mark.parametrize("implementation", ["dense_masked", "ragged"])
def test_experts(implementation):
    x, combine, gate_up, down = expert_inputs()
    want = expert_reference.expert_mlp(x, combine, gate_up_EDF=gate_up, down_EFD=down)
    got = expert_mlp(
        jnp.asarray(x),
        jnp.asarray(combine),
        gate_up_EDF=jnp.asarray(gate_up),
        down_EFD=jnp.asarray(down),
        experts_per_token=2,
        implementation=implementation,
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_expert_gradients_agree():
    arrays = tuple(map(jnp.asarray, expert_inputs()))

    def loss(arrays, implementation):
        x, combine, gate_up, down = arrays
        out = expert_mlp(
            x,
            combine,
            gate_up_EDF=gate_up,
            down_EFD=down,
            experts_per_token=2,
            implementation=implementation,
        )
        return jnp.sin(out).sum()

    dense, ragged = (jax.grad(loss)(arrays, name) for name in ("dense_masked", "ragged"))
    chosen = arrays[1] > 0
    for name, a, b in zip(("x", "combine", "gate_up", "down"), dense, ragged, strict=True):
        # Only the dense form has a gradient for a weight that is a constant zero.
        a = jnp.where(chosen, a, 0) if name == "combine" else a
        b = jnp.where(chosen, b, 0) if name == "combine" else b
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12, err_msg=name)


def test_unknown_implementations_raise():
    x = jnp.zeros((1, 2, 3))
    with pytest.raises(ValueError, match="causal_conv1d: expected implementation to be one of 'xla'"):
        causal_conv1d(x, jnp.zeros((4, 3)), implementation="pallas")
