"""From trajectories to documents."""

from dataclasses import replace

import numpy as np
import pytest

from jaxrl.contracts import Outcome, Trajectory, TrajectoryGroup
from jaxrl.rl.advantage import MLPERF_REFERENCE
from jaxrl.rl.examples import GroupOptions, group_examples, with_masked
from jaxrl.rl.overlong import OverlongPenalty

KEEP_ALL = GroupOptions(drop_equal_groups=False)


def trajectory(sample, outcome, reward):
    return Trajectory(
        task="t",
        epoch=0,
        sample=sample,
        tokens=np.arange(5, dtype=np.int32) + 10 * sample,
        loss_mask=np.array([0, 0, 1, 0, 1], bool),
        logprobs=np.array([0, 0, -1, 0, -2], np.float32) - np.array([0, 0, sample, 0, sample], np.float32),
        full_logprobs=np.zeros(5, np.float32),
        versions=np.array([-1, -1, 0, -1, 0], np.int32),
        turns=(),
        outcome=outcome,
        reward=reward,
    )


def group(*members):
    made = [trajectory(i, outcome, reward) for i, (outcome, reward) in enumerate(members)]
    return TrajectoryGroup(task="t", epoch=0, trajectories=made)


RESOLVED, FAILED = (Outcome.RESOLVED, 1.0), (Outcome.UNRESOLVED, 0.0)
FAULT, TAMPERED = (Outcome.INFRA_ERROR, None), (Outcome.SUSPECTED_TAMPERING, 1.0)


def test_tokens_and_logprobs_are_those_of_the_trajectory():
    got = group_examples(group(RESOLVED, FAILED), options=GroupOptions())
    assert [e.advantage for e in got.examples] == [1.0, -1.0]
    for sample, example in enumerate(got.examples):
        original = trajectory(sample, *FAILED)
        assert example.logprobs_T is not None
        np.testing.assert_array_equal(example.tokens_T, original.tokens)
        np.testing.assert_array_equal(example.weights_T, original.loss_mask)
        np.testing.assert_array_equal(example.logprobs_T, original.logprobs)


def test_faults_are_masked_and_do_not_vote():
    got = group_examples(group(RESOLVED, FAULT, FAILED, FAILED), options=GroupOptions())
    assert [int(e.tokens_T[0]) for e in got.examples] == [0, 20, 30]
    assert [e.advantage for e in got.examples] == [1.0, -0.5, -0.5]
    assert (got.mixed, got.masked) == (True, 1)


def test_tampering_votes_with_reward_zero_but_is_not_trained():
    got = group_examples(group(RESOLVED, TAMPERED, FAILED), options=GroupOptions())
    assert [e.advantage for e in got.examples] == [1.0, -0.5]


def test_benchmark_lets_faults_vote_as_zero_reward():
    options = GroupOptions(advantage=MLPERF_REFERENCE, drop_equal_groups=False)
    got = group_examples(group(RESOLVED, FAULT, FAILED, FAILED), options=options)
    assert got.examples[0].advantage == 1.0
    assert got.examples[1].advantage == pytest.approx(-(1 / 3) / (3**-0.5 + 1e-6))


@pytest.mark.parametrize("member", [RESOLVED, FAILED])
def test_equal_groups_are_dropped_only_by_option(member):
    assert group_examples(group(member, member, FAULT), options=GroupOptions()).examples == []
    kept = group_examples(group(member, member, FAULT), options=KEEP_ALL)
    assert [e.advantage for e in kept.examples] == [0.0, 0.0]
    assert not kept.mixed


def test_context_full_is_trained_as_graded():
    got = group_examples(group((Outcome.CONTEXT_FULL, 1.0), FAILED), options=GroupOptions())
    assert [e.advantage for e in got.examples] == [1.0, -1.0]


def test_overlong_filtering_masks_but_still_lets_vote():
    full = (Outcome.CONTEXT_FULL, 1.0)
    options = GroupOptions(rules=with_masked([Outcome.CONTEXT_FULL]))
    got = group_examples(group(full, FAILED, FAILED), options=options)
    assert [e.advantage for e in got.examples] == [-0.5, -0.5] and got.masked == 1


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (12, 0.0), (13, -0.5), (14, -1.0), (16, -2.0), (17, -2.0), (99, -2.0)]
)
def test_overlong_penalty_grows_over_the_cache(length, penalty):
    made = OverlongPenalty(length=16, cache=4, scale=2.0)
    assert made(np.array([length])).tolist() == [penalty]


def test_overlong_penalty_is_part_of_the_reward_before_the_advantage():
    members = group(RESOLVED, RESOLVED, FAILED).trajectories
    longer = replace(
        members[1],
        **{
            name: np.concatenate([getattr(members[1], name)] * 2)
            for name in ("tokens", "loss_mask", "logprobs", "full_logprobs", "versions")
        },
    )
    made = TrajectoryGroup(task="t", epoch=0, trajectories=[members[0], longer, members[2]])
    options = GroupOptions(overlong=OverlongPenalty(length=10, cache=5, scale=0.6))
    got = group_examples(made, options=options)
    assert [e.advantage for e in got.examples] == pytest.approx([0.8, -0.1, -0.7])
    assert got.penalty == pytest.approx(-0.2)


def test_a_group_of_equal_graded_rewards_is_dropped_whatever_its_lengths():
    options = GroupOptions(overlong=OverlongPenalty(length=5, cache=5))
    got = group_examples(group(FAILED, FAILED), options=options)
    assert got.examples == [] and not got.mixed


@pytest.mark.parametrize("fields", [{"cache": 0}, {"cache": 17}, {"cache": 4, "scale": 0.0}])
def test_an_impossible_penalty_is_refused(fields):
    with pytest.raises(ValueError, match="cache of 1 to length"):
        OverlongPenalty(length=16, **fields)


def test_the_samplers_experts_travel_with_the_document():
    members = group(RESOLVED, FAILED).trajectories
    routes = np.arange(20, dtype=np.int16).reshape(5, 2, 2)
    routed = [replace(member, routed_experts=routes) for member in members]
    made = TrajectoryGroup(task="t", epoch=0, trajectories=routed)
    got = group_examples(made, options=GroupOptions())
    for each in got.examples:
        assert each.routes_TLX is not None
        np.testing.assert_array_equal(each.routes_TLX, routes)
    assert all(
        e.routes_TLX is None for e in group_examples(group(RESOLVED, FAILED), options=KEEP_ALL).examples
    )


def test_missing_reward_is_refused():
    with pytest.raises(ValueError, match="sample 0 of task t with outcome context_full"):
        group_examples(group((Outcome.CONTEXT_FULL, None), FAILED), options=GroupOptions())
