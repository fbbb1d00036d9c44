"""Softmax attention with grouped query heads: over rows of keys, or over keys and values in pages."""

from jaxtyping import Array, Bool, Float, Int

from kernels.attention import paged, xla
from kernels.dispatch import choose


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    *,
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "B T S"],
    scale: float,
    implementation: str = "xla",
) -> Float[Array, "B T N H"]:
    """softmax(scale q k^T) v over the keys that `mask_BTS` allows; query head n reads kv head n // (N // K).

    The softmax is computed in float32 (float64 for float64 inputs). A query with no allowed key
    returns zeros and has zero gradients.

    Raises:
      ValueError: unknown implementation, or N not a multiple of K.
    """
    _require_groups("attention", q_BTNH.shape[2], k_BSKH.shape[2])
    run = choose("attention", implementation, {"xla": xla.attention})
    return run(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale)


def paged_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_PSKH: Float[Array, "P S K H"],
    *,
    v_PSKH: Float[Array, "P S K H"],
    pages_BX: Int[Array, "B X"],
    lengths_B: Int[Array, " B"],
    counts_B: Int[Array, " B"],
    scale: float,
    implementation: str = "xla",
) -> Float[Array, "B T N H"]:
    """Attention of new tokens to all tokens of their rows, whose keys and values lie in pages.

    Row b holds `lengths_B[b]` tokens and takes `counts_B[b]` of its T more; position i lies in page
    `pages_BX[b, i // S]` at i % S, and the new tokens' keys and values are already there. Query t stands
    at position lengths_B[b] + t and sees every position up to its own. Queries behind the count return
    zeros. Pages may be shared; nothing that no query sees has an influence, be it NaN, and page ids behind
    a row's end may be any. No gradients in reverse mode.

    Raises:
      ValueError: unknown implementation, or N not a multiple of K.
    """
    _require_groups("paged_attention", q_BTNH.shape[2], k_PSKH.shape[2])
    run = choose("paged_attention", implementation, {"xla": paged.paged_attention})
    return run(q_BTNH, k_PSKH, v_PSKH, pages_BX, lengths_B, counts_B, scale)


def write_pages(
    pool_PSKH: Float[Array, "P S K H"],
    new_BTKH: Float[Array, "B T K H"],
    *,
    pages_BX: Int[Array, "B X"],
    lengths_B: Int[Array, " B"],
    counts_B: Int[Array, " B"],
    implementation: str = "xla",
) -> Float[Array, "P S K H"]:
    """The pool with the first `counts_B` of each row's T tokens at positions lengths_B .. of the row.

    Page ids outside the pool drop what would be written there. No two rows may write to one page.

    Raises:
      ValueError: unknown implementation.
    """
    run = choose("write_pages", implementation, {"xla": paged.write_pages})
    return run(pool_PSKH, new_BTKH, pages_BX, lengths_B, counts_B)


def _require_groups(op: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"{op}: expected query heads to be a multiple of {kv_heads}; got {heads}")
