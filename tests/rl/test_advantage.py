"""Advantages against the independent reference, and the benchmark's published values."""

import math

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.rl.advantage import MLPERF_REFERENCE, AdvantageOptions, group_advantages

LEAVE_ONE_OUT = AdvantageOptions()
MEAN = AdvantageOptions(baseline="mean")


def advantages(rewards, options, *, trained=None, votes=None):
    size = len(rewards)
    trained_G = np.ones(size, bool) if trained is None else np.array(trained, bool)
    votes_G = trained_G if votes is None else np.array(votes, bool)
    return group_advantages(
        np.asarray(rewards, np.float64), trained_G=trained_G, votes_G=votes_G, options=options
    )


GROUPS = st.integers(2, 16).flatmap(
    lambda size: st.tuples(
        st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.25]), min_size=size, max_size=size),
        st.lists(st.booleans(), min_size=size, max_size=size),
        st.lists(st.booleans(), min_size=size, max_size=size),
    )
)
OPTIONS = st.builds(
    AdvantageOptions,
    baseline=st.sampled_from(["leave_one_out", "mean"]),
    normalise_std=st.booleans(),
    masked_vote=st.booleans(),
)


@settings(deadline=None)
@given(GROUPS, OPTIONS)
def test_equals_the_reference(group, options):
    rewards, trained, votes = group
    got = advantages(rewards, options, trained=trained, votes=votes)
    wanted = reference.advantages(
        rewards,
        trained,
        votes,
        baseline=options.baseline,
        normalise_std=options.normalise_std,
        masked_vote=options.masked_vote,
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(GROUPS, OPTIONS, st.sampled_from([0.1, 1 / 3, 0.7]))
def test_equal_rewards_give_exactly_zero_spread(group, options, reward):
    _, trained, votes = group
    got = advantages([reward] * len(trained), options, trained=trained, votes=votes)
    np.testing.assert_allclose(got, 0.0, atol=1e-15)


@pytest.mark.parametrize("sign", [1, -1])
def test_values_of_the_benchmark(sign):
    rewards = np.zeros(16)
    rewards[3] = 1
    if sign < 0:
        rewards = 1 - rewards
    got = sign * advantages(rewards, MLPERF_REFERENCE)
    assert got[3] == 1.0
    np.testing.assert_allclose(np.delete(got, 3), -0.258, atol=5e-4)


def test_benchmark_on_equal_rewards():
    for reward in (0.0, 1.0):
        np.testing.assert_array_equal(advantages([reward] * 16, MLPERF_REFERENCE), np.zeros(16))


@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [1, 1, 1, 0]])
def test_one_success_and_one_failure_keep_every_sample(rewards):
    for options in (LEAVE_ONE_OUT, MEAN, MLPERF_REFERENCE):
        assert (advantages(rewards, options) != 0).all()


def test_leave_one_out_without_deviation_is_a_scaled_mean_baseline():
    rewards = np.random.default_rng(0).integers(0, 2, 8)
    np.testing.assert_allclose(advantages(rewards, LEAVE_ONE_OUT), advantages(rewards, MEAN) * 8 / 7)


def test_masked_failures_do_not_vote_outside_the_reference():
    rewards, trained = [1, 1, 0, 0], [1, 0, 1, 1]
    np.testing.assert_allclose(advantages(rewards, MEAN, trained=trained), [2 / 3, 0, -1 / 3, -1 / 3])
    np.testing.assert_allclose(advantages(rewards, LEAVE_ONE_OUT, trained=trained), [1, 0, -0.5, -0.5])
    voting = AdvantageOptions(masked_vote=True)
    np.testing.assert_allclose(advantages(rewards, voting, trained=trained), [2 / 3, 0, -2 / 3, -2 / 3])


@settings(deadline=None)
@given(GROUPS, OPTIONS.filter(lambda options: not options.masked_vote), st.floats(-5, 5))
def test_reward_of_a_masked_failure_changes_nothing(group, options, noise):
    rewards, trained, votes = group
    changed = [r if train or vote else noise for r, train, vote in zip(rewards, trained, votes, strict=True)]
    same = advantages(rewards, options, trained=trained, votes=votes)
    np.testing.assert_array_equal(same, advantages(changed, options, trained=trained, votes=votes))


def test_fewer_than_two_votes_carry_no_signal():
    got = advantages([1, 0, 0], LEAVE_ONE_OUT, trained=[1, 1, 1], votes=[1, 0, 0])
    np.testing.assert_array_equal(got, np.zeros(3))


def test_reward_that_is_not_finite_is_refused_only_where_it_matters():
    with pytest.raises(ValueError, match="finite rewards"):
        advantages([1, math.nan, 0], MEAN)
    assert np.isfinite(advantages([1, math.nan, 0], MEAN, trained=[1, 0, 1])).all()
