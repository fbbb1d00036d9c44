"""The decoder: one forward for packed training rows, one for chunked prefill and decode."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrl.model.attention import GatedAttention, KvCache, Rope
from jaxrl.model.gdn import GatedDeltaNet, GdnCache
from jaxrl.model.moe import Mlp, MoE, RouterStats
from jaxrl.model.norms import rms_norm, rope_angles
from jaxrl.model.params import accumulation_dtype, block_weights, create, top_weights
from jaxrl.model.spec import ModelSpec

# One entry per layer; the leading axis of every leaf is the row.
Cache = tuple[GdnCache | KvCache, ...]


class Packing(NamedTuple):
    """How the tokens of training rows belong together; the same for all layers."""

    segment_ids_BT: Array
    mask_BTS: Array
    rope: Rope

    @property
    def valid_BT(self) -> Array:
        """Real tokens."""
        return self.segment_ids_BT != 0


class Block(nnx.Module):
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    mixer_norm: nnx.Param
    mlp_norm: nnx.Param

    def __init__(self, spec: ModelSpec, *, kind: str, rngs: nnx.Rngs):
        self.eps = spec.norm_eps
        create(self, block_weights(spec), rngs)
        self.mixer = (GatedDeltaNet if kind == "linear_attention" else GatedAttention)(spec, rngs=rngs)
        if spec.mlp_dim is None:
            self.mlp = MoE(spec, rngs=rngs)
        else:
            self.mlp = Mlp(spec, width=spec.mlp_dim, hub="mlp", rngs=rngs)

    def __call__(self, x_BTD: Array, packing: Packing) -> tuple[Array, tuple[Array, Array] | None]:
        """Packed rows; returns the residual stream and the router sums, None for a dense MLP."""
        h_BTD = rms_norm(x_BTD, self.mixer_norm[...], eps=self.eps)
        if isinstance(self.mixer, GatedDeltaNet):
            x_BTD = x_BTD + self.mixer(h_BTD, segment_ids_BT=packing.segment_ids_BT)
        else:
            x_BTD = x_BTD + self.mixer(h_BTD, rope=packing.rope, mask_BTS=packing.mask_BTS)
        return self._mlp(x_BTD, packing.valid_BT)

    def extend(
        self, x_BTD: Array, cache: GdnCache | KvCache, *, rope: Rope, lengths_B: Array, counts_B: Array
    ) -> tuple[Array, GdnCache | KvCache]:
        """Continues cached rows."""
        h_BTD = rms_norm(x_BTD, self.mixer_norm[...], eps=self.eps)
        if isinstance(self.mixer, GatedDeltaNet):
            assert isinstance(cache, GdnCache)
            y_BTD, new = self.mixer.extend(h_BTD, cache, counts_B=counts_B)
        else:
            assert isinstance(cache, KvCache)
            y_BTD, new = self.mixer.extend(h_BTD, cache, rope=rope, lengths_B=lengths_B, counts_B=counts_B)
        return self._mlp(x_BTD + y_BTD, None)[0], new

    def _mlp(self, x_BTD: Array, valid_BT: Array | None) -> tuple[Array, tuple[Array, Array] | None]:
        y_BTD, stats = self.mlp(rms_norm(x_BTD, self.mlp_norm[...], eps=self.eps), valid_BT)
        return x_BTD + y_BTD, stats


class Transformer(nnx.Module):
    """The text model. Split it with `nnx.split` to pass its state through `jax.jit`."""

    embed: nnx.Param
    norm: nnx.Param
    head: nnx.Param  # absent if the embeddings are tied

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        self.spec = spec
        create(self, top_weights(spec), rngs)
        self.layers = nnx.List([Block(spec, kind=kind, rngs=rngs) for kind in spec.layer_types])

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        remat: bool = False,
    ) -> Float[Array, "B T D"]:
        """Hidden states of packed rows after the final norm, in the model's dtype.

        Args:
          segment_ids_BT: 0 is padding; each other id is one contiguous document of its row.
          positions_BT: position of each token within its document.
          remat: keep only each layer's input for the backward pass.
        """
        return self.with_router(
            tokens_BT, segment_ids_BT=segment_ids_BT, positions_BT=positions_BT, remat=remat
        )[0]

    def with_router(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        remat: bool = False,
    ) -> tuple[Float[Array, "B T D"], RouterStats | None]:
        """As `__call__`, with the routers' sums over real tokens; None for a dense model."""
        rope = rope_angles(positions_BT, self.spec)
        packing = Packing(segment_ids_BT, packed_mask(segment_ids_BT), rope)
        x_BTD, stats = self.embed[...][tokens_BT], []
        for block in self.layers:
            x_BTD, sums = (_remat_block if remat else _run_block)(block, x_BTD, packing)
            stats.append(sums)
        hidden_BTD = rms_norm(x_BTD, self.norm[...], eps=self.spec.norm_eps)
        return hidden_BTD, _router_stats(stats, packing.valid_BT) if self.spec.is_moe else None

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


def packed_mask(segment_ids_BT: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Which keys each query of a packed row sees: its own document's, up to itself; padding sees none."""
    T = segment_ids_BT.shape[1]
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return same_BTS & (segment_ids_BT != 0)[:, :, None] & jnp.tri(T, dtype=bool)


def _run_block(block: Block, x_BTD: Array, packing: Packing):
    return block(x_BTD, packing)


def _remat_block(block: Block, x_BTD: Array, packing: Packing):
    graph, state = nnx.split(block)
    return jax.checkpoint(lambda state, x, packing: nnx.merge(graph, state)(x, packing))(
        state, x_BTD, packing
    )


def _router_stats(stats, valid_BT: Array) -> RouterStats:
    counts_LE, probability_LE = (jnp.stack(part) for part in zip(*stats, strict=True))
    return RouterStats(counts_LE, probability_LE, valid_BT.sum().astype(probability_LE.dtype))
