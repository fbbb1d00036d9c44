"""The expert layer in float64 NumPy, one expert at a time."""

import numpy as np


def expert_mlp(
    x_TD: np.ndarray, combine_TE: np.ndarray, *, gate_up_EDF: np.ndarray, down_EFD: np.ndarray
) -> np.ndarray:
    """As the public op, in float64."""
    x_TD, out = x_TD.astype(np.float64), np.zeros(x_TD.shape)
    for e in range(combine_TE.shape[1]):
        gate, up = np.split(x_TD @ gate_up_EDF[e], 2, axis=-1)
        inner = gate / (1 + np.exp(-gate)) * up
        out += combine_TE[:, e, None] * (inner @ down_EFD[e])
    return out
