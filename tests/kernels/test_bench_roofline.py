"""Counts of FLOPs and bytes against loops that count as they compute, and the arithmetic of bounds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import roofline
from kernels.attention import reference as attention_reference
from kernels.causal_conv1d import reference as conv_reference
from kernels.gated_delta_rule import reference as delta_reference
from kernels.grouped_matmul import reference as expert_reference


class Counter:
    """Dot products in plain Python that count two FLOPs per multiply-add."""

    def __init__(self):
        self.flops = 0

    def dot(self, a, b):
        self.flops += 2 * len(a)
        return sum(x * y for x, y in zip(a, b, strict=True))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def counted_delta_rule(q, k, v, g, beta, counter):
    (T, N, H), J = q.shape, v.shape[-1]
    o = np.zeros((T, N, J))
    for n in range(N):
        S = np.zeros((H, J))
        for t in range(T):
            S = S * np.exp(g[t, n])
            recalled = [counter.dot(k[t, n], S[:, j]) for j in range(J)]
            delta = beta[t, n] * (v[t, n] - recalled)
            for h, j in np.ndindex(H, J):
                S[h, j] += counter.dot([k[t, n, h]], [delta[j]])
            o[t, n] = [counter.dot(q[t, n], S[:, j]) for j in range(J)]
    return o


def test_gated_delta_rule():
    T, N, H, J = 3, 2, 4, 5
    q, k, v = normal(0, T, N, H), normal(1, T, N, H), normal(2, T, N, J)
    g, beta = -np.abs(normal(3, T, N)), np.abs(normal(4, T, N))
    counter = Counter()
    got = counted_delta_rule(q, k, v, g, beta, counter)
    want, _ = delta_reference.gated_delta_rule(
        q[None], k[None], v_BTNJ=v[None], g_BTN=g[None], beta_BTN=beta[None]
    )
    np.testing.assert_allclose(got, want[0], atol=1e-12)
    assert roofline.gated_delta_rule_flops(B=1, T=T, N=N, H=H, J=J) == counter.flops
    assert roofline.gated_delta_rule_flops(B=7, T=T, N=N, H=H, J=J) == 7 * counter.flops


def test_causal_conv1d():
    B, T, D, W = 2, 5, 3, 4
    x, weight, counter = normal(0, B, T, D), normal(1, W, D), Counter()
    padded = np.pad(x, ((0, 0), (W - 1, 0), (0, 0)))
    got = np.zeros(x.shape)
    for b, t, d in np.ndindex(B, T, D):
        got[b, t, d] = counter.dot(padded[b, t : t + W, d], weight[:, d])
    np.testing.assert_allclose(got, conv_reference.causal_conv1d(x, weight)[0], atol=1e-12)
    assert roofline.causal_conv1d_flops(B=B, T=T, D=D, W=W) == counter.flops


def test_expert_mlp():
    T, D, F, E, X = 5, 3, 2, 4, 2
    x, gate_up, down = normal(0, T, D), normal(1, E, D, 2 * F), normal(2, E, F, D)
    combine = np.zeros((T, E))
    for t in range(T):
        combine[t, [t % E, (t + 1) % E]] = 0.3, 0.7
    counter, got = Counter(), np.zeros((T, D))
    for t, e in zip(*np.nonzero(combine), strict=True):
        gate, up = np.split(np.array([counter.dot(x[t], column) for column in gate_up[e].T]), 2)
        inner = combine[t, e] * gate / (1 + np.exp(-gate)) * up
        got[t] += [counter.dot(inner, column) for column in down[e].T]
    want = expert_reference.expert_mlp(x, combine, gate_up_EDF=gate_up, down_EFD=down)
    np.testing.assert_allclose(got, want, atol=1e-12)
    assert roofline.expert_mlp_flops(T=T, D=D, F=F, experts_per_token=X) == counter.flops


def test_attention():
    T, N, H = 4, 2, 3
    q, k, v, mask = normal(0, T, N, H), normal(1, T, N, H), normal(2, T, N, H), np.tri(T, dtype=bool)
    counter, got = Counter(), np.zeros(q.shape)
    for t, n in np.ndindex(T, N):
        keys = np.flatnonzero(mask[t])
        weights = np.exp([counter.dot(q[t, n], k[s, n]) for s in keys])
        got[t, n] = [counter.dot(weights / weights.sum(), v[keys, n, h]) for h in range(H)]
    want = attention_reference.attention(q[None], k[None], v_BSKH=v[None], mask_BTS=mask[None], scale=1.0)
    np.testing.assert_allclose(got, want[0], atol=1e-12)
    assert roofline.attention_flops(pairs=int(mask.sum()), N=N, H=H) == counter.flops


def product_flops(run, *args):
    """FLOPs of all dot_generals of a traced function: 2 x result x contracted size."""
    total = 0
    equations: Any = jax.make_jaxpr(run)(*args).eqns
    for equation in equations:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * equation.outvars[0].aval.size * int(np.prod(sizes))
    return total


def test_backward_has_twice_the_products_of_the_forward():
    def expert(x_TD, gate_up_DF, down_FD):
        gate, up = jnp.split(x_TD @ gate_up_DF, 2, axis=-1)
        return ((gate * up) @ down_FD).sum()

    args = (jnp.ones((5, 3)), jnp.ones((3, 4)), jnp.ones((2, 3)))
    forward = product_flops(expert, *args)
    assert forward == roofline.expert_mlp_flops(T=5, D=3, F=2, experts_per_token=1)
    both = product_flops(jax.value_and_grad(expert, argnums=(0, 1, 2)), *args)
    assert both == roofline.FORWARD_AND_BACKWARD * forward


def test_bytes_count_each_array_once():
    args = (jnp.ones((2, 3), jnp.float32), jnp.ones(5, jnp.bfloat16))
    moved = roofline.bytes_once(lambda a, b: (a.sum(), b.astype(jnp.float32)), *args)
    assert moved == 2 * 3 * 4 + 5 * 2 + 1 * 4 + 5 * 4


def test_bound_is_the_slower_of_the_two():
    peak = roofline.Peak(flops_per_s=100.0, bytes_per_s=10.0, source="test")
    assert peak.bound(roofline.Work(flops=300, bytes=20)) == (3.0, "compute")
    assert peak.bound(roofline.Work(flops=100, bytes=20)) == (2.0, "memory")


def test_probes_state_their_work():
    matmul, copy = roofline.matmul_probe(jnp.float32, size=8), roofline.copy_probe(size=16)
    assert matmul.amount == 2 * 8**3
    assert matmul.run().shape == (8, 8)
    assert copy.amount == 2 * 16 * 4
    copy.run()
    np.testing.assert_allclose(copy.run(), 0.999**2, rtol=1e-6)


def test_unknown_device_is_refused():
    assert roofline.datasheet("NVIDIA H200").bytes_per_s == 4.8e12
    with pytest.raises(ValueError, match="got 'Abacus'; add its peak and the source to DATASHEET"):
        roofline.datasheet("Abacus")
