"""Statistics against brute force over all draws, and intervals against their own promise."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.statistics import bootstrap_mean, paired_gain, pass_at_k, pass_hat_k

COUNTS = st.integers(1, 12).flatmap(
    lambda samples: st.tuples(
        st.just(samples), st.integers(1, samples), st.lists(st.integers(0, samples), min_size=1, max_size=5)
    )
)


@given(COUNTS)
def test_pass_at_k_and_pass_hat_k_are_the_ratios_of_binomials(counts):
    samples, k, correct = counts
    draws = math.comb(samples, k)
    expected_any = [1 - math.comb(samples - c, k) / draws for c in correct]
    expected_all = [math.comb(c, k) / draws for c in correct]
    np.testing.assert_allclose(pass_at_k(np.array(correct), samples=samples, k=k), expected_any, atol=1e-12)
    np.testing.assert_allclose(pass_hat_k(np.array(correct), samples=samples, k=k), expected_all, atol=1e-12)


@pytest.mark.parametrize(("samples", "correct", "k"), [(5, 2, 3), (4, 1, 4), (6, 6, 2), (3, 0, 1)])
def test_they_are_the_share_of_draws_with_any_or_all_right(samples, correct, k):
    answers = [1] * correct + [0] * (samples - correct)
    draws = list(itertools.combinations(answers, k))
    counts = np.array([correct])
    assert pass_at_k(counts, samples=samples, k=k)[0] == pytest.approx(statistics.mean(map(max, draws)))
    assert pass_hat_k(counts, samples=samples, k=k)[0] == pytest.approx(statistics.mean(map(min, draws)))


@pytest.mark.parametrize(("correct", "samples", "k"), [([1], 4, 5), ([1], 4, 0), ([5], 4, 1), ([-1], 4, 1)])
def test_impossible_counts_are_refused(correct, samples, k):
    with pytest.raises(ValueError, match="expected"):
        pass_at_k(np.array(correct), samples=samples, k=k)


def test_the_interval_agrees_with_the_normal_approximation():
    values_P = np.random.default_rng(1).normal(2.0, 3.0, size=400)
    interval = bootstrap_mean(values_P)
    half = 1.96 * values_P.std() / math.sqrt(400)
    assert interval.mean == pytest.approx(values_P.mean())
    assert interval.low == pytest.approx(values_P.mean() - half, abs=0.02)
    assert interval.high == pytest.approx(values_P.mean() + half, abs=0.02)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    random = np.random.default_rng(2)
    trials = [bootstrap_mean((random.random(100) < 0.3).astype(float)) for _ in range(200)]
    covered = sum(interval.low <= 0.3 <= interval.high for interval in trials)
    assert 180 <= covered <= 199  # 190 expected, σ 3.1


def test_a_paired_gain_is_tighter_than_the_parts():
    random = np.random.default_rng(3)
    difficulty = random.random(251)
    before = {f"t{index}": value for index, value in enumerate(difficulty)}
    after = {task: value + 0.1 + random.normal(0, 0.02) for task, value in reversed(before.items())}
    gain = paired_gain(before, after)
    assert gain.low < 0.1 < gain.high
    assert gain.high - gain.low < 0.01 < bootstrap_mean(difficulty).high - bootstrap_mean(difficulty).low


def test_equal_evaluations_have_no_gain():
    assert paired_gain({"a": 0.5, "b": 1.0}, {"b": 1.0, "a": 0.5}) == (0, 0, 0)


def test_a_pairing_of_different_tasks_is_refused():
    with pytest.raises(ValueError, match=r"2 differ: \['b', 'c'\]"):
        paired_gain({"a": 1.0, "b": 1.0}, {"a": 1.0, "c": 1.0})


@pytest.mark.parametrize("values", [[], [math.nan]])
def test_a_mean_of_nothing_is_refused(values):
    with pytest.raises(ValueError, match="expected finite values"):
        bootstrap_mean(np.array(values, dtype=float))
