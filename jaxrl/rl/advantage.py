"""Advantages of the G samples of one prompt. Pure NumPy, float64."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float64


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """How a reward becomes an advantage.

    baseline: `leave_one_out` compares a sample with the mean of the group's other voters, `mean`
        with the mean of all voters.
    normalise_std: divide by the voters' standard deviation (n - 1 in the denominator, over the
        same voters as the baseline) where it is not 0.
    epsilon: added to that standard deviation.
    masked_vote: members that are not trained still vote. Only the benchmark's reference does
        this; elsewhere an infrastructure failure must not move its group's baseline.
    """

    baseline: Literal["leave_one_out", "mean"] = "leave_one_out"
    normalise_std: bool = False
    epsilon: float = 1e-6
    masked_vote: bool = False


# The MLPerf Training v6.1 reference of qwen35_397b_grpo.
MLPERF_REFERENCE = AdvantageOptions(baseline="leave_one_out", normalise_std=True, masked_vote=True)


def group_advantages(
    rewards_G: Float[np.ndarray, " G"],
    *,
    trained_G: Bool[np.ndarray, " G"],
    votes_G: Bool[np.ndarray, " G"],
    options: AdvantageOptions,
) -> Float64[np.ndarray, " G"]:
    """Advantage of each sample; 0 where it is not trained.

    Fewer than two votes carry no signal: all zeros. The reward of a member without vote is
    ignored unless it is trained.

    Raises:
        ValueError: a reward that matters is not finite.
    """
    votes_G = votes_G | (~trained_G if options.masked_vote else False)
    rewards_G = np.where(votes_G | trained_G, rewards_G, 0.0).astype(np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"expected finite rewards for trained and voting samples, got {rewards_G}")
    if np.count_nonzero(votes_G) < 2:
        return np.zeros_like(rewards_G)
    advantages = [
        _advantage(rewards_G, sample, votes_G=votes_G, options=options) if trained else 0.0
        for sample, trained in enumerate(trained_G)
    ]
    return np.asarray(advantages, np.float64)


def _advantage(
    rewards_G: np.ndarray, sample: int, *, votes_G: np.ndarray, options: AdvantageOptions
) -> float:
    if options.baseline == "leave_one_out":
        votes_G = votes_G & (np.arange(len(votes_G)) != sample)
    voters = rewards_G[votes_G]
    difference = rewards_G[sample] - voters.mean()
    spread = _standard_deviation(voters) if options.normalise_std else 0.0
    return difference / (spread + options.epsilon) if spread > 0 else difference


def _standard_deviation(voters: np.ndarray) -> float:
    # Equal rewards must give exactly 0: rounding in their mean would divide by about epsilon.
    if len(voters) < 2 or voters.min() == voters.max():
        return 0.0
    return float(voters.std(ddof=1))
