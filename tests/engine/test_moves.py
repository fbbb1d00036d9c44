"""Rows and pages moved within the device and to the host: bit for bit what is named, and nothing else."""

import jax
import numpy as np
import pytest
from steps_host import SIZES, SPECS, Host, assert_same, host_copy, make, of_slot, prompt, random_cache

from jaxrl.engine.cache import Sizes, page_bytes, row_bytes
from jaxrl.engine.step import Emitted, Piece, Steps


@pytest.fixture(scope="module")
def few() -> Steps:
    return make(SPECS["few"])[1]


def test_moves_touch_what_they_name_and_nothing_else(few):
    cache = random_cache(few)
    want = host_copy(cache)

    def put(into, targets, values):
        for leaf, value in zip(jax.tree.leaves(into), values, strict=True):
            leaf[targets] = value

    def rows(part, index):
        return [leaf[index].copy() for leaf in jax.tree.leaves(part)]

    cache = few.copy(cache, sources=[1, 1], targets=[0, 3])
    put(want.live, [0, 3], rows(want.live, [1, 1]))
    assert_same(cache, want, "copy")
    cache = few.park(cache, slots=[2, 0], rows=[1, 2])
    put(want.parked, [1, 2], rows(want.live, [2, 0]))
    assert_same(cache, want, "park")
    cache = few.unpark(cache, rows=[0, 0, 2], slots=[3, 1, 2])
    put(want.live, [3, 1, 2], rows(want.parked, [0, 0, 2]))
    assert_same(cache, want, "unpark")
    cache = few.copy_pages(cache, sources=[7, 7, 30], targets=[1, 39, 2])
    put(want.kv, [1, 39, 2], rows(want.kv, [7, 7, 30]))
    assert_same(cache, want, "copy_pages")
    cache = few.fill(cache, value=float("nan"), slots=[1], rows=[0, 2], pages=[5, 6])
    for part, index in ((want.live, [1]), (want.parked, [0, 2]), (want.kv, [5, 6])):
        put(part, index, [np.nan] * len(jax.tree.leaves(part)))
    assert_same(cache, want, "fill")


@pytest.mark.parametrize("count", [0, 1, 16, 17, 40])
@pytest.mark.parametrize("place", [{"slot": 2}, {"row": 1}], ids=str)
def test_what_was_read_is_written_back_bit_for_bit(few, count, place):
    cache, pages = random_cache(few), np.random.default_rng(count).permutation(40)[:count].tolist()
    before = host_copy(cache)
    copy = few.read(cache, pages=pages, **place)
    assert copy.nbytes == few.row_bytes() + count * few.page_bytes()
    cache = few.fill(cache, value=float("nan"), slots=range(4), rows=range(3), pages=range(40))
    into = pages[::-1]
    cache = few.write(cache, copy, pages=into, slot=3)
    row = before.live if "slot" in place else before.parked
    for a, b in zip(jax.tree.leaves(cache.live), jax.tree.leaves(row), strict=True):
        np.testing.assert_array_equal(a[3], b[next(iter(place.values()))])
        assert np.isnan(a[:3]).all()
    others = [page for page in range(40) if page not in into]
    for a, b in zip(jax.tree.leaves(cache.kv), jax.tree.leaves(before.kv), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[into], b[pages])
        assert np.isnan(np.asarray(a)[others]).all()


def test_a_parked_and_written_session_goes_on_as_if_nothing_had_been(few):
    plain = Host(few)
    plain.prefill({0: prompt(30)})
    plain.generate({0: 5})
    want = plain.generate({0: 9})
    host = Host(few)
    host.prefill({0: prompt(30)})
    host.generate({0: 5})
    host.cache = few.park(host.cache, slots=[0], rows=[2])
    copy = few.read(host.cache, row=2, pages=host.pages[0])
    host.cache = few.fill(
        host.cache, value=float("nan"), slots=range(4), rows=range(3), pages=range(SIZES.pages)
    )
    host.tokens[3], host.pages[3] = host.tokens[0], [int(host.free.pop()) for _ in host.pages[0]]
    host.cache = few.write(host.cache, copy, pages=host.pages[3], slot=3)
    got = host.generate({3: 9}, key={3: 0})
    for name in Emitted._fields:
        np.testing.assert_array_equal(of_slot(got, 3, name), of_slot(want, 0, name))


