"""The decoder: one forward for packed training rows, one for chunked prefill and decode."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl.model.attention import KvCache
from jaxrl.model.block import Block, Packing, packed_mask
from jaxrl.model.gdn import GdnCache
from jaxrl.model.layers import run_layers
from jaxrl.model.moe import RouterStats
from jaxrl.model.mtp import MtpHead
from jaxrl.model.norms import rms_norm, rope_angles
from jaxrl.model.params import accumulation_dtype, create, top_weights
from jaxrl.model.spec import ModelSpec

__all__ = ["Block", "Cache", "Packing", "Transformer", "packed_mask"]

# One entry per layer; the leading axis of every leaf is the row.
Cache = tuple[GdnCache | KvCache, ...]


class Transformer(nnx.Module):
    """The text model. Split it with `nnx.split` to pass its state through `jax.jit`."""

    embed: nnx.Param
    norm: nnx.Param
    head: nnx.Param  # absent if the embeddings are tied

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        self.spec = spec
        create(self, top_weights(spec), rngs)
        self.layers = nnx.List([Block(spec, kind=kind, rngs=rngs) for kind in spec.layer_types])
        if spec.mtp:
            self.mtp = MtpHead(spec, rngs=rngs)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        remat: bool = False,
        scan: bool = False,
    ) -> Float[Array, "B T D"]:
        """Hidden states of packed rows after the final norm, in the model's dtype.

        Args:
          segment_ids_BT: 0 is padding; each other id is one contiguous document of its row.
          positions_BT: position of each token within its document.
          remat: keep only each layer's input for the backward pass.
          scan: compile one period of layers instead of all; same values up to rounding. It stacks the
            weights, which takes as much memory again: for many layers, where compiling is what hurts.
        """
        return self.with_router(
            tokens_BT, segment_ids_BT=segment_ids_BT, positions_BT=positions_BT, remat=remat, scan=scan
        )[0]

    def with_router(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        remat: bool = False,
        scan: bool = False,
    ) -> tuple[Float[Array, "B T D"], RouterStats | None]:
        """As `__call__`, with the routers' sums over real tokens; None for a dense model."""
        packing = Packing.of(segment_ids_BT, positions_BT, self.spec)
        x_BTD = self.embed[...][tokens_BT]
        x_BTD, stats = run_layers(list(self.layers), x_BTD, packing=packing, remat=remat, scan=scan)
        return rms_norm(x_BTD, self.norm[...], eps=self.spec.norm_eps), stats

    def mtp_hidden(
        self,
        hidden_BTD: Float[Array, "B T D"],
        tokens_BT: Int[Array, "B T"],
        *,
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """The multi-token-prediction block's hidden states: those at t predict token t + 2 of the document.

        Args:
          hidden_BTD: what the model's forward returned for the same rows.

        Raises:
          ValueError: the model has no such block (`spec.mtp`).
        """
        if not self.spec.mtp:
            raise ValueError(
                "expected a model with its multi-token-prediction block; got mtp=False: load it so"
            )
        packing = Packing.of(segment_ids_BT, positions_BT, self.spec)
        return self.mtp(hidden_BTD, self.embed[...][tokens_BT], packing=packing)

    def mtp_logits(
        self,
        hidden_BTD: Float[Array, "B T D"],
        tokens_BT: Int[Array, "B T"],
        *,
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
    ) -> Float[Array, "B T V"]:
        """Logits of `mtp_hidden`: at t those of token t + 2, meaningless at a document's last token."""
        return self.logits(
            self.mtp_hidden(hidden_BTD, tokens_BT, segment_ids_BT=segment_ids_BT, positions_BT=positions_BT)
        )

    def init_cache(self, batch: int, context: int) -> Cache:
        """An empty cache for `batch` rows of at most `context` tokens."""
        return tuple(block.mixer.init_cache(batch, context) for block in self.layers)

    def extend(
        self,
        tokens_BT: Int[Array, "B T"],
        cache: Cache,
        *,
        lengths_B: Int[Array, " B"],
        counts_B: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Appends tokens to cached rows: chunked prefill, or decode when T == 1.

        Row b holds `lengths_B[b]` tokens and takes the first `counts_B[b]` of its T, the rest is right
        padding whose outputs mean nothing. A row of count 0 keeps its cache, bit for bit. Lengths plus
        counts must not exceed the context the cache was made for: the caller keeps that.

        Returns:
          Hidden states after the final norm, and the new cache.
        """
        T = tokens_BT.shape[1]
        rope = rope_angles(lengths_B[:, None] + jnp.arange(T), self.spec)
        x_BTD, new = self.embed[...][tokens_BT], []
        for block, layer_cache in zip(self.layers, cache, strict=True):
            x_BTD, layer_cache = block.extend(
                x_BTD, layer_cache, rope=rope, lengths_B=lengths_B, counts_B=counts_B
            )
            new.append(layer_cache)
        return rms_norm(x_BTD, self.norm[...], eps=self.spec.norm_eps), tuple(new)

    def head_weight(self) -> Float[Array, "D V"]:
        """The head's matrix, the transposed embedding if tied."""
        return self.embed[...].T if self.spec.tie_embeddings else self.head[...]

    def logits(self, hidden_D: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits in float32 (float64 for a float64 model)."""
        dtype = accumulation_dtype(hidden_D.dtype)
        return hidden_D.astype(dtype) @ self.head_weight().astype(dtype)
