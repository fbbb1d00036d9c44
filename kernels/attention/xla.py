"""Attention in plain JAX: scores in full for many queries, a layout without transposes for one."""

import jax.numpy as jnp
from jax import lax


def attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale):
    """As the public op."""
    run = _one_query if q_BTNH.shape[1] == 1 else _many_queries
    return run(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale)


def _many_queries(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale):
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKRH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BKRTS = jnp.einsum("btkrh,bskh->bkrts", q_BTKRH, k_BSKH)
    weights_BKRTS = _softmax(scores_BKRTS, mask_BTS[:, None, None], scale).astype(v_BSKH.dtype)
    return jnp.einsum("bkrts,bskh->btkrh", weights_BKRTS, v_BSKH).reshape(B, T, N, H)


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