def test_sizes_in_bytes():
    for name, model_spec in SPECS.items():
        cache = Steps(make(model_spec)[0], SIZES).init_cache()
        bytes_of = [sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for part in cache]
        row, page = row_bytes(model_spec), page_bytes(model_spec, SIZES.page_size)
        assert bytes_of == [4 * row, 3 * row, 40 * page], name


def test_warm_up_compiles_all_there_is_and_changes_nothing():
    steps = Steps(make(SPECS["few"])[0], SIZES)
    cache = random_cache(steps)
    before = host_copy(cache)
    cache = steps.warm_up(steps.params, cache)
    assert_same(cache, before)
    programs = steps.programs()
    host = Host(steps)
    host.prefill({slot: prompt(20 * slot + 1) for slot in range(4)})
    host.generate({0: 7, 2: 2})
    host.cache = steps.park(host.cache, slots=[0], rows=[2])
    host.cache = steps.unpark(host.cache, rows=[2], slots=[1])
    host.cache = steps.copy(host.cache, sources=[0], targets=[2])
    host.cache = steps.copy_pages(host.cache, sources=[0], targets=[2])
    host.cache = steps.write(
        host.cache, steps.read(host.cache, slot=1, pages=range(33)), pages=range(33), slot=0
    )
    host.cache = steps.write(host.cache, steps.read(host.cache, row=1, pages=[]), pages=[], slot=0)
    assert steps.programs() == programs


def test_no_parked_rows_is_a_size_too():
    model = make(SPECS["few"])[0]
    steps = Steps(model, Sizes(slots=2, context=16, page_size=8, pages=4))
    cache = steps.warm_up(steps.params, steps.init_cache())
    with pytest.raises(ValueError, match="expected an index within 0..-1; got 0"):
        steps.park(cache, slots=[0], rows=[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, c: s.prefill(s.params, c, [], bucket=5), r"bucket of \(4, 16\); got 5"),
        (
            lambda s, c: s.prefill(s.params, c, [Piece(0, 0, [1], [0])] * 4, bucket=4),
            "at most 3 pieces; got 4",
        ),
        (lambda s, c: s.prefill(s.params, c, [Piece(0, 6, [1, 2, 3], [0])], bucket=4), "within 8 positions"),
        (lambda s, c: s.prefill(s.params, c, [Piece(0, 0, [1] * 5, [0])], bucket=4), "at most 4 tokens"),
        (lambda s, c: s.copy(c, sources=[0], targets=[0]), r"got \[0\] as both"),
        (lambda s, c: s.copy(c, sources=[0], targets=[]), "got 1 sources and 0 targets"),
        (lambda s, c: s.copy_pages(c, sources=[0], targets=[40]), r"within 0\.\.39; got 40"),
        (lambda s, c: s.read(c, pages=[]), "either a slot or a parked row"),
        (lambda s, c: s.read(c, pages=[], slot=0, row=0), "either a slot or a parked row"),
        (lambda s, c: s.read(c, pages=[-1], slot=0), r"within 0\.\.39; got -1"),
        (lambda s, c: s.write(c, s.read(c, pages=[1], slot=0), pages=[1, 2], slot=0), "read, 1; got 2"),
    ],
)
def test_bad_calls_say_why(few, call, message):
    with pytest.raises(ValueError, match=message):
        call(few, few.init_cache())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots of at least 1; got 0"),
        ({"context": 100}, "whole pages of 8; got 100"),
        ({"parked": -1}, "parked=-1"),
        ({"prefill_buckets": (16, 4)}, "ascending"),
        ({"prefill_buckets": ()}, "ascending"),
    ],
)
def test_bad_sizes_say_why(change, message):
    with pytest.raises(ValueError, match=message):
        Sizes(**({"slots": 4, "context": 96, "page_size": 8, "pages": 40} | change))
