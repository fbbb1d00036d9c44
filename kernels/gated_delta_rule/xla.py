"""Gated delta rule in plain JAX: chunked for many tokens, a single step for decode, a scan as a check.

Letters here besides the common ones: J value head dim, R value heads per key head (N = K R),
M chunks, C and S positions within a chunk (S the earlier one).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

CHUNK = 32

# (I + A)^-1 amplifies the rounding of low-precision matmul passes, which some backends use by default.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def chunked_or_step(q_BTKH, k_BTKH, v_BTNJ, g_BTN, beta_BTN, segment_ids_BT, state_BNHJ):
    """The chunked rule, or one recurrent step for a single token."""
    if q_BTKH.shape[1] > 1:
        return chunked(q_BTKH, k_BTKH, v_BTNJ, g_BTN, beta_BTN, segment_ids_BT, state_BNHJ)
    state_BNHJ = _initial(state_BNHJ, k_BTKH, v_BTNJ)
    if q_BTKH.shape[1] == 0:
        return v_BTNJ.astype(state_BNHJ.dtype), state_BNHJ
    o_BNJ, state_BNHJ = step(
        q_BTKH[:, 0], k_BTKH[:, 0], v_BTNJ[:, 0], g_BTN[:, 0], beta_BTN[:, 0], state_BNHJ
    )
    return o_BNJ[:, None], state_BNHJ


def recurrent(q_BTKH, k_BTKH, v_BTNJ, g_BTN, beta_BTN, segment_ids_BT, state_BNHJ):
    """Token by token; the slow form whose gradients check those of `chunked`."""
    segments_BT = _segments(segment_ids_BT, q_BTKH)
    T = q_BTKH.shape[1]
    new_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))[:, :T]

    def body(S_BNHJ, xs):
        q_BKH, k_BKH, v_BNJ, g_BN, beta_BN, new_B = xs
        S_BNHJ = jnp.where(new_B[:, None, None, None], 0, S_BNHJ)
        o_BNJ, S_BNHJ = step(q_BKH, k_BKH, v_BNJ, g_BN, beta_BN, S_BNHJ)
        return S_BNHJ, o_BNJ

    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (q_BTKH, k_BTKH, v_BTNJ, g_BTN, beta_BTN, new_BT))
    state_BNHJ, o_TBNJ = lax.scan(body, _initial(state_BNHJ, k_BTKH, v_BTNJ), xs)
    return jnp.moveaxis(o_TBNJ, 0, 1), state_BNHJ


def step(q_BKH, k_BKH, v_BNJ, g_BN, beta_BN, S_BNHJ: Array) -> tuple[Array, Array]:
    """One token for every row: decay, correct towards v, then read."""
    dtype = S_BNHJ.dtype
    repeats = v_BNJ.shape[1] // k_BKH.shape[1]
    q_BNH, k_BNH = (jnp.repeat(x.astype(dtype), repeats, axis=1) for x in (q_BKH, k_BKH))
    decayed_BNHJ = S_BNHJ * jnp.exp(g_BN.astype(dtype))[..., None, None]
    # Sums of products, not dots: a batch of matrix-vector products is slower on CPU and this form fuses.
    recalled_BNJ = (k_BNH[..., None] * decayed_BNHJ).sum(2)
    delta_BNJ = beta_BN.astype(dtype)[..., None] * (v_BNJ.astype(dtype) - recalled_BNJ)
    S_BNHJ = decayed_BNHJ + k_BNH[..., None] * delta_BNJ[:, :, None]
    return (q_BNH[..., None] * S_BNHJ).sum(2), S_BNHJ


class _Decays(NamedTuple):
    """Products of decays between positions of a chunk; exactly 0 across documents."""

    pair: Array  # [B, M, K, R, C, S] from the write at S to the read at C, S <= C
    entry: Array  # [B, M, K, R, C] from the chunk's incoming state to C
    leave: Array  # [B, M, K, R, C] from the write at C to the chunk's end
    keep: Array  # [B, M, K, R] from the incoming to the outgoing state


def chunked(q_BTKH, k_BTKH, v_BTNJ, g_BTN, beta_BTN, segment_ids_BT, state_BNHJ):
    """Everything inside a chunk at once; only the state passes through a scan over chunks."""
    B, T, K, _ = k_BTKH.shape
    N, J = v_BTNJ.shape[2:]
    state_BNHJ = _initial(state_BNHJ, k_BTKH, v_BTNJ)
    split = partial(_split, pad=-T % CHUNK, dtype=state_BNHJ.dtype)
    q, k = (split(x).swapaxes(2, 3) for x in (q_BTKH, k_BTKH))  # [B, M, K, C, H]
    v = split(v_BTNJ.reshape(B, T, K, N // K, J)).transpose(0, 1, 3, 4, 2, 5)  # [B, M, K, R, C, J]
    g, beta = (split(x.reshape(B, T, K, N // K)).transpose(0, 1, 3, 4, 2) for x in (g_BTN, beta_BTN))
    decays = _decays(g, _split_segments(_segments(segment_ids_BT, q_BTKH)))
    writes, erases = _solve(k, v, beta, decays)
    scores = _einsum("bmkch,bmksh->bmkcs", q, k)[:, :, :, None] * decays.pair
    reads = q[:, :, :, None] * decays.entry[..., None]
    leaving = k[:, :, :, None] * decays.leave[..., None]
    first = state_BNHJ.reshape(B, K, N // K, *state_BNHJ.shape[2:])
    o, last = _scan_chunks(first, (writes, erases, scores, reads, leaving, decays.keep))
    o_BTNJ = o.transpose(0, 1, 4, 2, 3, 5).reshape(B, -1, N, J)[:, :T]
    return o_BTNJ, last.reshape(state_BNHJ.shape)


def _initial(state_BNHJ, k_BTKH, v_BTNJ):
    dtype = jnp.promote_types(v_BTNJ.dtype, jnp.float32)
    if state_BNHJ is not None:
        return state_BNHJ.astype(dtype)
    return jnp.zeros((v_BTNJ.shape[0], v_BTNJ.shape[2], k_BTKH.shape[3], v_BTNJ.shape[3]), dtype)


def _segments(segment_ids_BT, q_BTKH):
    return jnp.zeros(q_BTKH.shape[:2], jnp.int32) if segment_ids_BT is None else segment_ids_BT


def _split(x, *, pad, dtype):
    """[B, T, ...] -> [B, M, C, ...]; zeros on the right change no state, since g = beta = 0 there."""
    x = jnp.pad(x.astype(dtype), ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])


def _split_segments(segments_BT):
    # The padding joins the last document, so that the state passes through it.
    padded = jnp.pad(segments_BT, ((0, 0), (0, -segments_BT.shape[1] % CHUNK)), mode="edge")
    return padded.reshape(padded.shape[0], -1, CHUNK)


def _decays(g_BMKRC: Array, segments_BMC: Array) -> _Decays:
    last_BM = segments_BMC[:, :, -1]
    incoming_BM = jnp.concatenate([segments_BMC[:, :1, 0], last_BM[:, :-1]], axis=1)
    same = segments_BMC[..., :, None] == segments_BMC[..., None, :]
    causal = (same & jnp.tri(CHUNK, dtype=bool))[:, :, None, None]
    # Sums start at each document, or one document's decay would round into the next one's.
    total = _einsum("bmkrs,bmxycs->bmkrc", g_BMKRC, causal.astype(g_BMKRC.dtype))
    # exp only sees masked sums: one of the wrong sign would overflow.
    pair = jnp.exp(jnp.where(causal, _sums_between(g_BMKRC), -jnp.inf))
    inherits = (segments_BMC == incoming_BM[..., None])[:, :, None, None]
    entry = jnp.where(inherits, jnp.exp(total), 0)
    keep = jnp.where((incoming_BM == last_BM)[:, :, None, None], jnp.exp(total[..., -1]), 0)
    return _Decays(pair, entry, pair[..., -1, :], keep)


def _sums_between(g_BMKRC: Array) -> Array:
    """[.., C, S] sum of g over S < t <= C, each summed by itself.

    Differences of running sums would cost the digits that a strong decay anywhere in the chunk takes.
    """
    t = np.arange(CHUNK)
    inside = (t[None, :, None] < t) & (t <= t[:, None, None])  # [C, S, t]
    return _einsum("bmkrt,cst->bmkrcs", g_BMKRC, jnp.asarray(inside, g_BMKRC.dtype))


def _solve(k_BMKCH, v, beta, decays: _Decays) -> tuple[Array, Array]:
    """Values written if the incoming state were zero, and the factors by which that state erases."""
    J = v.shape[-1]
    gram = _einsum("bmkch,bmksh->bmkcs", k_BMKCH, k_BMKCH)[:, :, :, None]
    strict = jnp.tri(CHUNK, k=-1, dtype=v.dtype)
    A = gram * decays.pair * beta[..., None] * strict
    k = jnp.broadcast_to(k_BMKCH[:, :, :, None], (*v.shape[:-1], k_BMKCH.shape[-1]))
    rhs = beta[..., None] * jnp.concatenate([v, k * decays.entry[..., None]], axis=-1)
    solved = _einsum("bmkrcs,bmkrsj->bmkrcj", _inverse(A), rhs)
    return solved[..., :J], solved[..., J:]


@jax.custom_vjp
def _inverse(A: Array) -> Array:
    """(I + A)^-1 for strictly lower triangular A [.., C, C], from inverses of ever larger diagonal blocks.

    Merging [[X, 0], [B, Y]] -> [[X', 0], [-Y' B X', Y']] is forward substitution by blocks: unlike a
    power series in A it stays accurate for strongly correlated keys, and unlike a library's solve it
    is a few batched products.
    """
    row, col = np.arange(CHUNK)[:, None], np.arange(CHUNK)
    inverse, size = jnp.eye(CHUNK, dtype=A.dtype), 1
    while size < CHUNK:
        merged = (row // (2 * size) == col // (2 * size)) & (row // size > col // size)
        below = jnp.where(merged, A, 0)
        if size > 1:
            below = _einsum("...ct,...tu,...us->...cs", inverse, below, inverse)
        inverse, size = inverse - below, 2 * size
    return inverse


def _inverse_forward(A: Array) -> tuple[Array, Array]:
    inverse = _inverse(A)
    return inverse, inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    """-X^T dX X^T for X = (I + A)^-1: two products, where differentiating the merges takes seventeen."""
    return (-_einsum("...sc,...st,...ut->...cu", inverse, cotangent, inverse),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def _scan_chunks(first: Array, chunks: tuple[Array, ...]) -> tuple[Array, Array]:
    def body(S, chunk):
        write, erase, score, read, leaving, keep = chunk
        written = write - _einsum("bkrch,bkrhj->bkrcj", erase, S)
        o = _einsum("bkrch,bkrhj->bkrcj", read, S) + _einsum("bkrcs,bkrsj->bkrcj", score, written)
        return S * keep[..., None, None] + _einsum("bkrch,bkrcj->bkrhj", leaving, written), o

    last, o = lax.scan(body, first, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), chunks))
    return jnp.moveaxis(o, 0, 1), last
