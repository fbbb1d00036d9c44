"""Statistics of evaluations: pass@k, intervals by resampling tasks, paired gains. Pure numpy."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int

RESAMPLES = 10_000
BLOCK = 500  # resamples held in memory together
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """An estimate and the ends of its confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(correct_P: Int[np.ndarray, " P"], *, samples: int, k: int) -> Float64[np.ndarray, " P"]:
    """Unbiased chance that at least one of `k` draws is right, for each task.

    `correct_P` counts right answers among `samples`: 1 - C(n - c, k) / C(n, k), as a product that can't
    overflow. Raises `ValueError` unless 1 <= k <= samples and 0 <= correct <= samples.
    """
    _check_counts(correct_P, samples, k)
    n_k = np.arange(samples - k + 1, samples + 1, dtype=np.float64)
    return 1 - np.prod(np.clip(1 - correct_P[:, None] / n_k, 0, None), axis=1)


def pass_hat_k(correct_P: Int[np.ndarray, " P"], *, samples: int, k: int) -> Float64[np.ndarray, " P"]:
    """Unbiased chance that all of `k` draws are right (pass^k), for each task: C(c, k) / C(n, k).

    Raises `ValueError` as `pass_at_k` does.
    """
    _check_counts(correct_P, samples, k)
    drawn_k = np.arange(k, dtype=np.float64)
    return np.prod(np.clip(correct_P[:, None] - drawn_k, 0, None) / (samples - drawn_k), axis=1)


def bootstrap_mean(values_P: Float64[np.ndarray, " P"], *, seed: int = 0) -> Interval:
    """Mean over tasks with its 95% percentile interval, tasks resampled.

    Raises `ValueError` for no tasks or a value that is not finite.
    """
    if values_P.size == 0 or not np.isfinite(values_P).all():
        raise ValueError(f"expected finite values of at least one task, got {values_P}")
    random = np.random.default_rng(seed)
    draws = (random.integers(values_P.size, size=(BLOCK, values_P.size)) for _ in range(RESAMPLES // BLOCK))
    means = np.concatenate([values_P[draw].mean(axis=1) for draw in draws])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(values_P.mean()), float(low), float(high))


def paired_gain(before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0) -> Interval:
    """Mean of `after - before` over the same tasks with its 95% interval, tasks resampled in pairs.

    Raises `ValueError` if the tasks differ.
    """
    if before.keys() != after.keys():
        different = sorted(before.keys() ^ after.keys())
        raise ValueError(f"expected the same tasks on both sides, {len(different)} differ: {different[:5]}")
    return bootstrap_mean(np.array([after[task] - before[task] for task in sorted(before)]), seed=seed)


def _check_counts(correct_P: Int[np.ndarray, " P"], samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"expected 1 <= k <= samples, got k {k} of {samples} samples")
    if correct_P.size and not 0 <= correct_P.min() <= correct_P.max() <= samples:
        raise ValueError(f"expected 0 to {samples} right answers, got {correct_P.min()} to {correct_P.max()}")
