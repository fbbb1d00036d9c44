"""Depthwise causal convolution over time, with the inputs it needs carried between calls."""

from jaxtyping import Array, Float, Int

from kernels.causal_conv1d import xla
from kernels.dispatch import choose


def causal_conv1d(
    x_BTD: Float[Array, "B T D"],
    weight_WD: Float[Array, "W D"],
    *,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    taps_BXD: Float[Array, "B W-1 D"] | None = None,
    counts_B: Int[Array, " B"] | None = None,
    implementation: str = "xla",
) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
    """y_t = sum_i weight_i x_(t - W + 1 + i), so that the last of the W weights meets the current token.

    Args:
      segment_ids_BT: contiguous documents; no tap reaches into another one. Carried taps belong to
        the document of the first token. None: one document per row.
      taps_BXD: the W - 1 inputs before the first token; zeros if None.
      counts_B: real tokens of each row, which is padded on the right; T if None.
      implementation: "xla".

    Returns:
      Outputs in x's dtype, and the last W - 1 real inputs; those of a row of count 0 are its old taps.
    """
    run = choose("causal_conv1d", implementation, {"xla": xla.causal_conv1d})
    return run(x_BTD, weight_WD, segment_ids_BT, taps_BXD, counts_B)
