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
    noisy_BV = scaled_BV + jnp.where(greedy_B[:, None], 0.0, _gumbel(params.key_B2, positions_B, logits_BV))
    token_B = jnp.argmax(noisy_BV, axis=-1).astype(jnp.int32)
    logprob_B = jnp.where(greedy_B, 0.0, _gather_log_softmax(scaled_BV, token_B))
    return Sampled(token_B, logprob_B, _gather_log_softmax(logits_BV, token_B), *_most_likely(logits_BV, top))


def _most_likely(logits_BV: Array, top: int) -> tuple[Array, Array]:
    if top == 0:
        return jnp.zeros((logits_BV.shape[0], 0), jnp.int32), jnp.zeros(
            (logits_BV.shape[0], 0), logits_BV.dtype
        )
    logit_BW, token_BW = jax.lax.top_k(logits_BV, top)
    return token_BW, logit_BW - jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)


def _gumbel(key_B2: Array | np.ndarray, positions_B: Array, like_BV: Array) -> Array:
    def row(words, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
        return jax.random.gumbel(key, like_BV.shape[1:], like_BV.dtype)

    return jax.vmap(row)(key_B2, positions_B)


def _gather_log_softmax(logits_BV: Array, token_B: Array) -> Array:
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def _restricted(params: SamplingParams) -> Bool[Array, ""]:
    """Whether any row truncates: sorting the vocabulary is skipped when none does."""
    return jnp.any((params.top_p_B < 1) | (params.top_k_B > 0) | (params.min_p_B > 0))


def _truncate(logits_BV: Array, params: SamplingParams) -> Array:
    """Top-k, then top-p within what is left, then min-p; the most likely token always stays.

    Tokens whose logit equals that of the last one kept stay too: the kept set is a threshold, so that
    values are sorted and not their places.
    """
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    rank_V = jnp.arange(logits_BV.shape[-1])
    top_k_B = jnp.where(params.top_k_B > 0, params.top_k_B, logits_BV.shape[-1])
    in_top_BV = rank_V < top_k_B[:, None]
    prob_BV = jax.nn.softmax(jnp.where(in_top_BV, sorted_BV, _MASKED), axis=-1)
    before_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV
    keep_BV = (before_BV < params.top_p_B[:, None]) & (prob_BV >= params.min_p_B[:, None] * prob_BV[:, :1])
    keep_BV = (keep_BV & in_top_BV) | (rank_V == 0)
    least_B = jnp.where(keep_BV, sorted_BV, jnp.inf).min(axis=-1)
    return jnp.where(logits_BV >= least_B[:, None], logits_BV, _MASKED)
