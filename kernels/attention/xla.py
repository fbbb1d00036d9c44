"""Attention in plain JAX: scores in full for many queries, a layout without transposes for one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale):
    """As the public op."""
    run = _one_query if q_BTNH.shape[1] == 1 else _many_queries
    return run(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale)


def _many_queries(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale):
    """One matrix product per kv head: the queries that share it stand below each other (U = R T rows)."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BKRTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    o_BKRTH = _attend(q_BKRTH, k_BKSH, v_BKSH, mask_BTS[:, None, None], scale)
    return o_BKRTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


# Differentiating the softmax would keep its [T, S] weights and pass over them several times more.
@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, mask, scale):
    return _attend_forward(q, k, v, mask, scale)[0]


def _attend_forward(q, k, v, mask, scale):
    scores = jnp.where(mask, _scores(q, k, scale), -jnp.inf)
    largest = scores.max(-1, keepdims=True)
    largest = jnp.where(largest == -jnp.inf, 0, largest)  # a query that sees nothing
    weights = jnp.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    total = jnp.where(total > 0, total, 1)
    out = (_product(weights.astype(v.dtype), v) / total).astype(v.dtype)
    return out, (q, k, v, mask, out, largest + jnp.log(total))


def _attend_backward(scale, saved, d_out):
    q, k, v, mask, out, log_total = saved
    weights = jnp.exp(jnp.where(mask, _scores(q, k, scale) - log_total, -jnp.inf))
    d_v = _sum_heads(weights.astype(v.dtype), d_out)
    delta = (d_out.astype(weights.dtype) * out.astype(weights.dtype)).sum(-1, keepdims=True)
    d_weights = _product(d_out, v.swapaxes(-1, -2))
    d_scores = (weights * (d_weights - delta) * scale).astype(q.dtype)
    d_q, d_k = _product(d_scores, k).astype(q.dtype), _sum_heads(d_scores, q)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), np.zeros(mask.shape, jax.dtypes.float0)


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(q: Array, k: Array, scale: float) -> Array:
    return _product(q, k.swapaxes(-1, -2)) * scale


def _product(x_BKRTU: Array, y_BKUW: Array) -> Array:
    """[B, K, R, T, U] times [B, K, U, W], summed in at least float32."""
    B, K, R, T, U = x_BKRTU.shape
    dtype = jnp.promote_types(x_BKRTU.dtype, jnp.float32)
    rows = jnp.matmul(x_BKRTU.reshape(B, K, R * T, U), y_BKUW, preferred_element_type=dtype)
    return rows.reshape(B, K, R, T, -1)


def _sum_heads(x_BKRTS: Array, y_BKRTH: Array) -> Array:
    """[B, K, S, H]: the transposed product, over all queries of a kv head."""
    B, K, R, T, S = x_BKRTS.shape
    dtype = jnp.promote_types(x_BKRTS.dtype, jnp.float32)
    y_BKUH = y_BKRTH.reshape(B, K, R * T, -1)
    return jnp.einsum(
        "bkus,bkuh->bksh", x_BKRTS.reshape(B, K, R * T, S), y_BKUH, preferred_element_type=dtype
    )


def _one_query(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale):
    """All kv heads side by side: one matmul per row reads the cache as it lies, with no transpose.

    A query is spread over its kv head's columns with zeros elsewhere. That multiplies the FLOPs by K,
    which a step that is bound by reading the cache does not feel.
    """
    B, _, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    own_NK = (jnp.arange(N)[:, None] // (N // K) == jnp.arange(K)).astype(q_BTNH.dtype)
    spread = (q_BTNH[:, 0, :, None] * own_NK[:, :, None]).reshape(B, N, K * H)
    scores_BNS = jnp.einsum("bnx,bsx->bns", spread, k_BSKH.reshape(B, S, K * H))
    weights_BNS = _softmax(scores_BNS, mask_BTS, scale).astype(v_BSKH.dtype)
    mixed_BNKH = jnp.einsum("bns,bsx->bnx", weights_BNS, v_BSKH.reshape(B, S, K * H)).reshape(B, N, K, H)
    return (mixed_BNKH * own_NK[:, :, None]).sum(2)[:, None]


def _softmax(scores, mask, scale):
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) * scale
    largest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=-1e30))
    # Masked before exp, or the gradient of an overflow times zero would be NaN.
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - largest, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)
