"""Attention in float64 NumPy, one query head at a time."""

import numpy as np


def attention(
    q_BTNH: np.ndarray, k_BSKH: np.ndarray, *, v_BSKH: np.ndarray, mask_BTS: np.ndarray, scale: float
) -> np.ndarray:
    """As the public op, in float64."""
    B, T, N, _ = q_BTNH.shape
    group = N // k_BSKH.shape[2]
    out = np.zeros(q_BTNH.shape)
    for b, t, n in np.ndindex(B, T, N):
        keys = np.flatnonzero(mask_BTS[b, t])
        if keys.size == 0:
            continue
        scores = scale * (k_BSKH[b, keys, n // group].astype(np.float64) @ q_BTNH[b, t, n])
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v_BSKH[b, keys, n // group]
    return out
