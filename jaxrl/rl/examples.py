"""Turns the finished episodes of one prompt into documents to train on. Pure NumPy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from jaxrl.contracts import OUTCOME_RULES, Outcome, OutcomeRule, Trajectory, TrajectoryGroup
from jaxrl.rl.advantage import AdvantageOptions, group_advantages
from jaxrl.rl.overlong import OverlongPenalty
from jaxrl.rl.packing import Example


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How a group becomes examples.

    drop_equal_groups: leave out groups whose graded rewards give no advantage. They then also leave the
        loss's denominator, which the benchmark's rules forbid.
    overlong: penalty on the length of an episode, added to its graded reward. None: none.
    """

    advantage: AdvantageOptions = field(default_factory=AdvantageOptions)
    drop_equal_groups: bool = True
    overlong: OverlongPenalty | None = None
    rules: Mapping[Outcome, OutcomeRule] = field(default_factory=lambda: OUTCOME_RULES)


@dataclass(frozen=True, kw_only=True)
class GroupExamples:
    """What a group contributes to a step.

    `examples` are the trained members in sample order, `samples` which those are; `mixed` says whether any
    has an advantage by its graded reward; `masked` counts the members that are not trained; `penalty` is the
    mean of what was added to the rewards of the trained members for their length.
    """

    examples: list[Example]
    samples: list[int]
    mixed: bool
    masked: int
    penalty: float = 0.0


def with_masked(
    outcomes: Iterable[Outcome], rules: Mapping[Outcome, OutcomeRule] = OUTCOME_RULES
) -> Mapping[Outcome, OutcomeRule]:
    """`rules` in which `outcomes` are not trained; they go on to vote with the reward they have."""
    return {**rules, **{outcome: replace(rules[outcome], trained=False) for outcome in outcomes}}


def group_examples(group: TrajectoryGroup, *, options: GroupOptions) -> GroupExamples:
    """Applies outcome rules and advantages to the trajectories of one prompt.

    Raises:
        ValueError: a trained or voting trajectory has no reward.
    """
    rules = [options.rules[trajectory.outcome] for trajectory in group.trajectories]
    trained_G = np.array([rule.trained for rule in rules], bool)
    votes_G = np.array([rule.votes for rule in rules], bool)
    rewards_G = np.array([_reward(*pair) for pair in zip(group.trajectories, rules, strict=True)])
    lengths_G = np.array([len(trajectory.tokens) for trajectory in group.trajectories])
    penalty_G = np.zeros_like(rewards_G) if options.overlong is None else options.overlong(lengths_G)

    def advantages(rewards_G: np.ndarray) -> np.ndarray:
        return group_advantages(rewards_G, trained_G=trained_G, votes_G=votes_G, options=options.advantage)

    mixed = bool((advantages(rewards_G) != 0).any())
    advantages_G = advantages(rewards_G + penalty_G)
    samples = [
        g
        for g in np.flatnonzero(trained_G).tolist()
        # An episode may end before its first turn.
        if (mixed or not options.drop_equal_groups) and group.trajectories[g].loss_mask.any()
    ]
    return GroupExamples(
        examples=[_example(group.trajectories[g], float(advantages_G[g])) for g in samples],
        samples=samples,
        mixed=mixed,
        masked=int((~trained_G).sum()),
        penalty=float(penalty_G[trained_G].mean()) if trained_G.any() else 0.0,
    )


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
        routes_TLX=trajectory.routed_experts,
    )
