"""Attention over keys and values in pages: a loop over blocks of a few pages with an online softmax.

Letters besides the common ones: P pages of the pool, S positions of a page, X pages of a row, C keys of a
block, U = R T queries of a kv head (R query heads share it). One program serves every length: the loop
ends with the longest row. A block that a row does not reach leaves that row's sums bit for bit as they
were, so a row's result does not depend on how long the others are.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 128  # keys of a block, or one page if that is larger
_LOWEST = -1e30  # stands for -inf, whose differences would be NaN


class _Rows(NamedTuple):
    """Which keys a row may see."""

    pages_BX: Array  # whole blocks of pages
    ends_B: Array  # keys that exist; 0 for a row that takes no token
    query_BT: Array  # the position of each query; -1 for padding, which sees nothing


class _Sums(NamedTuple):
    """Of the softmax so far: the largest score, and both sums relative to it."""

    largest: Array  # [..., U]
    total: Array  # [..., U]
    mixed: Array  # [..., U, width of a value]


def paged_attention(q_BTNH, k_PSKH, v_PSKH, pages_BX, lengths_B, counts_B, scale):
    """As the public op."""
    T, S = q_BTNH.shape[1], k_PSKH.shape[1]
    per_block = max(1, BLOCK // S)
    rows = _rows(pages_BX, lengths_B, counts_B, T=T, per_block=per_block)
    run = _one_query if T == 1 else _many_queries
    return run(q_BTNH, k_PSKH, v_PSKH, rows, scale, per_block)


def write_pages(pool_PSKH, new_BTKH, pages_BX, lengths_B, counts_B):
    """As the public op."""
    T, (P, S) = new_BTKH.shape[1], pool_PSKH.shape[:2]
    position_BT = lengths_B[:, None] + jnp.arange(T)
    page_BT = jnp.take_along_axis(pages_BX, position_BT // S, axis=1, mode="fill", fill_value=P)
    page_BT = jnp.where(jnp.arange(T) < counts_B[:, None], page_BT, P)
    return pool_PSKH.at[page_BT, position_BT % S].set(new_BTKH.astype(pool_PSKH.dtype), mode="drop")


def _rows(pages_BX: Array, lengths_B: Array, counts_B: Array, *, T: int, per_block: int) -> _Rows:
    spare = -pages_BX.shape[1] % per_block
    real_BT = jnp.arange(T) < counts_B[:, None]
    return _Rows(
        pages_BX=jnp.pad(pages_BX, ((0, 0), (0, spare))),
        ends_B=jnp.where(counts_B > 0, lengths_B + counts_B, 0),
        query_BT=jnp.where(real_BT, lengths_B[:, None] + jnp.arange(T), -1),
    )


def _one_query(q_BTNH, k_PSKH, v_PSKH, rows: _Rows, scale: float, per_block: int) -> Array:
    """All kv heads side by side: one product per row reads a block as it lies, with no transpose.

    A query is spread over its kv head's columns with zeros elsewhere. That multiplies the FLOPs by K,
    which a step that is bound by reading the cache does not feel.
    """
    B, _, N, H = q_BTNH.shape
    K = k_PSKH.shape[2]
    own_NK = (jnp.arange(N)[:, None] // (N // K) == jnp.arange(K)).astype(q_BTNH.dtype)
    spread_BNX = (q_BTNH[:, 0, :, None] * own_NK[:, :, None]).reshape(B, N, K * H)

    def attend(k_BCKH: Array, v_BCKH: Array, mask_BTC: Array, sums: _Sums) -> _Sums:
        k_BCX, v_BCX = (x.reshape(*x.shape[:2], K * H) for x in (k_BCKH, v_BCKH))
        return _add(sums, spread_BNX, k_BCX, v_BCX, mask_BTC, scale)

    sums = _over_blocks(attend, _no_sums((B, N), K * H, q_BTNH.dtype), k_PSKH, v_PSKH, rows, per_block)
    mixed_BNKH = _normalised(sums).reshape(B, N, K, H)
    return (mixed_BNKH * own_NK[:, :, None]).sum(2)[:, None].astype(q_BTNH.dtype)


def _many_queries(q_BTNH, k_PSKH, v_PSKH, rows: _Rows, scale: float, per_block: int) -> Array:
    """One product per kv head: the queries that share it stand below each other."""
    B, T, N, H = q_BTNH.shape
    K = k_PSKH.shape[2]
    q_BKUH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)

    def attend(k_BCKH: Array, v_BCKH: Array, mask_BTC: Array, sums: _Sums) -> _Sums:
        mask_B1UC = jnp.tile(mask_BTC, (1, N // K, 1))[:, None]
        return _add(sums, q_BKUH, k_BCKH.swapaxes(1, 2), v_BCKH.swapaxes(1, 2), mask_B1UC, scale)

    sums = _no_sums(q_BKUH.shape[:-1], H, q_BTNH.dtype)
    out_BKUH = _normalised(_over_blocks(attend, sums, k_PSKH, v_PSKH, rows, per_block))
    out_BTKRH = out_BKUH.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4)
    return out_BTKRH.reshape(B, T, N, H).astype(q_BTNH.dtype)


def _over_blocks(attend, sums: _Sums, k_PSKH, v_PSKH, rows: _Rows, per_block: int) -> _Sums:
    B, S = rows.pages_BX.shape[0], k_PSKH.shape[1]
    keys = per_block * S

    def read(pool_PSKH: Array, ids_BX: Array) -> Array:
        # Whole pages as rows: a gather on CPU pays by the index.
        flat = pool_PSKH.reshape(pool_PSKH.shape[0], -1)
        return flat.at[ids_BX.reshape(-1)].get(mode="clip").reshape(B, keys, *pool_PSKH.shape[2:])

    def body(i: Array, sums: _Sums) -> _Sums:
        ids_BX = lax.dynamic_slice_in_dim(rows.pages_BX, i * per_block, per_block, axis=1)
        key_C = i * keys + jnp.arange(keys)
        mask_BTC = key_C <= rows.query_BT[..., None]
        # Whatever lies behind a row's end may be NaN, and 0 * NaN is NaN.
        exists_BC = key_C < rows.ends_B[:, None]
        v_BCKH = jnp.where(exists_BC[..., None, None], read(v_PSKH, ids_BX), 0)
        return attend(read(k_PSKH, ids_BX), v_BCKH, mask_BTC, sums)

    return lax.fori_loop(0, -(-rows.ends_B.max() // keys), body, sums)


def _add(sums: _Sums, q: Array, k: Array, v: Array, mask: Array, scale: float) -> _Sums:
    """The sums with one more block: q [..., U, H], k and v [..., C, H], mask [..., U or 1, C].

    Where nothing is allowed the factor is exp(0) = 1 and exact zeros are added.
    """
    dtype = sums.total.dtype
    scores = jnp.einsum("...uh,...ch->...uc", q, k, preferred_element_type=dtype) * scale
    scores = jnp.where(mask, scores, _LOWEST)
    largest = jnp.maximum(sums.largest, scores.max(-1))
    weights = jnp.where(mask, jnp.exp(scores - largest[..., None]), 0)
    factor = jnp.exp(sums.largest - largest)
    mixed = jnp.einsum("...uc,...ch->...uh", weights.astype(v.dtype), v, preferred_element_type=dtype)
    return _Sums(largest, sums.total * factor + weights.sum(-1), sums.mixed * factor[..., None] + mixed)


def _no_sums(queries: tuple[int, ...], width: int, dtype) -> _Sums:
    dtype = jnp.promote_types(dtype, jnp.float32)
    return _Sums(
        jnp.full(queries, _LOWEST, dtype), jnp.zeros(queries, dtype), jnp.zeros((*queries, width), dtype)
    )


def _normalised(sums: _Sums) -> Array:
    return sums.mixed / jnp.where(sums.total > 0, sums.total, 1)[..., None]
