"""Attention in float64 NumPy, one query head at a time; pages are first laid out as rows."""

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


def paged_attention(
    q_BTNH: np.ndarray,
    k_PSKH: np.ndarray,
    *,
    v_PSKH: np.ndarray,
    pages_BX: np.ndarray,
    lengths_B: np.ndarray,
    counts_B: np.ndarray,
    scale: float,
) -> np.ndarray:
    """As the public op, in float64."""
    out = np.zeros(q_BTNH.shape)
    for b, (length, count) in enumerate(zip(lengths_B, counts_B, strict=True)):
        if count == 0:
            continue
        page, at = np.divmod(np.arange(length + count), k_PSKH.shape[1])
        k, v = (pool[pages_BX[b, page], at][None] for pool in (k_PSKH, v_PSKH))
        mask = np.arange(length + count) <= length + np.arange(count)[:, None]
        out[b, :count] = attention(q_BTNH[b : b + 1, :count], k, v_BSKH=v, mask_BTS=mask[None], scale=scale)
    return out


def write_pages(
    pool_PSKH: np.ndarray,
    new_BTKH: np.ndarray,
    *,
    pages_BX: np.ndarray,
    lengths_B: np.ndarray,
    counts_B: np.ndarray,
) -> np.ndarray:
    """As the public op."""
    out = pool_PSKH.copy()
    for b, t in np.ndindex(new_BTKH.shape[:2]):
        page, at = divmod(lengths_B[b] + t, pool_PSKH.shape[1])
        if t < counts_B[b] and page < pages_BX.shape[1] and pages_BX[b, page] < len(out):
            out[pages_BX[b, page], at] = new_BTKH[b, t]
    return out
