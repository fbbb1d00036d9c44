"""One model, three uses: packed training rows, chunked prefill, decode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.model.attention import PagedKv
from jaxrl.model.gdn import GatedDeltaNet
from jaxrl.model.spec import ModelSpec
from jaxrl.model.transformer import Transformer

SPEC = ModelSpec(
    vocab_size=50,
    hidden_size=24,
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
    dtype="float64",
)
CONTEXT = 80


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def graph_state():
    with jax.enable_x64(True):
        model = Transformer(SPEC, rngs=nnx.Rngs(3))
        for block in model.layers:
            if isinstance(block.mixer, GatedDeltaNet):
                # Slow decay, so that a leak through the state would be large.
                block.mixer.dt_bias[...] = jnp.full_like(block.mixer.dt_bias[...], -4.0)
        return nnx.split(model)


@pytest.fixture(scope="module")
def packed(graph_state):
    graph, state = graph_state

    @jax.jit
    def run(tokens, segments, positions):
        return nnx.merge(graph, state)(tokens, segment_ids_BT=segments, positions_BT=positions)

    return lambda *arrays: np.asarray(run(*map(jnp.asarray, arrays)))


@pytest.fixture(scope="module")
def extend(graph_state):
    graph, state = graph_state

    @jax.jit
    def run(tokens, cache, lengths, counts):
        return nnx.merge(graph, state).extend(tokens, cache, lengths_B=lengths, counts_B=counts)

    return run


def init_cache(graph_state, batch):
    return nnx.merge(*graph_state).init_cache(batch, CONTEXT)


def by_row(cache, batch):
    """Leaves with the row in front: of an attention layer all positions of the row's pages."""
    return [leaf.reshape(batch, -1, *leaf.shape[2:]) for leaf in jax.tree.leaves(cache)]


def document(length, seed=0):
    return np.random.default_rng(seed).integers(0, SPEC.vocab_size, length)


def alone(packed, tokens):
    """Hidden states of one document in a row of its own, padded to a common length."""
    pad = (0, CONTEXT - len(tokens))
    row, segments = np.pad(tokens, pad)[None], np.pad(np.ones(len(tokens), np.int32), pad)[None]
    return packed(row, segments, np.arange(CONTEXT)[None])[0, : len(tokens)]


def pack(documents):
    tokens, segments, positions = (np.zeros((1, CONTEXT), np.int32) for _ in range(3))
    start = 0
    for i, tokens_T in enumerate(documents, start=1):
        at = slice(start, start + len(tokens_T))
        tokens[0, at], segments[0, at], positions[0, at] = tokens_T, i, np.arange(len(tokens_T))
        start = at.stop
    return tokens, segments, positions


def append(extend, cache, chunks, *, width=8):
    """Feeds one row chunk by chunk, each right-padded to `width` (decode steps have width 1)."""
    hidden, length = [], 0
    for chunk in chunks:
        T = 1 if len(chunk) == 1 else width
        tokens = np.pad(chunk, (0, T - len(chunk)), constant_values=7)[None]
        out, cache = extend(jnp.asarray(tokens), cache, jnp.array([length]), jnp.array([len(chunk)]))
        hidden.append(np.asarray(out)[0, : len(chunk)])
        length += len(chunk)
    return np.concatenate(hidden), cache


@pytest.mark.parametrize(
    "sizes",
    [(8, 8, 8, 8, 8), (8, 1, 2, 8, 1, 1, 5), (1,) * 12, (2, 1, 1, 1), (2, 2, 2, 3), (3, 1)],
    ids=str,
)
def test_chunked_prefill_and_decode_equal_the_full_forward(packed, extend, graph_state, sizes):
    tokens = document(sum(sizes))
    chunks = np.split(tokens, np.cumsum(sizes)[:-1])
    hidden, _ = append(extend, init_cache(graph_state, 1), chunks)
    np.testing.assert_allclose(hidden, alone(packed, tokens), rtol=0, atol=1e-9)


