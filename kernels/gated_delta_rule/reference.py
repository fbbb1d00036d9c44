"""The recurrence in float64 NumPy, one token at a time: the only oracle of this op."""

import numpy as np


def gated_delta_rule(
    q_BTKH: np.ndarray,
    k_BTKH: np.ndarray,
    *,
    v_BTNJ: np.ndarray,
    g_BTN: np.ndarray,
    beta_BTN: np.ndarray,
    segment_ids_BT: np.ndarray | None = None,
    initial_state_BNHJ: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """As the public op: returns (o_BTNJ, state_BNHJ) in float64."""
    B, T, K, H = q_BTKH.shape
    N, J = v_BTNJ.shape[2:]
    q_BTNH, k_BTNH = (np.repeat(x.astype(np.float64), N // K, axis=2) for x in (q_BTKH, k_BTKH))
    g_BTN, beta_BTN = g_BTN.astype(np.float64), beta_BTN.astype(np.float64)
    S_BNHJ = np.zeros((B, N, H, J)) if initial_state_BNHJ is None else initial_state_BNHJ.astype(np.float64)
    o_BTNJ = np.zeros((B, T, N, J))
    for t in range(T):
        if t and segment_ids_BT is not None:
            same_B = segment_ids_BT[:, t] == segment_ids_BT[:, t - 1]
            S_BNHJ = np.where(same_B[:, None, None, None], S_BNHJ, 0.0)
        S_BNHJ = S_BNHJ * np.exp(g_BTN[:, t])[..., None, None]
        recalled_BNJ = np.einsum("bnh,bnhj->bnj", k_BTNH[:, t], S_BNHJ)
        delta_BNJ = beta_BTN[:, t, :, None] * (v_BTNJ[:, t] - recalled_BNJ)
        S_BNHJ = S_BNHJ + k_BTNH[:, t, :, :, None] * delta_BNJ[:, :, None, :]
        o_BTNJ[:, t] = np.einsum("bnh,bnhj->bnj", q_BTNH[:, t], S_BNHJ)
    return o_BTNJ, S_BNHJ
