"""Sampling against a NumPy truncation and exact frequencies; keys depend on position and turn only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.contracts import SampleKey
from jaxrl.engine.noise import gumbel
from jaxrl.engine.sampling import SamplingParams, key_words, sample

VOCAB = 12


def params(rows: int, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, words=None) -> SamplingParams:
    keys = (
        np.stack([key_words(SampleKey(0, "t", 0, row, 0)) for row in range(rows)]) if words is None else words
    )
    return SamplingParams(
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_p, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, min_p, jnp.float32),
        jnp.asarray(keys),
    )


def oracle(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, one token at a time in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    alive = order[: top_k or len(order)]
    weights = {i: np.exp(scaled[i] - scaled[order[0]]) for i in alive}
    total, mass, kept = sum(weights.values()), 0.0, []
    for i in alive:
        if kept and (mass >= top_p or weights[i] < min_p * weights[alive[0]]):
            break
        kept.append(i)
        mass += weights[i] / total
    probabilities = np.zeros(len(scaled))
    probabilities[kept] = [weights[i] for i in kept]
    return probabilities / probabilities.sum()


@pytest.mark.parametrize("offset", [0.0, 40.0, -300.0])
def test_large_logits_cost_no_more_than_their_differences(offset):
    rows = 50
    logits = (np.random.default_rng(1).integers(-64, 64, (rows, VOCAB)) / 8 + offset).astype(np.float32)
    table = logits.astype(np.float64) - offset
    table -= np.log(np.exp(table).sum(-1, keepdims=True))
    drawn = sample(jnp.asarray(logits), params(rows), positions_B=jnp.zeros(rows, jnp.int32), top=2)
    expected = table[np.arange(rows), drawn.token_B]
    np.testing.assert_allclose(drawn.logprob_B, expected, rtol=2e-7, atol=2e-7)
    np.testing.assert_allclose(drawn.full_logprob_B, expected, rtol=2e-7, atol=2e-7)
    top = np.sort(table)[:, :-3:-1]
    np.testing.assert_allclose(drawn.top_logprob_BW, top, rtol=2e-7, atol=2e-7)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_logprobs_are_those_of_the_truncated_distribution(seed, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 2
    rows = 16
    drawn = sample(
        jnp.tile(logits, (rows, 1)),
        params(rows, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p),
        positions_B=jnp.arange(rows),
    )
    expected = oracle(logits, temperature, top_k, top_p, min_p)
    full = oracle(logits, 1.0, 0, 1.0, 0.0)
    for token, logprob, full_logprob in zip(*map(np.asarray, drawn[:3]), strict=True):
        assert expected[token] > 0
        assert logprob == pytest.approx(np.log(expected[token]), abs=2e-5)
        assert full_logprob == pytest.approx(np.log(full[token]), abs=2e-5)


def test_frequencies_match_the_softmax():
    logits = jnp.asarray([[0.0, 1.0, 2.0, -1.0]], jnp.float32)
    rows = 4000
    drawn = sample(jnp.tile(logits, (rows, 1)), params(rows), positions_B=jnp.zeros(rows, jnp.int32))
    counts = np.bincount(np.asarray(drawn.token_B), minlength=4)
    expected = rows * np.asarray(jax.nn.softmax(logits[0]))
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.3, counts  # 0.999 quantile at 3 degrees of freedom


def test_temperature_zero_is_greedy_with_probability_one():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, VOCAB)), jnp.float32)
    drawn = sample(logits, params(3, temperature=0.0), positions_B=jnp.arange(3))
    assert np.array_equal(drawn.token_B, np.argmax(logits, axis=-1))
    assert np.array_equal(drawn.logprob_B, np.zeros(3))


def test_a_token_depends_on_its_key_and_position_only():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, VOCAB)), jnp.float32)
    words = key_words(SampleKey(1, "task", 0, 3, 2))
    among = np.stack([key_words(SampleKey(1, "x", 0, i, 0)) for i in range(8)])
    among[5] = words
    alone = [sample(logits, params(1, words=words[None]), positions_B=jnp.array([p])) for p in range(20)]
    for position, one in enumerate(alone):
        crowd = sample(
            jnp.tile(logits, (8, 1)), params(8, words=among), positions_B=jnp.full(8, position, jnp.int32)
        )
        assert crowd.token_B[5] == one.token_B[0]
        assert crowd.logprob_B[5] == one.logprob_B[0]
    assert len({int(one.token_B[0]) for one in alone}) > 1


@given(
    st.lists(st.tuples(st.integers(0, 9), st.text(max_size=5), st.integers(0, 3)), unique=True, max_size=20)
)
def test_distinct_sample_keys_have_distinct_words(parts):
    keys = {SampleKey(seed, task, 0, sample_, 0) for seed, task, sample_ in parts}
    assert len({tuple(key_words(key)) for key in keys}) == len(keys)


def test_most_likely_tokens_are_those_of_the_full_softmax():
    logits = np.random.default_rng(5).normal(size=(6, 40)).astype(np.float32)
    drawn = sample(
        jnp.asarray(logits), params(6, temperature=0.3, top_p=0.5), positions_B=jnp.arange(6), top=4
    )
    exact = logits.astype(np.float64)
    logprobs = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    order = np.argsort(-logprobs, axis=-1)[:, :4]
    np.testing.assert_array_equal(drawn.top_token_BW, order)
    want = np.take_along_axis(logprobs, order, axis=-1)
    np.testing.assert_allclose(drawn.top_logprob_BW, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 12, 777])
def test_noise_is_that_of_jax_bit_for_bit(size):
    words = np.random.default_rng(0).integers(0, 2**32, (5, 2), np.uint32)
    positions = jnp.array([0, 1, 5, 1000, 2**20])

    def row(words, position):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (size,), jnp.float32)

    got = gumbel(jnp.asarray(words), positions, size=size, dtype=jnp.float32)
    np.testing.assert_array_equal(got, jax.vmap(row)(words, positions))


def test_truncation_of_one_row_changes_no_bit_of_another():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3000)) * 30, jnp.float32)
    plain = sample(logits, params(2), positions_B=jnp.arange(2))
    mixed = params(2)._replace(top_p_B=jnp.array([1.0, 0.5]), top_k_B=jnp.array([0, 7]))
    drawn = sample(logits, mixed, positions_B=jnp.arange(2))
    assert drawn.token_B[0] == plain.token_B[0] and drawn.logprob_B[0] == plain.logprob_B[0]
    assert drawn.logprob_B[1] != plain.logprob_B[1]


def test_rows_of_nan_give_a_valid_id_and_no_number():
    drawn = sample(jnp.full((2, VOCAB), jnp.nan), params(2, top_p=0.5), positions_B=jnp.arange(2))
    assert (drawn.token_B < VOCAB).all() and np.isnan(drawn.full_logprob_B).all()
