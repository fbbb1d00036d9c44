"""One decoder layer, and how the tokens of packed rows belong together."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from jaxrl.model.attention import GatedAttention, PagedKv, Rope, Rows
from jaxrl.model.gdn import GatedDeltaNet, GdnCache
from jaxrl.model.moe import Mlp, MoE
from jaxrl.model.norms import rms_norm, rope_angles
from jaxrl.model.params import block_weights, create
from jaxrl.model.spec import ModelSpec


class Packing(NamedTuple):
    """How the tokens of training rows belong together; the same for all layers."""

    segment_ids_BT: Array
    mask_BTS: Array
    rope: Rope

    @property
    def valid_BT(self) -> Array:
        """Real tokens."""
        return self.segment_ids_BT != 0

    @classmethod
    def of(
        cls, segment_ids_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"], spec: ModelSpec
    ) -> "Packing":
        """Masks and angles of rows whose segment 0 is padding."""
        return cls(segment_ids_BT, packed_mask(segment_ids_BT), rope_angles(positions_BT, spec))


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

    def __call__(
        self, x_BTD: Array, packing: Packing, *, routes_BTX: Array | None = None
    ) -> tuple[Array, tuple[Array, Array] | None]:
        """Packed rows; returns the residual stream and the router sums, None for a dense MLP.

        Args:
          routes_BTX: experts to use, see `MoE`.
        """
        h_BTD = rms_norm(x_BTD, self.mixer_norm[...], eps=self.eps)
        if isinstance(self.mixer, GatedDeltaNet):
            x_BTD = x_BTD + self.mixer(h_BTD, segment_ids_BT=packing.segment_ids_BT)
        else:
            x_BTD = x_BTD + self.mixer(h_BTD, rope=packing.rope, mask_BTS=packing.mask_BTS)
        h_BTD = rms_norm(x_BTD, self.mlp_norm[...], eps=self.eps)
        y_BTD, stats = self.mlp(h_BTD, packing.valid_BT, routes_BTX=routes_BTX)
        return x_BTD + y_BTD, stats

    def extend(
        self, x_BTD: Array, cache: GdnCache | PagedKv, *, rope: Rope, rows: Rows
    ) -> tuple[Array, GdnCache | PagedKv, Array]:
        """Continues cached rows; the third result are the experts chosen, [B, T, 0] of a dense layer."""
        h_BTD = rms_norm(x_BTD, self.mixer_norm[...], eps=self.eps)
        if isinstance(self.mixer, GatedDeltaNet):
            assert isinstance(cache, GdnCache)
            y_BTD, new = self.mixer.extend(h_BTD, cache, counts_B=rows.counts_B)
        else:
            assert isinstance(cache, PagedKv)
            y_BTD, new = self.mixer.extend(h_BTD, cache, rope=rope, rows=rows)
        x_BTD = x_BTD + y_BTD
        h_BTD = rms_norm(x_BTD, self.mlp_norm[...], eps=self.eps)
        return x_BTD + self.mlp(h_BTD)[0], new, self.mlp.routes(h_BTD)


def packed_mask(segment_ids_BT: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Which keys each query of a packed row sees: its own document's, up to itself; padding sees none."""
    T = segment_ids_BT.shape[1]
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return same_BTS & (segment_ids_BT != 0)[:, :, None] & jnp.tri(T, dtype=bool)
