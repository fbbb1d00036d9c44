"""Turns the finished episodes of one prompt into documents to train on. Pure NumPy."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxrl.contracts import OUTCOME_RULES, Outcome, OutcomeRule, Trajectory, TrajectoryGroup
from jaxrl.rl.advantage import AdvantageOptions, group_advantages
from jaxrl.rl.packing import Example


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How a group becomes examples.

    drop_equal_groups: leave out groups without any advantage, whose gradient is 0 anyway. They
        then also leave the loss's denominator, which the benchmark's rules forbid.
    """

    advantage: AdvantageOptions = field(default_factory=AdvantageOptions)
    drop_equal_groups: bool = True
    rules: Mapping[Outcome, OutcomeRule] = field(default_factory=lambda: OUTCOME_RULES)


@dataclass(frozen=True, kw_only=True)
class GroupExamples:
    """What a group contributes to a step.

    `examples` are the trained members in sample order; `mixed` says whether any has an advantage;
    `masked` counts the members that are not trained.
    """

    examples: list[Example]
    mixed: bool
    masked: int


def group_examples(group: TrajectoryGroup, *, options: GroupOptions) -> GroupExamples:
    """Applies outcome rules and advantages to the trajectories of one prompt.

    Raises:
        ValueError: a trained or voting trajectory has no reward.
    """
    rules = [options.rules[trajectory.outcome] for trajectory in group.trajectories]
    trained_G = np.array([rule.trained for rule in rules], bool)
    votes_G = np.array([rule.votes for rule in rules], bool)
    rewards_G = np.array([_reward(*pair) for pair in zip(group.trajectories, rules, strict=True)])
    advantages_G = group_advantages(
        rewards_G, trained_G=trained_G, votes_G=votes_G, options=options.advantage
    )
    mixed = bool((advantages_G != 0).any())
    kept = [g for g in np.flatnonzero(trained_G).tolist() if mixed or not options.drop_equal_groups]
    examples = [
        _example(group.trajectories[g], float(advantages_G[g]))
        for g in kept
        if group.trajectories[g].loss_mask.any()  # an episode may end before its first turn
    ]
    return GroupExamples(examples=examples, mixed=mixed, masked=int((~trained_G).sum()))


def _reward(trajectory: Trajectory, rule: OutcomeRule) -> float:
    """The rule's reward; else as graded; else 0 for a member that is neither trained nor votes."""
    reward = trajectory.reward if rule.reward is None else rule.reward
    if reward is None and (rule.trained or rule.votes):
        raise ValueError(
            f"expected a reward for sample {trajectory.sample} of task {trajectory.task} with outcome "
            f"{trajectory.outcome}, got none: grade it, or give it an outcome that is masked"
        )
    return 0.0 if reward is None else reward


def _example(trajectory: Trajectory, advantage: float) -> Example:
    return Example(
        tokens_T=trajectory.tokens,
        weights_T=trajectory.loss_mask.astype(np.float32),
        logprobs_T=trajectory.logprobs,
        advantage=advantage,
    )
