"""Gated delta rule: the recurrence of a Gated DeltaNet layer."""

from jaxtyping import Array, Float, Int

from kernels.dispatch import choose
from kernels.gated_delta_rule import xla


def gated_delta_rule(
    q_BTKH: Float[Array, "B T K H"],
    k_BTKH: Float[Array, "B T K H"],
    *,
    v_BTNJ: Float[Array, "B T N J"],
    g_BTN: Float[Array, "B T N"],
    beta_BTN: Float[Array, "B T N"],
    segment_ids_BT: Int[Array, "B T"] | None = None,
    initial_state_BNHJ: Float[Array, "B N H J"] | None = None,
    implementation: str = "xla",
) -> tuple[Float[Array, "B T N J"], Float[Array, "B N H J"]]:
    """Runs S <- exp(g) S + k (beta (v - k^T exp(g) S))^T and reads o = S^T q after each write.

    N value heads share K key heads in groups: value head n reads key head n // (N // K). J is the
    value head dim. q and k come normalised and scaled; g <= 0 is the log decay. A token with
    g = beta = 0 leaves the state as it is.

    Args:
      segment_ids_BT: contiguous documents; the state is reset to zero at each change of id. The
        initial state belongs to the segment of the first token. None: one document per row.
      initial_state_BNHJ: state before the first token; zeros if None.
      implementation: "xla" (chunked; one recurrent step when T == 1) or "recurrent" (token by token).

    Returns:
      Outputs and the state after the last token, both in float32 (float64 for float64 inputs). For
      T == 0 that is the initial state.

    Raises:
      ValueError: unknown implementation, or N not a multiple of K.
    """
    key_heads, value_heads = q_BTKH.shape[2], v_BTNJ.shape[2]
    if value_heads % key_heads:
        raise ValueError(
            f"gated_delta_rule: expected value heads to be a multiple of the {key_heads} key heads; "
            f"got {value_heads}"
        )
    table = {"xla": xla.chunked_or_step, "recurrent": xla.recurrent}
    run = choose("gated_delta_rule", implementation, table)
    return run(q_BTKH, k_BTKH, v_BTNJ, g_BTN, beta_BTN, segment_ids_BT, initial_state_BNHJ)
