"""A tiny packed language model and random documents for the tests of `jaxrl.rl`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.rl.loss import Scores
from jaxrl.rl.packing import Example, Microbatch

VOCAB = 11


class TinyModel(nnx.Module):
    """Sees the mean of its own document's earlier tokens, and nothing of other documents."""

    def __init__(self, *, rngs: nnx.Rngs, width: int = 8) -> None:
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.place = nnx.Embed(64, width, rngs=rngs)
        self.hidden = nnx.Linear(width, 2 * width, rngs=rngs)
        self.norm = nnx.RMSNorm(2 * width, rngs=rngs)
        self.head = nnx.Linear(2 * width, VOCAB, rngs=rngs)

    def __call__(self, tokens_BT, *, segment_ids_BT, positions_BT):
        x_BTD = self.embed(tokens_BT) + self.place(positions_BT)
        length = tokens_BT.shape[1]
        same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
        seen_BTS = (same_BTS & jnp.tril(jnp.ones((length, length), bool))).astype(x_BTD.dtype)
        mean_BTD = jnp.einsum("bts,bsd->btd", seen_BTS / seen_BTS.sum(-1, keepdims=True), x_BTD)
        return self.head(self.norm(jax.nn.silu(self.hidden(x_BTD + mean_BTD))))


def score(model: TinyModel, batch: Microbatch) -> Scores:
    logits_BTV = model(batch.tokens_BT, segment_ids_BT=batch.segment_ids_BT, positions_BT=batch.positions_BT)
    logprobs_BTV = jax.nn.log_softmax(logits_BTV)
    targets_BT1 = jnp.asarray(batch.targets_BT)[..., None]
    logprobs_BT = jnp.take_along_axis(logprobs_BTV, targets_BT1, axis=-1)[..., 0]
    entropy_BT = -(jnp.exp(logprobs_BTV) * logprobs_BTV).sum(-1)
    return Scores(logprobs_BT, entropy_BT, jnp.zeros_like(logprobs_BT), jnp.zeros((), logprobs_BT.dtype))


def tiny_model(seed: int = 0) -> TinyModel:
    return TinyModel(rngs=nnx.Rngs(seed))


def random_examples(count: int, *, seed: int = 0, longest: int = 12, trained: bool = True) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [_random_example(rng, int(rng.integers(2, longest + 1)), trained) for _ in range(count)]


def _random_example(rng: np.random.Generator, length: int, trained: bool) -> Example:
    weights_T = (rng.random(length) < 0.6).astype(np.float32) * trained
    weights_T[0] = 0
    return Example(
        tokens_T=rng.integers(0, VOCAB, length).astype(np.int32),
        weights_T=weights_T,
        logprobs_T=(rng.normal(-2.4, 0.3, length)).astype(np.float32),
        advantage=float(rng.normal()),
    )
