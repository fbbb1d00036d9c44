"""Packing: every trained token exactly once, nothing across documents."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.rl.packing import Example, fill_fraction, pack, trained_tokens

LENGTH = 16


@st.composite
def documents(draw):
    lengths = draw(st.lists(st.integers(1, LENGTH), max_size=30))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return [_document(rng, index, length) for index, length in enumerate(lengths)]


def _document(rng, index, length):
    weights_T = rng.integers(0, 2, length).astype(np.float32)
    weights_T[0] = 0
    return Example(
        # Ids are unique over the whole batch, so that a token can be traced to its document.
        tokens_T=(index * LENGTH + np.arange(length)).astype(np.int32),
        weights_T=weights_T,
        logprobs_T=-(index * LENGTH + np.arange(length)).astype(np.float32),
        advantage=float(index),
    )


ORDERS = st.sampled_from(["in_order", "first_fit_decreasing"])


@settings(deadline=None)
@given(documents(), st.integers(1, 4), ORDERS)
def test_every_document_is_packed_once_and_whole(examples, rows, order):
    seen = {}
    for batch in pack(examples, rows=rows, row_length=LENGTH, order=order):
        assert all(array.shape == (rows, LENGTH) for array in batch[:-1]) and batch.routes_BTLX is None
        for row in range(rows):
            for segment in range(1, batch.segment_ids_BT[row].max(initial=0) + 1):
                (places,) = np.nonzero(batch.segment_ids_BT[row] == segment)
                assert (np.diff(places) == 1).all()
                tokens_T = batch.tokens_BT[row, places]
                assert (batch.positions_BT[row, places] == np.arange(len(places))).all()
                index = int(tokens_T[0]) // LENGTH
                assert index not in seen
                seen[index] = tokens_T
    assert sorted(seen) == list(range(len(examples)))
    for index, tokens_T in seen.items():
        np.testing.assert_array_equal(tokens_T, examples[index].tokens_T)


@settings(deadline=None)
@given(documents(), st.integers(1, 4), ORDERS)
def test_every_trained_token_is_a_target_once_and_predicted_inside_its_document(examples, rows, order):
    targets = []
    for batch in pack(examples, rows=rows, row_length=LENGTH, order=order):
        for row, place in zip(*np.nonzero(batch.weights_BT), strict=True):
            target = int(batch.targets_BT[row, place])
            assert target == batch.tokens_BT[row, place] + 1 == batch.tokens_BT[row, place + 1]
            assert batch.segment_ids_BT[row, place] == batch.segment_ids_BT[row, place + 1] > 0
            assert batch.sampler_logprobs_BT[row, place] == -target
            assert batch.advantages_BT[row, place] == target // LENGTH
            targets.append(target)
    expected = [int(t) for e in examples for t in e.tokens_T[e.weights_T > 0]]
    assert sorted(targets) == sorted(expected)


@settings(deadline=None)
@given(documents(), st.integers(1, 4), ORDERS)
def test_padding_carries_nothing(examples, rows, order):
    for batch in pack(examples, rows=rows, row_length=LENGTH, order=order):
        padding_BT = batch.segment_ids_BT == 0
        for array in batch[:7]:
            assert (array[padding_BT] == 0).all()
        for unknown in (batch.old_logprobs_BT, batch.reference_logprobs_BT):
            assert np.isnan(unknown).all()


def test_in_order_keeps_the_order_over_microbatches():
    rng = np.random.default_rng(0)
    examples = [_document(rng, i, n) for i, n in enumerate([10, 6, 10, 3, 3, 16, 2])]
    order = [
        sorted(set((b.tokens_BT[b.segment_ids_BT > 0] // LENGTH).tolist()))
        for b in pack(examples, rows=2, row_length=LENGTH)
    ]
    assert order == [[0, 1, 2, 3, 4], [5, 6]]


def test_in_order_yields_before_it_has_seen_everything():
    rng = np.random.default_rng(0)
    taken = []

    def stream():
        for i in range(10):
            taken.append(i)
            yield _document(rng, i, LENGTH)

    next(pack(stream(), rows=2, row_length=LENGTH))
    assert taken == [0, 1, 2]


def test_decreasing_order_wastes_less():
    rng = np.random.default_rng(0)
    examples = [_document(rng, i, n) for i, n in enumerate([6, 6, 6, 10, 10, 10])]
    in_order = list(pack(examples, rows=1, row_length=LENGTH))
    decreasing = list(pack(examples, rows=1, row_length=LENGTH, order="first_fit_decreasing"))
    assert (len(in_order), len(decreasing)) == (4, 3)
    assert all(fill_fraction(batch) == 1.0 for batch in decreasing)
    assert sum(map(trained_tokens, decreasing)) == sum(map(trained_tokens, in_order))


def _example(length, *, weights=None, logprobs=None):
    weights_T = np.zeros(length, np.float32) if weights is None else np.asarray(weights, np.float32)
    return Example(tokens_T=np.zeros(length, np.int32), weights_T=weights_T, logprobs_T=logprobs)


@pytest.mark.parametrize(
    ("length", "fields", "message"),
    [
        (17, {}, "1 to 16 tokens, got 17"),
        (0, {}, "1 to 16 tokens, got 0"),
        (2, {"weights": [1, 0]}, "first token"),
        (2, {"weights": [0, -1]}, "non-negative"),
        (2, {"weights": [0, np.nan]}, "finite"),
        (2, {"weights": [0]}, "weights_T"),
        (2, {"logprobs": np.zeros(3, np.float32)}, "logprobs_T"),
    ],
)
def test_malformed_examples_are_refused(length, fields, message):
    # A wrong shape is a TypeError where annotations are checked as well.
    with pytest.raises((ValueError, TypeError), match=message):
        list(pack([_example(length, **fields)], rows=1, row_length=LENGTH))


def _routed(length, *, experts=2, first=0):
    routes_TLX = (first + np.arange(length * 3 * experts)).reshape(length, 3, experts).astype(np.int16)
    return Example(
        tokens_T=np.zeros(length, np.int32), weights_T=np.zeros(length, np.float32), routes_TLX=routes_TLX
    )


def test_routes_lie_with_their_tokens_and_padding_has_none():
    first, second = _routed(4), _routed(5, first=100)
    (batch,) = pack([first, second], rows=2, row_length=LENGTH)
    assert batch.routes_BTLX is not None and batch.routes_BTLX.shape == (2, LENGTH, 3, 2)
    np.testing.assert_array_equal(batch.routes_BTLX[0, :4], first.routes_TLX)
    np.testing.assert_array_equal(batch.routes_BTLX[0, 4:9], second.routes_TLX)
    assert (batch.routes_BTLX[batch.segment_ids_BT == 0] == -1).all()


def test_routes_are_there_for_all_examples_or_none():
    for other in (_example(3), _routed(3, experts=1)):
        with pytest.raises(ValueError, match="routes of one shape in all examples"):
            list(pack([_routed(4), other], rows=1, row_length=LENGTH))
    # Where annotations are checked, an array of another length is a TypeError.
    with pytest.raises((ValueError, TypeError), match="routes_TLX"):
        short = replace(_routed(4), routes_TLX=_routed(3).routes_TLX)
        list(pack([short], rows=1, row_length=LENGTH))


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="rows and row_length"):
        list(pack([], rows=0, row_length=LENGTH))
    with pytest.raises((ValueError, TypeError), match="order"):
        list(pack([], rows=1, row_length=LENGTH, order="best"))  # pyright: ignore[reportArgumentType]
