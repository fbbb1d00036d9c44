"""The convolution in float64 NumPy loops."""

import numpy as np


def causal_conv1d(
    x_BTD: np.ndarray,
    weight_WD: np.ndarray,
    *,
    segment_ids_BT: np.ndarray | None = None,
    taps_BXD: np.ndarray | None = None,
    counts_B: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """As the public op, in float64."""
    (B, T, D), W = x_BTD.shape, weight_WD.shape[0]
    taps = np.zeros((B, W - 1, D)) if taps_BXD is None else taps_BXD.astype(np.float64)
    segments = np.zeros((B, T), int) if segment_ids_BT is None else segment_ids_BT
    y, last = np.zeros((B, T, D)), np.zeros((B, W - 1, D))
    for b in range(B):
        inputs = [*taps[b], *x_BTD[b].astype(np.float64)]
        owner = [segments[b, 0]] * (W - 1) + list(segments[b])
        for t in range(T):
            for i in range(W):
                if owner[t + i] == segments[b, t]:
                    y[b, t] += weight_WD[i].astype(np.float64) * inputs[t + i]
        end = T if counts_B is None else int(counts_B[b])
        last[b] = inputs[end : end + W - 1]
    return y, last
