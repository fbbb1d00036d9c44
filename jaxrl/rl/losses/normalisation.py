"""How tokens are weighed against one another, as a sum over microbatches. Pure JAX."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.rl.losses.segments import sequence_count, sequence_sum

Normalisation = Literal["token", "sequence", "constant"]


def normalised(
    weights_BT: Float[Array, "B T"],
    *,
    segment_ids_BT: Int[Array, "B T"],
    normalisation: Normalisation,
    constant_length: int | None,
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """Token weights of the numerator, and the microbatch's share of the denominator.

    `token` divides by the number of trained tokens (DAPO, arXiv:2503.14476), `sequence` averages over each
    sequence first (GRPO, arXiv:2402.03300), `constant` divides a sequence's sum by `constant_length`
    (Dr.GRPO, arXiv:2503.20783).
    """
    if normalisation == "token":
        return weights_BT, weights_BT.sum()
    sequences = sequence_count(weights_BT, segment_ids_BT)
    if normalisation == "sequence":
        total_BT = sequence_sum(weights_BT, segment_ids_BT)
        return weights_BT / jnp.where(total_BT > 0, total_BT, 1.0), sequences
    assert constant_length is not None
    return weights_BT / constant_length, sequences