def test_rows_of_different_lengths_and_counts(packed, extend, graph_state):
    tokens = np.stack([document(24, seed) for seed in range(3)])
    cache, lengths = init_cache(graph_state, 3), np.zeros(3, int)
    got = [[], [], []]
    for counts in ([8, 3, 0], [8, 8, 1], [0, 2, 8], [2, 0, 1]):
        step = np.zeros((3, 8), int)
        for b, n in enumerate(counts):
            step[b, :n] = tokens[b, lengths[b] : lengths[b] + n]
        out, cache = extend(jnp.asarray(step), cache, jnp.asarray(lengths), jnp.asarray(counts))
        for b, n in enumerate(counts):
            got[b].append(np.asarray(out)[b, :n])
        lengths = lengths + counts
    for b in range(3):
        want = alone(packed, tokens[b, : lengths[b]])
        np.testing.assert_allclose(np.concatenate(got[b]), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("T", [1, 8])
def test_idle_row_keeps_its_cache_bit_for_bit(extend, graph_state, T):
    key = jax.random.key(0)
    cache = jax.tree.map(lambda x: jax.random.normal(key, x.shape, x.dtype), init_cache(graph_state, 2))
    cache = jax.tree.map(lambda x: x.at[x.shape[0] // 2 :].set(jnp.nan), cache)
    out, new = extend(jnp.ones((2, T), int), cache, jnp.array([5, 9]), jnp.array([T, 0]))
    assert np.isfinite(out[0]).all()
    for a, b in zip(by_row(cache, 2), by_row(new, 2), strict=True):
        np.testing.assert_array_equal(a[1], b[1])
        assert a.shape == b.shape and a.dtype == b.dtype and not np.array_equal(a[0], b[0])


def test_stale_cache_behind_the_length_is_ignored(extend, graph_state):
    clean = init_cache(graph_state, 1)
    dirty = tuple(jax.tree.map(lambda x: x + 9.0, c) if isinstance(c, PagedKv) else c for c in clean)
    tokens = jnp.asarray(document(8))[None]
    a, b = (extend(tokens, cache, jnp.array([0]), jnp.array([8]))[0] for cache in (clean, dirty))
    np.testing.assert_array_equal(a, b)


def test_rows_do_not_depend_on_their_slot(extend, graph_state):
    tokens, order = jnp.asarray(np.stack([document(8, s) for s in range(4)])), np.array([2, 0, 3, 1])
    counts = jnp.array([8, 5, 1, 7])
    zeros = jnp.zeros(4, int)
    out, cache = extend(tokens, init_cache(graph_state, 4), zeros, counts)
    moved, moved_cache = extend(tokens[order], init_cache(graph_state, 4), zeros, counts[order])
    np.testing.assert_array_equal(out[order], moved)
    for a, b in zip(by_row(cache, 4), by_row(moved_cache, 4), strict=True):
        np.testing.assert_array_equal(a[order], b)


def test_packed_documents_equal_separate_ones(packed):
    documents = [document(n, n) for n in (17, 2, 1, 33, 5)]
    hidden, start = packed(*pack(documents))[0], 0
    for tokens in documents:
        got = hidden[start : start + len(tokens)]
        np.testing.assert_allclose(got, alone(packed, tokens), rtol=0, atol=1e-9)
        start += len(tokens)


def test_second_document_does_not_see_the_first(packed):
    second = document(30, 1)
    a, b = (packed(*pack([document(35, seed), second]))[0] for seed in (2, 3))
    assert not np.array_equal(a[:35], b[:35])
    np.testing.assert_array_equal(a[35:65], b[35:65])


def test_gradient_is_finite_and_blind_to_padding(graph_state):
    graph, state = graph_state
    tokens, segments, positions = map(jnp.asarray, pack([document(20), document(9, 1)]))

    @jax.jit
    def gradient(state, tokens):
        def loss(state):
            hidden = nnx.merge(graph, state)(tokens, segment_ids_BT=segments, positions_BT=positions)
            return jnp.where((segments != 0)[..., None], jnp.sin(hidden), 0).sum()

        return jax.grad(loss)(state)

    first = gradient(state, tokens)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(first))
    other = gradient(state, jnp.where(segments == 0, 11, tokens))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_remat_changes_no_gradient(graph_state):
    graph, state = graph_state
    tokens, segments, positions = map(jnp.asarray, pack([document(20)]))

    def gradient(remat):
        def loss(state):
            model = nnx.merge(graph, state)
            return model(tokens, segment_ids_BT=segments, positions_BT=positions, remat=remat).sum()

        return jax.jit(jax.grad(loss))(state)

    for a, b in zip(*map(jax.tree.leaves, (gradient(False), gradient(True))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision_models_keep_their_dtypes(dtype):
    def run():
        model = Transformer(dataclasses.replace(SPEC, dtype=dtype), rngs=nnx.Rngs(0))
        cache, counts = model.init_cache(2, 16), jnp.array([3, 1])
        out, new = model.extend(jnp.ones((2, 3), int), cache, lengths_B=0 * counts, counts_B=counts)
        return cache, new, out, model.logits(out)

    cache, new, out, logits = jax.eval_shape(run)
    assert out.dtype == dtype and logits.dtype == np.float32
    assert new[0].state_BNHJ.dtype == np.float32 and new[1].k_PSKH.dtype == dtype
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(new), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
