"""Attention over keys and values in pages: a loop over blocks of a few pages with an online softmax.

Letters besides the common ones: P pages of the pool, S positions of a page, X pages of a row, C keys of a
block, U = R T queries of a kv head (R query heads share it). One program serves every length: the loop
ends with the longest row. A block that a row does not reach leaves that row's sums bit for bit as they
were, so a row's result does not depend on how long the others are. On a CPU rows go through the loop in
groups of about the same length: that skips what short rows do not have, and a group's blocks stay in the
processor's cache.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 128  # keys of a block, or one page if that is larger
CPU_GROUP = 16  # rows of a group
_LOWEST = -1e30  # stands for -inf, whose differences would be NaN


class _Rows(NamedTuple):
    """Which keys a row may see."""

    pages_BX: Array  # whole blocks of pages
    ends_B: Array  # keys that exist; 0 for a row that takes no token
    query_BT: Array  # the position of each query; -1 for padding, which sees nothing


class _Pair(NamedTuple):
    """Keys and values: of a pool, or the pages of a block."""

    k: Array
    v: Array


class _Sums(NamedTuple):
    """Of the softmax so far: the largest score, and both sums relative to it."""

    largest: Array  # [..., U]
    total: Array  # [..., U]
    mixed: Array  # [..., U, width of a value]


def paged_attention(q_BTNH, k_PSKH, v_PSKH, pages_BX, lengths_B, counts_B, scale):
    """As the public op."""
    per_block = max(1, BLOCK // k_PSKH.shape[1])
    rows = _rows(pages_BX, lengths_B, counts_B, T=q_BTNH.shape[1], per_block=per_block)
    on_cpu, elsewhere = (partial(_attend, read, scale, per_block) for read in (_copy_pages, _gather_pages))
    in_groups = partial(_by_length if q_BTNH.shape[0] > CPU_GROUP else _at_once, on_cpu, per_block)
    at_once = partial(_at_once, elsewhere, per_block)
    return lax.platform_dependent(q_BTNH, _Pair(k_PSKH, v_PSKH), rows, cpu=in_groups, default=at_once)


def _at_once(run, per_block: int, q_BTNH: Array, pools: _Pair, rows: _Rows) -> Array:
    return run(q_BTNH, pools, rows, _no_block(q_BTNH.shape[0], pools, per_block))[0]


def _by_length(run, per_block: int, q_BTNH: Array, pools: _Pair, rows: _Rows) -> Array:
    B, spare = q_BTNH.shape[0], -q_BTNH.shape[0] % CPU_GROUP
    order_B = jnp.argsort(-rows.ends_B)

    def grouped(x: Array) -> Array:
        # Rows that fill up the last group have no keys.
        x = jnp.pad(x[order_B], ((0, spare), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(-1, CPU_GROUP, *x.shape[1:])

    def body(block: _Pair, group: tuple[Array, _Rows]) -> tuple[_Pair, Array]:
        out_BTNH, block = run(group[0], pools, group[1], block)
        return block, out_BTNH

    block = _no_block(CPU_GROUP, pools, per_block)
    _, out_GBTNH = lax.scan(body, block, (grouped(q_BTNH), _Rows(*map(grouped, rows))))
    return out_GBTNH.reshape(-1, *q_BTNH.shape[1:])[:B][jnp.argsort(order_B)]


def _copy_pages(pools: _Pair, ids_R: Array, exists_RS: Array, block: _Pair) -> _Pair:
    """Page by page into the block that is there: a gather on CPU goes element by element.

    Pages have one axis here (values two, for the mask), or the copies would be loops over small axes.
    """
    S = exists_RS.shape[1]
    k_PX, v_PSX = pools.k.reshape(pools.k.shape[0], -1), pools.v.reshape(pools.v.shape[0], S, -1)

    def body(r: Array, block: _Pair) -> _Pair:
        k_X, v_SX = (lax.dynamic_index_in_dim(pool, ids_R[r], keepdims=False) for pool in (k_PX, v_PSX))
        pages = k_X, jnp.where(exists_RS[r][:, None], v_SX, 0)
        return _Pair(*map(partial(lax.dynamic_update_index_in_dim, index=r, axis=0), block, pages))

    flat = _Pair(block.k.reshape(block.k.shape[0], -1), block.v.reshape(block.v.shape[0], S, -1))
    flat = lax.fori_loop(0, ids_R.shape[0], body, flat)
    return _Pair(flat.k.reshape(block.k.shape), flat.v.reshape(block.v.shape))


def _gather_pages(pools: _Pair, ids_R: Array, exists_RS: Array, block: _Pair) -> _Pair:
    del block
    k_RSKH, v_RSKH = (pool.at[ids_R].get(mode="clip") for pool in pools)
    return _Pair(k_RSKH, jnp.where(exists_RS[..., None, None], v_RSKH, 0))


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


def _attend(read, scale: float, per_block: int, q_BTNH: Array, pools: _Pair, rows: _Rows, block: _Pair):
    """Attention of all rows at once; `block` is memory that pages may be read into, and is returned."""
    add, sums, finish = (_one_query if q_BTNH.shape[1] == 1 else _many_queries)(q_BTNH, pools.k, scale)
    B, S = rows.pages_BX.shape[0], pools.k.shape[1]
    keys = per_block * S

    def body(i: Array, carry: tuple[_Sums, _Pair]) -> tuple[_Sums, _Pair]:
        sums, block = carry
        ids_BX = lax.dynamic_slice_in_dim(rows.pages_BX, i * per_block, per_block, axis=1)
        key_C = i * keys + jnp.arange(keys)
        # Whatever lies behind a row's end may be NaN, and 0 * NaN is NaN.
        exists_BC = key_C < rows.ends_B[:, None]
        block = read(pools, ids_BX.reshape(-1), exists_BC.reshape(-1, S), block)
        k_BCKH, v_BCKH = (pages.reshape(B, keys, *pages.shape[2:]) for pages in block)
        return add(sums, k_BCKH, v_BCKH, key_C <= rows.query_BT[..., None]), block

    sums, block = lax.fori_loop(0, -(-rows.ends_B.max() // keys), body, (sums, block))
    return finish(sums.mixed / jnp.where(sums.total > 0, sums.total, 1)[..., None]), block


def _one_query(q_BTNH: Array, k_PSKH: Array, scale: float):
    """All kv heads side by side: one product per row reads a block as it lies, with no transpose.

    A query is spread over its kv head's columns with zeros elsewhere. That multiplies the FLOPs by K,
    which a step that is bound by reading the cache does not feel.
    """
    (B, _, N, H), K = q_BTNH.shape, k_PSKH.shape[2]
    own_NK = (jnp.arange(N)[:, None] // (N // K) == jnp.arange(K)).astype(q_BTNH.dtype)
    spread_BNX = (q_BTNH[:, 0, :, None] * own_NK[:, :, None]).reshape(B, N, K * H)

    def add(sums: _Sums, k_BCKH: Array, v_BCKH: Array, mask_BTC: Array) -> _Sums:
        k_BCX, v_BCX = (x.reshape(*x.shape[:2], K * H) for x in (k_BCKH, v_BCKH))
        return _add(sums, spread_BNX, k_BCX, v_BCX, mask_BTC, scale)

    def finish(mixed_BNX: Array) -> Array:
        mixed_BNKH = mixed_BNX.reshape(B, N, K, H)
        return (mixed_BNKH * own_NK[:, :, None]).sum(2)[:, None].astype(q_BTNH.dtype)

    return add, _no_sums((B, N), K * H, q_BTNH.dtype), finish


def _many_queries(q_BTNH: Array, k_PSKH: Array, scale: float):
    """One product per kv head: the queries that share it stand below each other."""
    (B, T, N, H), K = q_BTNH.shape, k_PSKH.shape[2]
    q_BKUH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)

    def add(sums: _Sums, k_BCKH: Array, v_BCKH: Array, mask_BTC: Array) -> _Sums:
        mask_B1UC = jnp.tile(mask_BTC, (1, N // K, 1))[:, None]
        return _add(sums, q_BKUH, k_BCKH.swapaxes(1, 2), v_BCKH.swapaxes(1, 2), mask_B1UC, scale)

    def finish(mixed_BKUH: Array) -> Array:
        out_BTKRH = mixed_BKUH.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4)
        return out_BTKRH.reshape(B, T, N, H).astype(q_BTNH.dtype)

    return add, _no_sums(q_BKUH.shape[:-1], H, q_BTNH.dtype), finish


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


def _no_block(rows: int, pools: _Pair, per_block: int) -> _Pair:
    return _Pair(*(jnp.zeros((rows * per_block, *pool.shape[1:]), pool.dtype) for pool in pools))
