"""The engine's device programs: equal to the training forward, blind to company, place and stale values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from steps_host import SIZES, SPECS, Host, host_copy, make, of_slot, prompt, random_cache

from jaxrl.engine.step import Emitted, Piece, Steps, idle_state
from jaxrl.model.transformer import Transformer


@pytest.fixture(scope="module", params=SPECS)
def steps(request) -> Steps:
    return make(SPECS[request.param])[1]


@pytest.fixture(scope="module")
def few() -> Steps:
    return make(SPECS["few"])[1]


@nnx.jit
def _forward(model: Transformer, tokens, segments):
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = model(tokens, segment_ids_BT=segments, positions_BT=positions)
    return jax.nn.log_softmax(model.logits(hidden)[0])


def forward(model: Transformer, tokens: list[int]) -> np.ndarray:
    """log softmax of the training forward at every position, in one padded row."""
    pad = (0, SIZES.context - len(tokens))
    row, segments = np.pad(tokens, pad)[None], np.pad(np.ones(len(tokens), np.int32), pad)[None]
    return np.asarray(_forward(model, row, segments))[: len(tokens)]


@pytest.mark.parametrize(
    ("kind", "dtype", "gate"),
    [
        ("few", "float64", 1e-9),
        ("many", "float64", 1e-9),
        ("dense", "float64", 1e-9),
        ("few", "float32", 1e-5),
    ],
)
def test_equals_the_training_forward(kind, dtype, gate):
    with jax.enable_x64(dtype == "float64"):
        model, steps = make(replace(SPECS[kind], dtype=dtype))
        host = Host(steps)
        lengths = {0: 1, 1: 37, 2: 16, 3: 5}
        host.prefill({slot: prompt(n) for slot, n in lengths.items()})
        first = host.generate({0: 7, 1: 3, 2: 10, 3: 1})
        host.prefill({1: prompt(20, 1), 3: prompt(1, 1)})  # a second turn behind what was sampled
        second = host.generate({1: 8, 3: 4})
        for slot, length in lengths.items():
            logprobs = forward(model, host.tokens[slot])
            at = [length + i for i in range(len(of_slot(first, slot, "token_NB")))]
            ends = len(host.tokens[slot])
            at += list(range(ends - len(of_slot(second, slot, "token_NB")), ends))
            for name, want in (
                ("full_logprob_NB", [logprobs[i - 1, host.tokens[slot][i]] for i in at]),
                ("logprob_NB", [logprobs[i - 1, host.tokens[slot][i]] for i in at]),
                ("top_logprob_NBW", [np.sort(logprobs[i - 1])[:-3:-1] for i in at]),
            ):
                got = np.concatenate([of_slot(first, slot, name), of_slot(second, slot, name)])
                np.testing.assert_allclose(got, want, rtol=0, atol=gate, err_msg=f"{name} of {slot}")


def test_routes_are_those_of_the_training_forward():
    model, steps = make(SPECS["few"])
    host = Host(steps)
    prefilled = host.prefill({2: prompt(21)})
    out = host.generate({2: 6})
    got = np.concatenate([*prefilled[2], of_slot(out, 2, "routes_NBLX")])
    cache = model.init_cache(1, SIZES.context)
    tokens = jnp.asarray([host.tokens[2][:-1]])
    _, _, want = model.extend_with_routes(
        tokens, cache, lengths_B=jnp.zeros(1, int), counts_B=jnp.array([tokens.shape[1]])
    )
    assert got.shape == (26, 3, 2) and got.dtype == np.int16
    np.testing.assert_array_equal(got, np.asarray(want)[0])
    assert len(np.unique(got)) == 4


def converse(steps: Steps, jobs: list[tuple[int, int, int]], *, only=None, order=None, seed=0) -> dict:
    """Two turns of each (first prompt, second prompt, budget); returns per job all bits that came out.

    `only` leaves the others out; `order[i]` is job i's slot.
    """
    host, order = Host(steps, seed=seed), order or range(len(jobs))
    slots = {i: order[i] for i in range(len(jobs)) if only is None or i in only}
    key = {slot: i for i, slot in slots.items()}
    out = {}
    for turn in (0, 1):
        host.prefill({slot: prompt(jobs[i][turn], 10 * i + turn) for i, slot in slots.items()})
        emitted = host.generate({slot: jobs[i][2] for i, slot in slots.items()}, key=key)
        for i, slot in slots.items():
            for name in Emitted._fields:
                out[i, turn, name] = of_slot(emitted, slot, name)
    return out


job = st.tuples(st.integers(1, 35), st.integers(1, 20), st.integers(1, 9))


@settings(max_examples=8)
@example([(1, 1, 1), (1, 1, 1), (1, 5, 1), (1, 1, 2)], [0, 1, 2, 3], 3)  # last rows of a prefill
@given(st.lists(job, min_size=4, max_size=4), st.permutations(range(4)), st.integers(0, 99))
def test_company_slot_and_pages_change_no_bit(steps, jobs, order, seed):
    crowd = converse(steps, jobs)
    moved = converse(steps, jobs, order=order, seed=seed)
    alone = converse(steps, jobs, only=[seed % 4], seed=seed)
    for name, want in crowd.items():
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(moved[name], want)
        if name in alone:
            np.testing.assert_array_equal(alone[name], want)


def test_idle_slots_keep_rows_and_pages_bit_for_bit(few):
    cache = random_cache(few)
    before = host_copy(cache)
    state = idle_state(SIZES)
    state.remaining_B[1], state.lengths_B[1] = 3, 10
    state.pages_BX[:, :4] = np.arange(16).reshape(4, 4)
    cache, _ = few.generate(few.params, cache, state)
    cache, _ = few.prefill(few.params, cache, [Piece(1, 13, [3, 4, 5], [4, 5])], bucket=4)
    for part, kept in (("live", [0, 2, 3]), ("parked", slice(None)), ("kv", [0, 1, 2, 3, *range(6, 40)])):
        for a, b in zip(
            jax.tree.leaves(getattr(cache, part)), jax.tree.leaves(getattr(before, part)), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(a)[kept], b[kept])
    position = [np.asarray(leaf)[4:6].reshape(16, -1) for leaf in jax.tree.leaves(cache.kv)]
    old = [leaf[4:6].reshape(16, -1) for leaf in jax.tree.leaves(before.kv)]
    for a, b in zip(position, old, strict=True):
        np.testing.assert_array_equal((a == b).all(1), [True] * 10 + [False] * 6)


def test_stop_ids_end_a_slot(few):
    host = Host(few)
    host.prefill({0: prompt(9), 1: prompt(12)})
    plain = host.generate({0: 9, 1: 9})
    stop = int(of_slot(plain, 0, "token_NB")[4])
    again = Host(few)
    again.state.stop_BI[0, 2] = stop
    again.prefill({0: prompt(9), 1: prompt(12)})
    stopped = again.generate({0: 9, 1: 9})
    first = of_slot(plain, 0, "token_NB").tolist().index(stop)
    assert of_slot(stopped, 0, "token_NB").tolist() == of_slot(plain, 0, "token_NB").tolist()[: first + 1]
    np.testing.assert_array_equal(of_slot(stopped, 1, "logprob_NB"), of_slot(plain, 1, "logprob_NB"))
