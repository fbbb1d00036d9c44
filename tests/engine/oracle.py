"""What the engine's results are compared with: the training forward, and a sampler in plain NumPy."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.contracts import Sampling
from jaxrl.model.transformer import Transformer


@nnx.jit
def _logits(model: Transformer, tokens_BT, segment_ids_BT):
    positions_BT = jnp.arange(tokens_BT.shape[1])[None]
    hidden_BTD = model(tokens_BT, segment_ids_BT=segment_ids_BT, positions_BT=positions_BT)
    return model.logits(hidden_BTD[0])


def forward_logits(model: Transformer, ids: Sequence[int], *, context: int) -> np.ndarray:
    """[T, V]: logits behind each token of `ids` by the training forward, on one row padded to `context`."""
    padded, real = np.zeros((2, 1, context), np.int32)
    padded[0, : len(ids)], real[0, : len(ids)] = ids, 1
    return np.asarray(_logits(model, padded, real))[: len(ids)]


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    """In the dtype of the logits."""
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def sampled_log_softmax(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Log-probabilities of the distribution that `sampling` draws from, by the definition.

    Its numbers are taken as float32, which is what the engine's programs are given.
    """
    given = np.asarray([sampling.temperature, sampling.top_p, sampling.min_p], np.float32)
    temperature, top_p, min_p = given.tolist()
    if sampling.temperature == 0:
        return np.where(np.arange(len(logits_V)) == logits_V.argmax(), 0.0, -np.inf)
    scaled_V = logits_V / temperature
    order_V = np.argsort(-scaled_V, kind="stable")
    kept_V = order_V[: sampling.top_k or None]
    prob_V = np.exp(log_softmax(scaled_V[kept_V]))
    before_V = np.cumsum(prob_V) - prob_V
    keep_V = (before_V < top_p) & (prob_V >= min_p * prob_V[0])
    keep_V[0] = True
    masked_V = np.full_like(scaled_V, -np.inf)
    masked_V[kept_V[keep_V]] = scaled_V[kept_V[keep_V]]
    return log_softmax(masked_V)
