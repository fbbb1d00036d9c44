"""What a token adds to the policy objective, as a function of its log-ratio and advantage. Pure JAX.

r is the ratio of the new to the old probability, A the advantage, sg stops the gradient.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from jaxrl.rl.losses.segments import sequence_mean


class Clip(NamedTuple):
    """The ratio counts from 1 - low to 1 + high; `dual` (c) bounds it where the advantage is negative."""

    low: float
    high: float
    dual: float | None = None


class Surrogate(NamedTuple):
    """To be maximised. The masks say where a bound took effect."""

    value_BT: Float[Array, "B T"]
    ratio_BT: Float[Array, "B T"]
    low_BT: Bool[Array, "B T"]
    high_BT: Bool[Array, "B T"]
    dual_BT: Bool[Array, "B T"]


def clipped(
    log_ratio_BT: Float[Array, "B T"], advantages_BT: Float[Array, "B T"], *, clip: Clip
) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A) of PPO (arXiv:1707.06347), with clip-higher of DAPO
    (arXiv:2503.14476) where high > low, and dual clip (arXiv:1912.09729): at least c A where A < 0.
    """
    ratio_BT = jnp.exp(log_ratio_BT)
    bounded_BT = jnp.clip(ratio_BT, 1 - clip.low, 1 + clip.high)
    value_BT = jnp.minimum(ratio_BT * advantages_BT, bounded_BT * advantages_BT)
    dual_BT = jnp.zeros_like(ratio_BT, dtype=bool)
    if clip.dual is not None:
        dual_BT = (advantages_BT < 0) & (ratio_BT > clip.dual)
        value_BT = jnp.where(dual_BT, clip.dual * advantages_BT, value_BT)
    low_BT = (ratio_BT < 1 - clip.low) & (advantages_BT < 0)
    high_BT = (ratio_BT > 1 + clip.high) & (advantages_BT > 0)
    return Surrogate(value_BT, ratio_BT, low_BT, high_BT, dual_BT)


def cispo(
    log_ratio_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    *,
    logprobs_BT: Float[Array, "B T"],
    clip: Clip,
) -> Surrogate:
    """sg(clip(r, 1 - low, 1 + high)) A log p: a bound on the weight, under which every token keeps its
    gradient (MiniMax-M1, arXiv:2506.13585)."""
    ratio_BT = jnp.exp(log_ratio_BT)
    weight_BT = stop_gradient(jnp.clip(ratio_BT, 1 - clip.low, 1 + clip.high))
    low_BT, high_BT = ratio_BT < 1 - clip.low, ratio_BT > 1 + clip.high
    value_BT = weight_BT * advantages_BT * logprobs_BT
    return Surrogate(value_BT, ratio_BT, low_BT, high_BT, jnp.zeros_like(low_BT))


def sequence_log_ratio(
    log_ratio_BT: Float[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    segment_ids_BT: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """log s of GSPO (arXiv:2507.18071): the mean of a sequence's log-ratios, at each of its tokens."""
    return sequence_mean(log_ratio_BT, weights_BT, segment_ids_BT=segment_ids_BT)


def sequence_log_ratio_by_token(
    log_ratio_BT: Float[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    segment_ids_BT: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """log s of GSPO-token: the value of the sequence's, the gradient of the token's own log-prob."""
    whole_BT = stop_gradient(sequence_log_ratio(log_ratio_BT, weights_BT, segment_ids_BT=segment_ids_BT))
    return whole_BT + log_ratio_BT - stop_gradient(log_ratio_BT)
