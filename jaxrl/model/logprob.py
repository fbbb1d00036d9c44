"""Log-probabilities and entropies without ever holding [tokens, vocabulary]."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.model.params import accumulation_dtype


class TargetScores(NamedTuple):
    """What the softmax says about each target, in nats; all in the shape of the targets."""

    logprob_B: Float[Array, "*B"]
    entropy_B: Float[Array, "*B"]
    norm_B: Float[Array, "*B"]  # log of the sum of exp(logits / temperature)


def target_logprobs(
    hidden_BD: Float[Array, "*B D"],
    head_DV: Float[Array, "D V"],
    *,
    targets_B: Int[Array, "*B"],
    temperature: float = 1.0,
    chunk: int = 1024,
) -> TargetScores:
    """log softmax(hidden head / temperature)[target], and the entropy and log-normaliser of that softmax.

    The logits of `chunk` tokens exist at a time, in the backward pass too, where they are computed
    again. Everything is float32 (float64 for a float64 model), and differentiable.

    Args:
      hidden_BD: hidden states after the final norm, any leading axes.
      targets_B: one target id per hidden state, 0 <= id < V.
      temperature: the sampler's, > 0; ratios are 1 only if both sides use the same.
    """
    dtype = accumulation_dtype(hidden_BD.dtype)
    hidden_TD, targets_T = hidden_BD.reshape(-1, hidden_BD.shape[-1]), targets_B.reshape(-1)
    tokens = targets_T.size
    chunk = min(chunk, tokens)
    pad = -tokens % chunk
    hidden = jnp.pad(hidden_TD, ((0, pad), (0, 0))).reshape(-1, chunk, hidden_TD.shape[1])
    targets = jnp.pad(targets_T, (0, pad)).reshape(-1, chunk)
    head_DV = head_DV.astype(dtype) / temperature
    body = jax.checkpoint(partial(_chunk_logprobs, head_DV))
    outputs = jax.lax.map(lambda xs: body(*xs), (hidden, targets))
    return TargetScores(*(x.reshape(-1)[:tokens].reshape(targets_B.shape) for x in outputs))


def _chunk_logprobs(head_DV: Array, hidden_CD: Array, targets_C: Array) -> TargetScores:
    logits_CV = hidden_CD.astype(head_DV.dtype) @ head_DV
    # Relative to the largest logit, as the sampler does: a log-prob that is the difference of two numbers of
    # about 20 is exact to 2e-6 only, more than all layers before it lose.
    largest_C = jax.lax.stop_gradient(logits_CV.max(-1))
    shifted_CV = logits_CV - largest_C[:, None]
    total_C = jnp.log(jnp.exp(shifted_CV).sum(-1))
    # A masked sum, since the gradient of a gather is a scatter, which is slow on CPU.
    is_target_CV = jnp.arange(logits_CV.shape[-1]) == targets_C[:, None]
    logprob_C = jnp.where(is_target_CV, shifted_CV, 0).sum(-1) - total_C
    entropy_C = total_C - (jnp.exp(shifted_CV - total_C[:, None]) * shifted_CV).sum(-1)
    return TargetScores(logprob_C, entropy_C, largest_C + total_C)
