"""Drawing a token from logits, with randomness that depends on what is sampled and nothing else.

A token's key is (64-bit digest of its `SampleKey`, absolute position): neither slot nor batch nor
timing enters, so the same request draws the same tokens wherever it runs.
"""

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl.contracts import SampleKey
from jaxrl.engine.noise import gumbel

_MASKED = -jnp.inf


class SamplingParams(NamedTuple):
    """Per-row sampling settings (see `contracts.Sampling`) and key words; NumPy arrays on the host."""

    temperature_B: Float[Array | np.ndarray, " B"]
    top_p_B: Float[Array | np.ndarray, " B"]
    top_k_B: Int[Array | np.ndarray, " B"]
    min_p_B: Float[Array | np.ndarray, " B"]
    key_B2: UInt32[Array | np.ndarray, "B 2"]

    @classmethod
    def of(cls, rows: int) -> "SamplingParams":
        """NumPy arrays of plain sampling at temperature 1, to be filled in."""
        return cls(
            temperature_B=np.ones(rows, np.float32),
            top_p_B=np.ones(rows, np.float32),
            top_k_B=np.zeros(rows, np.int32),
            min_p_B=np.zeros(rows, np.float32),
            key_B2=np.zeros((rows, 2), np.uint32),
        )


class Sampled(NamedTuple):
    token_B: Int[Array, " B"]
    logprob_B: Float[Array, " B"]  # of the distribution that was sampled
    full_logprob_B: Float[Array, " B"]  # of softmax(logits)
    top_token_BW: Int[Array, "B W"]  # the most likely tokens of softmax(logits), best first
    top_logprob_BW: Float[Array, "B W"]


def key_words(key: SampleKey) -> UInt32[np.ndarray, " 2"]:
    """The two 32-bit words that seed every token of a turn."""
    text = "\x1f".join(str(part) for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u4").copy()


def sample(
    logits_BV: Float[Array, "B V"], params: SamplingParams, *, positions_B: Int[Array, " B"], top: int = 0
) -> Sampled:
    """Draws one token per row; `positions_B` are the absolute positions of the new tokens.

    Args:
      top: W, how many of the most likely tokens to report.
    """
    logits_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
    greedy_B = params.temperature_B <= 0
    scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, params.temperature_B)[:, None]
    scaled_BV = jax.lax.cond(_restricted(params), _truncate, lambda x, _: x, scaled_BV, params)
    noise_BV = gumbel(
        jnp.asarray(params.key_B2), positions_B, size=logits_BV.shape[-1], dtype=logits_BV.dtype
    )
    noisy_BV = scaled_BV + jnp.where(greedy_B[:, None], 0.0, noise_BV)
    token_B = _first_largest(noisy_BV)
    logprob_B = jnp.where(greedy_B, 0.0, _logprob(scaled_BV, token_B[:, None])[:, 0])
    token_BW = _most_likely(logits_BV, top)
    full_BW = _logprob(logits_BV, jnp.concatenate([token_B[:, None], token_BW], axis=-1))
    return Sampled(token_B, logprob_B, full_BW[:, 0], token_BW, full_BW[:, 1:])


def _first_largest(x_BV: Array) -> Array:
    """argmax in two passes that vectorise on CPU, where an argmax goes element by element.

    For a row of NaN it is the last token: a valid id with a log-probability that shows what happened.
    """
    V = x_BV.shape[-1]
    place_BV = jnp.where(x_BV == x_BV.max(-1, keepdims=True), jnp.arange(V, dtype=jnp.int32), V - 1)
    return place_BV.min(-1)


def _most_likely(logits_BV: Array, top: int) -> Int[Array, "B W"]:
    if top == 0:
        return jnp.zeros((logits_BV.shape[0], 0), jnp.int32)
    return jax.lax.top_k(logits_BV, top)[1]


def _logprob(logits_BV: Array, token_BW: Array) -> Array:
    """log softmax at W tokens. Relative to the largest logit, as the trainer does: the difference of two
    large logits would lose more bits than all layers before it. It is finite, or the row is broken."""
    shifted_BV = logits_BV - logits_BV.max(-1, keepdims=True)
    total_B = jnp.log(jnp.exp(shifted_BV).sum(-1))
    return jnp.take_along_axis(shifted_BV, token_BW, axis=-1) - total_B[:, None]


def _restricted(params: SamplingParams) -> Bool[Array, ""]:
    """Whether any row truncates: sorting the vocabulary is skipped when none does."""
    return jnp.any((params.top_p_B < 1) | (params.top_k_B > 0) | (params.min_p_B > 0))


def _truncate(logits_BV: Array, params: SamplingParams) -> Array:
    """Top-k, then top-p within what is left, then min-p; the most likely token always stays.

    Tokens whose logit equals that of the last one kept stay too: what is kept is all above a threshold.
    Thresholds are found by bisection, a few dozen passes over the logits where a sort would be far slower.
    """
    order_BV = _ordered(logits_BV)
    largest_B1 = logits_BV.max(-1, keepdims=True)
    weight_BV = jnp.exp(logits_BV - largest_B1)
    kept_B = jnp.where(
        params.top_k_B > 0, jnp.minimum(params.top_k_B, logits_BV.shape[-1]), logits_BV.shape[-1]
    )
    k_B1 = jax.lax.cond(
        jnp.any(params.top_k_B > 0),
        lambda: _threshold(order_BV, jnp.ones_like(weight_BV), kept_B),
        lambda: order_BV.min(-1, keepdims=True),
    )
    # Of those equal to the last one only as many weigh as top-k counts.
    above_BV = order_BV > k_B1
    last_B = jnp.where(order_BV == k_B1, weight_BV, 0).max(-1)
    total_B = jnp.where(above_BV, weight_BV, 0).sum(-1) + (kept_B - above_BV.sum(-1)) * last_B
    # A row without top-p must not lose its tail to rounding because another row has top-p.
    mass_B = jnp.where(params.top_p_B < 1, params.top_p_B * total_B, jnp.inf)
    p_B1 = _threshold(order_BV, weight_BV, mass_B)
    keep_BV = (order_BV >= k_B1) & (order_BV >= p_B1) & (weight_BV >= params.min_p_B[:, None])
    return jnp.where(keep_BV | (logits_BV == largest_B1), logits_BV, _MASKED)


def _ordered(x_BV: Array) -> Array:
    """Integers in the order of the floats, and one for each."""
    bits = jnp.dtype(x_BV.dtype).itemsize * 8
    int_BV = jax.lax.bitcast_convert_type(x_BV, jnp.dtype(f"int{bits}"))
    return int_BV ^ ((int_BV >> (bits - 1)) & jnp.iinfo(int_BV.dtype).max)


def _threshold(order_BV: Array, weight_BV: Array, limit_B: Array) -> Array:
    """[B, 1]: per row the least t with a weight above t of less than the limit, which must be positive."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_B1, high_B1 = bounds
        middle_B1 = (low_B1 & high_B1) + ((low_B1 ^ high_B1) >> 1)
        above_B1 = jnp.where(order_BV > middle_B1, weight_BV, 0).sum(-1, keepdims=True)
        enough_B1 = above_B1 < limit_B[:, None]
        return jnp.where(enough_B1, low_B1, middle_B1), jnp.where(enough_B1, middle_B1, high_B1)

    bounds = order_BV.min(-1, keepdims=True) - 1, order_BV.max(-1, keepdims=True)
    return jax.lax.fori_loop(0, order_BV.dtype.itemsize * 8, halve, bounds)[1]
