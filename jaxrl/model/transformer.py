"""The decoder: one forward for packed training rows, one for chunked prefill and decode."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int16

from jaxrl.model.attention import PagedKv, Rows
from jaxrl.model.block import Block, Packing, packed_mask
from jaxrl.model.gdn import GdnCache
from jaxrl.model.layers import run_layers
from jaxrl.model.moe import RouterStats
from jaxrl.model.mtp import MtpHead
from jaxrl.model.norms import rms_norm, rope_angles
from jaxrl.model.params import accumulation_dtype, create, top_weights
from jaxrl.model.spec import ModelSpec

__all__ = ["Block", "Cache", "Packing", "Transformer", "packed_mask"]

# One entry per layer: the leading axis is the row in a GDN layer's, the page in an attention layer's.
Cache = tuple[GdnCache | PagedKv, ...]


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
        routes_BTLX: Int16[Array, "B T L X"] | None = None,
    ) -> tuple[Float[Array, "B T D"], RouterStats | None]:
        """As `__call__`, with the routers' sums over real tokens; None for a dense model.

        Args:
          routes_BTLX: experts that each layer is to use for a token, as `extend_with_routes` returns them;
            -1 leaves the choice to the router, whose probabilities weigh them in any case.
        """
        packing = Packing.of(segment_ids_BT, positions_BT, self.spec)
        x_BTD = self.embed[...][tokens_BT]
        x_BTD, stats = run_layers(
            list(self.layers), x_BTD, packing=packing, remat=remat, scan=scan, routes_BTLX=routes_BTLX
        )
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

    def init_cache(self, batch: int, context: int, *, page_size: int = 32) -> Cache:
        """An empty cache for `batch` rows of at most `context` tokens, each row's pages side by side."""
        spec, pages = self.spec, batch * -(-context // page_size)
        return tuple(
            GdnCache.empty(spec, rows=batch)
            if kind == "linear_attention"
            else PagedKv.empty(spec, pages=pages, page_size=page_size)
            for kind in spec.layer_types
        )

    def extend(
        self,
        tokens_BT: Int[Array, "B T"],
        cache: Cache,
        *,
        lengths_B: Int[Array, " B"],
        counts_B: Int[Array, " B"],
        pages_BX: Int[Array, "B X"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Appends tokens to cached rows: chunked prefill, or decode when T == 1.

        Row b holds `lengths_B[b]` tokens and takes the first `counts_B[b]` of its T, the rest is right
        padding whose outputs mean nothing. A row of count 0 keeps its cache, bit for bit. Lengths plus
        counts must not exceed what the row's pages hold: the caller keeps that.

        Args:
          pages_BX: the pages of each row, in order; ids outside the pool stand for none. None: the rows
            of `init_cache`.

        Returns:
          Hidden states after the final norm, and the new cache.
        """
        return self.extend_with_routes(
            tokens_BT, cache, lengths_B=lengths_B, counts_B=counts_B, pages_BX=pages_BX
        )[:2]

    def extend_with_routes(
        self,
        tokens_BT: Int[Array, "B T"],
        cache: Cache,
        *,
        lengths_B: Int[Array, " B"],
        counts_B: Int[Array, " B"],
        pages_BX: Int[Array, "B X"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache, Int16[Array, "B T L X"]]:
        """As `extend`, with the experts chosen in each layer L, most probable first (X = 0 if dense)."""
        (B, T), new, routes = tokens_BT.shape, [], []
        rope = rope_angles(lengths_B[:, None] + jnp.arange(T), self.spec)
        rows = Rows(lengths_B, counts_B, _own_pages(cache, B) if pages_BX is None else pages_BX)
        x_BTD = self.embed[...][tokens_BT]
        for block, layer_cache in zip(self.layers, cache, strict=True):
            x_BTD, layer_cache, route_BTX = block.extend(x_BTD, layer_cache, rope=rope, rows=rows)
            new.append(layer_cache)
            routes.append(route_BTX)
        hidden_BTD = rms_norm(x_BTD, self.norm[...], eps=self.spec.norm_eps)
        return hidden_BTD, tuple(new), jnp.stack(routes, axis=2)

    def head_weight(self) -> Float[Array, "D V"]:
        """The head's matrix, the transposed embedding if tied."""
        return self.embed[...].T if self.spec.tie_embeddings else self.head[...]

    def logits(self, hidden_D: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits in float32 (float64 for a float64 model)."""
        dtype = accumulation_dtype(hidden_D.dtype)
        return hidden_D.astype(dtype) @ self.head_weight().astype(dtype)


def _own_pages(cache: Cache, batch: int) -> Int[Array, "B X"]:
    pages = next((layer.k_PSKH.shape[0] for layer in cache if isinstance(layer, PagedKv)), 0)
    return jnp.arange(pages, dtype=jnp.int32).reshape(batch, -1)
