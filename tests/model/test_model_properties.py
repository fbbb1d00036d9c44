"""Properties of packed rows: documents are independent, padding is invisible, gradients stay finite."""

import dataclasses
from functools import cache

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings

from jaxrl.model.gdn import GatedDeltaNet
from jaxrl.model.logprob import target_logprobs
from jaxrl.model.moe import FEW_EXPERTS
from jaxrl.model.spec import ModelSpec
from jaxrl.model.transformer import Transformer

SPEC = ModelSpec(
    vocab_size=40,
    hidden_size=16,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rotary_dim=4,
    rope_theta=1e4,
    gdn_key_heads=2,
    gdn_value_heads=4,
    gdn_key_dim=6,
    gdn_value_dim=5,
    num_experts=4,
    experts_per_token=2,
    expert_dim=8,
    shared_expert_dim=12,
    dtype="float32",
)
WIDTH = 80
FAST = settings(max_examples=12, deadline=None)
CAMPAIGN = settings(max_examples=300, deadline=None)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@cache
def graph_state(dtype="float32", experts=SPEC.num_experts):
    model = Transformer(dataclasses.replace(SPEC, dtype=dtype, num_experts=experts), rngs=nnx.Rngs(3))
    for block in model.layers:
        if isinstance(block.mixer, GatedDeltaNet):
            # Slow decay, so that a leak through the state would be large.
            block.mixer.dt_bias[...] = jnp.full_like(block.mixer.dt_bias[...], -4.0)
    return nnx.split(model)


@cache
def scores(dtype="float32", experts=SPEC.num_experts):
    """(log-probs of all tokens, gradient of the sum of those that `weights_BT` selects), compiled."""
    graph, _ = graph_state(dtype, experts)

    @jax.jit
    def run(state, tokens, segments, positions, weights_BT):
        def loss(state):
            model = nnx.merge(graph, state)
            hidden = model(tokens, segment_ids_BT=segments, positions_BT=positions)
            logprob = target_logprobs(
                hidden[:, :-1], model.head_weight(), targets_B=tokens[:, 1:], chunk=32
            ).logprob_B
            return jnp.where(weights_BT[:, 1:] != 0, logprob, 0).sum(), logprob

        (_, logprob), gradient = jax.value_and_grad(loss, has_aux=True)(state)
        return logprob, gradient

    return run


def pack(documents, start=0):
    tokens, segments, positions = (np.zeros((1, WIDTH), np.int32) for _ in range(3))
    for i, ids in enumerate(documents, start=1):
        at = slice(start, start + len(ids))
        tokens[0, at], segments[0, at], positions[0, at] = ids, i, np.arange(len(ids))
        start = at.stop
    return tokens, segments, positions


def trained(segments, document):
    """All tokens of a document that have a predecessor in it."""
    mine = segments == document
    return mine & np.pad(mine[:, :-1], ((0, 0), (1, 0)))


def assert_same_bits(first, other):
    for a, b in zip(*map(jax.tree.leaves, (first, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def document(draw, longest):
    size = draw(st.integers(2, longest))
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, SPEC.vocab_size, size)


@st.composite
def two_documents_and_a_change(draw):
    first = document(draw, 40)
    second = document(draw, 40)
    changed = first.copy()
    where = draw(st.lists(st.integers(0, len(first) - 1), min_size=1, unique=True))
    changed[where] = (changed[where] + draw(st.integers(1, SPEC.vocab_size - 1))) % SPEC.vocab_size
    return first, changed, second


def check_independence(case, same_gradient=assert_same_bits, experts=SPEC.num_experts):
    first, changed, second = case
    _, state = graph_state(experts=experts)
    tokens, segments, positions = pack([first, second])
    weights, run = trained(segments, 2), scores(experts=experts)
    logprob, gradient = run(state, tokens, segments, positions, weights)
    other, other_gradient = run(state, pack([changed, second])[0], segments, positions, weights)
    assert not np.array_equal(logprob, other)
    np.testing.assert_array_equal(logprob[weights[:, 1:]], other[weights[:, 1:]])
    same_gradient(gradient, other_gradient)


def assert_close(first, other):
    """Equal up to the order in which a sum is taken, relative to the tensor's largest entry."""
    for a, b in zip(*map(jax.tree.leaves, (first, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@FAST
@given(two_documents_and_a_change())
def test_second_document_is_bit_equal_whatever_the_first_holds(case):
    check_independence(case)


@FAST
@given(two_documents_and_a_change())
def test_sorting_tokens_by_expert_moves_only_the_order_of_the_gradients_sums(case):
    check_independence(case, assert_close, experts=FEW_EXPERTS + 4)


@pytest.mark.slow
@CAMPAIGN
@given(two_documents_and_a_change())
def test_second_document_is_bit_equal_campaign(case):
    check_independence(case)


@pytest.mark.slow
@CAMPAIGN
@given(two_documents_and_a_change())
def test_sorting_tokens_by_expert_campaign(case):
    check_independence(case, assert_close, experts=FEW_EXPERTS + 4)


@st.composite
def padded(draw):
    ids = document(draw, 40)
    return ids, draw(st.integers(0, WIDTH - len(ids))), draw(st.integers(0, SPEC.vocab_size - 1))


def check_padding(case):
    """Left padding of any amount, with any token in it: the same outputs up to rounding."""
    ids, left, filler = case
    _, state = graph_state("float64")
    results = []
    for start, fill in ((0, 0), (left, filler)):
        tokens, segments, positions = pack([ids], start)
        tokens = np.where(segments == 0, fill, tokens)
        weights = trained(segments, 1)
        logprob, gradient = scores("float64")(state, tokens, segments, positions, weights)
        results.append((np.asarray(logprob)[weights[:, 1:]], gradient))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        # Rounding scales with the largest terms summed, not with what is left of them in an entry.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, float(np.abs(a).max())))


@FAST
@given(padded())
def test_padding_changes_nothing(case):
    check_padding(case)


@pytest.mark.slow
@CAMPAIGN
@given(padded())
def test_padding_changes_nothing_campaign(case):
    check_padding(case)


@pytest.mark.parametrize("a_log", [-30.0, 0.0, 6.9])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_finite(a_log, dtype):
    """Rows of padding alone, decays from 0 to about -1000 per token, one token repeated."""
    _, state = graph_state(dtype)
    flat = dict(nnx.to_flat_state(state))
    for path, value in flat.items():
        if path[-1] == "A_log":
            flat[path] = value.replace(jnp.full_like(value[...], a_log))
        if path[-1] == "dt_bias":
            flat[path] = value.replace(jnp.full_like(value[...], 1.0))
        if path[-1] == "embed":
            flat[path] = value.replace(value[...].at[0].set(0))  # and rows of zeros where a token is 0
    state = nnx.from_flat_state(list(flat.items()))
    repeated = pack([np.full(50, 7), np.full(20, 0)])
    tokens, segments, positions = (np.concatenate([x, np.zeros_like(x)]) for x in repeated)
    logprob, gradient = scores(dtype)(state, tokens, segments, positions, segments != 0)
    assert np.isfinite(logprob).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    assert any(np.any(x) for x in jax.tree.leaves(gradient))
