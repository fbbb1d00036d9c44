"""Softmax attention with grouped query heads."""

from jaxtyping import Array, Bool, Float

from kernels.attention import xla
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
    heads, kv_heads = q_BTNH.shape[2], k_BSKH.shape[2]
    if heads % kv_heads:
        raise ValueError(f"attention: expected query heads to be a multiple of {kv_heads}; got {heads}")
    run = choose("attention", implementation, {"xla": xla.attention})
    return run(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale)
