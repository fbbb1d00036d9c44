"""Multi-token prediction: one more decoder layer that looks two tokens ahead."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.model.block import Block, Packing
from jaxrl.model.norms import rms_norm
from jaxrl.model.params import create, mtp_weights
from jaxrl.model.spec import ModelSpec


class MtpHead(nnx.Module):
    """norm(layer(fc [norm(next token's embedding); norm(hidden state)])); embedding and head are shared."""

    fc: nnx.Param
    embedding_norm: nnx.Param
    hidden_norm: nnx.Param
    norm: nnx.Param

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        self.eps = spec.norm_eps
        create(self, mtp_weights(spec), rngs)
        self.layer = Block(spec, kind="full_attention", rngs=rngs)

    def __call__(
        self,
        hidden_BTD: Float[Array, "B T D"],
        embedded_BTD: Float[Array, "B T D"],
        *,
        packing: Packing,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the block's norm.

        Args:
          hidden_BTD: hidden states after the final norm, as the text model returns them.
          embedded_BTD: embeddings of the rows' own tokens; the block reads those of the next ones, zeros at
            the last token of a document.
        """
        segments_BT = packing.segment_ids_BT
        following_BT = jnp.pad(segments_BT[:, 1:], ((0, 0), (0, 1)))
        next_BTD = jnp.pad(embedded_BTD[:, 1:], ((0, 0), (0, 1), (0, 0)))
        next_BTD = jnp.where((following_BT == segments_BT)[..., None], next_BTD, 0)
        joined = jnp.concatenate(
            [
                rms_norm(next_BTD, self.embedding_norm[...], eps=self.eps),
                rms_norm(hidden_BTD, self.hidden_norm[...], eps=self.eps),
            ],
            axis=-1,
        )
        x_BTD, _ = self.layer(joined @ self.fc[...], packing)
        return rms_norm(x_BTD, self.norm[...], eps=self.eps)
