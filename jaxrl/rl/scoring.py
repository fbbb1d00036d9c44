"""Scores microbatches with a `jaxrl.model` transformer."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxrl.model.logprob import target_logprobs
from jaxrl.model.moe import balancing_loss
from jaxrl.model.transformer import Transformer
from jaxrl.rl.loss import Scores
from jaxrl.rl.packing import Microbatch


@dataclass(frozen=True, kw_only=True)
class TransformerScorer:
    """Log-probs, entropy and the routers' balancing loss of a packed microbatch.

    temperature: the sampler's, so that both sides speak of the same distribution.
    chunk: tokens whose logits exist at a time.
    remat: recompute each layer in the backward pass.
    replay: use the experts that the sampler used (`routes_BTLX`), not the router's own choice.
    """

    temperature: float = 1.0
    chunk: int = 1024
    remat: bool = False
    replay: bool = False

    def __call__(self, model: Transformer, batch: Microbatch) -> Scores:
        """Scores every position; those of weight 0 mean nothing.

        Raises:
            ValueError: routing is to be replayed and was not recorded.
        """
        if self.replay and batch.routes_BTLX is None:
            raise ValueError(
                "expected the sampler's experts in the batch, got none: record them "
                "(EngineOptions.routed_experts), or do not replay"
            )
        hidden_BTD, router = model.with_router(
            jnp.asarray(batch.tokens_BT),
            segment_ids_BT=jnp.asarray(batch.segment_ids_BT),
            positions_BT=jnp.asarray(batch.positions_BT),
            remat=self.remat,
            routes_BTLX=jnp.asarray(batch.routes_BTLX) if self.replay else None,
        )
        scores = target_logprobs(
            hidden_BTD,
            model.head_weight(),
            targets_B=jnp.asarray(batch.targets_BT),
            temperature=self.temperature,
            chunk=self.chunk,
        )
        aux = jnp.zeros((), scores.logprob_B.dtype) if router is None else balancing_loss(router)
        return Scores(scores.logprob_B, scores.entropy_B, scores.norm_B, aux)
