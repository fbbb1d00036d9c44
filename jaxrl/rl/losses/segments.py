"""Sums over tokens and over the documents of packed rows. Pure JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def count(mask_BT: Array) -> Float[Array, ""]:
    """How many entries are true."""
    return mask_BT.sum().astype(jnp.float32)


def masked_sum(weights_BT: Array, values_BT: Array) -> Float[Array, ""]:
    """Sum of weight * value in which a value at weight 0 cannot make a NaN, nor its gradient."""
    weights_BT = jnp.asarray(weights_BT)
    return (weights_BT * jnp.where(weights_BT != 0, values_BT, 0.0)).sum()


def sequence_sum(values_BT: Float[Array, "B T"], segment_ids_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Each token gets the sum over its own document."""
    return jnp.take_along_axis(_segment_sums(values_BT, segment_ids_BT), segment_ids_BT, axis=1)


def sequence_mean(
    values_BT: Float[Array, "B T"], weights_BT: Float[Array, "B T"], *, segment_ids_BT: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Each token gets the mean over its document's tokens of weight > 0; 0 where there is none."""
    mask_BT = (weights_BT > 0).astype(values_BT.dtype)
    tokens_BT = sequence_sum(mask_BT, segment_ids_BT)
    return sequence_sum(mask_BT * values_BT, segment_ids_BT) / jnp.maximum(tokens_BT, 1.0)


def sequence_count(weights_BT: Float[Array, "B T"], segment_ids_BT: Int[Array, "B T"]) -> Float[Array, ""]:
    """Documents that have weight."""
    return count(_segment_sums(weights_BT, segment_ids_BT)[:, 1:] > 0)


def _segment_sums(values_BT: Array, segment_ids_BT: Array) -> Array:
    """Sum of each row's values by segment, [B, T + 1]; column 0 is padding's."""
    length = values_BT.shape[1]

    def row(values_T: Array, segment_ids_T: Array) -> Array:
        return jax.ops.segment_sum(values_T, segment_ids_T, num_segments=length + 1)

    return jax.vmap(row)(values_BT, segment_ids_BT)
