"""The expert layer of a mixture: grouped matmuls over the tokens routed to each expert."""

from functools import partial

from jax import lax
from jaxtyping import Array, Float

from kernels.dispatch import choose
from kernels.grouped_matmul import tiled, xla


def expert_mlp(
    x_TD: Float[Array, "T D"],
    combine_TE: Float[Array, "T E"],
    *,
    gate_up_EDF: Float[Array, "E D F2"],
    down_EFD: Float[Array, "E F D"],
    experts_per_token: int,
    implementation: str = "auto",
) -> Float[Array, "T D"]:
    """sum_e combine_te down_e(silu(gate_e x_t) * up_e x_t), with gate_up's columns [gate | up].

    Args:
      combine_TE: routing weights, 0 for experts that a token did not choose.
      experts_per_token: how many entries of a row of `combine_TE` may differ from 0.
      implementation: "tiled" (sorted tokens in a loop over tiles of one expert each; for CPUs, where it
        does least work; it has no forward-mode derivative), "ragged" (tokens sorted by expert,
        `lax.ragged_dot`), "dense_masked" (every expert on every token in two plain matmuls) or "auto":
        tiled where the program is compiled for a CPU, else ragged.
    """
    table = {"auto": _auto, "dense_masked": xla.dense_masked, "ragged": xla.ragged, "tiled": tiled.tiled}
    run = choose("expert_mlp", implementation, table)
    return run(x_TD, combine_TE, gate_up_EDF, down_EFD, experts_per_token)


def _auto(x_TD, combine_TE, gate_up_EDF, down_EFD, experts_per_token):
    cpu, other = (partial(run, experts_per_token=experts_per_token) for run in (tiled.tiled, xla.ragged))
    return lax.platform_dependent(x_TD, combine_TE, gate_up_EDF, down_EFD, cpu=cpu, default=other)
