"""What to do about tokens whose probability the sampler and the trainer see differently. Pure JAX.

The gap of a token is log p of the trainer minus log p of the sampler; w = exp(gap).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.rl.losses.segments import sequence_mean


def truncated_weight(gap_BT: Float[Array, "B T"], *, high: float) -> Float[Array, "B T"]:
    """min(w, high): truncated importance sampling of a token."""
    return jnp.minimum(jnp.exp(gap_BT), high)


def sequence_masked_weight(
    gap_BT: Float[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    segment_ids_BT: Int[Array, "B T"],
    low: float,
    high: float,
) -> Float[Array, "B T"]:
    """w, untruncated, and 0 in sequences whose geometric mean of w lies outside [low, high].

    A w that is not finite counts 0, as in the reference of MLPerf Training v6.1.
    """
    geometric_BT = jnp.exp(sequence_mean(gap_BT, weights_BT, segment_ids_BT=segment_ids_BT))
    weight_BT = jnp.exp(gap_BT)
    inside_BT = (geometric_BT >= low) & (geometric_BT <= high)
    return jnp.where(inside_BT & jnp.isfinite(weight_BT), weight_BT, 0.0)


def within_error_limit(
    gap_BT: Float[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    segment_ids_BT: Int[Array, "B T"],
    limit: float,
) -> Float[Array, "B T"]:
    """1 in sequences whose mean of exp|gap| is at most `limit`, else 0."""
    error_BT = sequence_mean(jnp.exp(jnp.abs(gap_BT)), weights_BT, segment_ids_BT=segment_ids_BT)
    # `not >` instead of `<=`: a NaN must reach the gradient check, not vanish as a masked sequence.
    return jnp.where(error_BT > limit, 0.0, 1.0)
