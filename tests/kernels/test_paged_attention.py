"""Attention over pages against float64 NumPy, and that a row depends on nothing but its own tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import paged_attention, reference, write_pages

H, POOL = 6, 64
_attend = jax.jit(paged_attention, static_argnames=("scale", "implementation"))
_write = jax.jit(write_pages, static_argnames="implementation")


def case(
    seed: int, lengths, counts, *, T: int = 1, S: int = 16, heads: tuple[int, int] = (4, 2), X: int = 40
) -> dict[str, Any]:
    """Random queries and a table of random pages; rows own theirs. Whatever no query sees is NaN."""
    rng = np.random.default_rng(seed)
    N, K = heads
    rows, total = len(lengths), np.asarray(lengths) + np.asarray(counts)
    needed = -(-total // S)
    pool = needed.sum() + 3
    table, free = np.full((rows, X), pool + 7, np.int32), list(rng.permutation(pool))
    k, v = np.full((2, pool, S, K, H), np.nan)
    for b in range(rows):
        for x in range(needed[b]):
            page, used = free.pop(), min(S, total[b] - x * S)
            table[b, x] = page
            k[page, :used], v[page, :used] = rng.standard_normal((2, used, K, H))
    return {
        "q_BTNH": rng.standard_normal((rows, T, N, H)),
        "k_PSKH": k,
        "v_PSKH": v,
        "pages_BX": table,
        "lengths_B": np.asarray(lengths, np.int32),
        "counts_B": np.asarray(counts, np.int32),
    }


def attend(arrays: dict[str, Any], dtype: Any = np.float64) -> np.ndarray:
    given = {name: jnp.asarray(x, dtype if x.dtype.kind == "f" else x.dtype) for name, x in arrays.items()}
    q, k = given.pop("q_BTNH"), given.pop("k_PSKH")
    return np.asarray(_attend(q, k, scale=0.4, **given))


def expected(arrays: dict[str, Any]) -> np.ndarray:
    rest = dict(arrays)
    return reference.paged_attention(rest.pop("q_BTNH"), rest.pop("k_PSKH"), scale=0.4, **rest)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)], ids=str)
@pytest.mark.parametrize("S", [1, 16, 48, 256])
@pytest.mark.parametrize("T", [1, 7])
def test_equals_float64_numpy(T, S, heads):
    lengths, counts = [0, 1, 127, 128, 129, 600, 35, 0], [1, 1, 1, 1, 1, 1, 0, 0]
    if T > 1:
        counts = [7, 1, 2, 3, 7, 5, 0, 0]
    if S == 16:  # more rows than a group
        lengths, counts = lengths + list(range(300, 370, 7)), counts + [1] * 10
    arrays = case(T * S, lengths, counts, T=T, S=S, heads=heads, X=-(-640 // S))
    got = attend(arrays)
    np.testing.assert_allclose(got, expected(arrays), rtol=0, atol=1e-13)
    np.testing.assert_allclose(attend(arrays, np.float32), got, rtol=0, atol=2e-6)
    assert not got[6].any() and not got[7].any()


four_rows = st.lists(
    st.tuples(st.integers(0, 600), st.integers(0, 5)).filter(lambda row: sum(row) <= 600),
    min_size=4,
    max_size=4,
)


@settings(max_examples=40)
@given(four_rows, st.integers(0, 2**31), st.sampled_from([1, 5]))
def test_any_lengths(four, seed, T):
    with jax.enable_x64(True):
        lengths, counts = zip(*((n, min(c, T)) for n, c in four), strict=True)
        arrays = case(seed, lengths, counts, T=T)
        # One shape for all examples: one compilation.
        spare = 4 * 40 - len(arrays["k_PSKH"])
        arrays |= {
            name: np.pad(arrays[name], ((0, spare), *[(0, 0)] * 3), constant_values=np.nan)
            for name in ("k_PSKH", "v_PSKH")
        }
        np.testing.assert_allclose(attend(arrays), expected(arrays), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [6, 21])
@pytest.mark.parametrize("T", [1, 5])
def test_company_and_place_change_no_bit(T, rows):
    rng = np.random.default_rng(rows)
    lengths, counts = rng.integers(0, 600, rows), rng.integers(1, T + 1, rows)
    arrays = case(3, lengths, counts, T=T)
    together = attend(arrays, np.float32)
    order = rng.permutation(rows)
    moved = arrays | {name: arrays[name][order] for name in ("q_BTNH", "pages_BX", "lengths_B", "counts_B")}
    np.testing.assert_array_equal(attend(moved, np.float32), together[order])
    for b in range(6):
        alone = arrays | {"counts_B": np.where(np.arange(rows) == b, counts, 0).astype(np.int32)}
        np.testing.assert_array_equal(attend(alone, np.float32)[b], together[b])


def test_other_pages_change_no_bit():
    arrays = case(5, [40, 300], [1, 1])
    pool = len(arrays["k_PSKH"])
    order = np.random.default_rng(1).permutation(pool)
    moved = arrays | {name: arrays[name][np.argsort(order)] for name in ("k_PSKH", "v_PSKH")}
    table = arrays["pages_BX"]
    moved["pages_BX"] = np.where(table < pool, order[np.minimum(table, pool - 1)], table).astype(np.int32)
    np.testing.assert_array_equal(attend(arrays, np.float32), attend(moved, np.float32))


def test_rows_may_share_pages():
    arrays = case(6, [70, 70], [1, 1])
    arrays["pages_BX"] = np.stack([arrays["pages_BX"][0]] * 2)
    np.testing.assert_allclose(attend(arrays), expected(arrays), rtol=0, atol=1e-13)
    arrays["q_BTNH"][1] = arrays["q_BTNH"][0]
    same = attend(arrays, np.float32)
    np.testing.assert_array_equal(same[0], same[1])


@pytest.mark.parametrize("T", [1, 9])
def test_writes_land_where_the_table_says_and_nowhere_else(T):
    rng = np.random.default_rng(T)
    pool, new = rng.standard_normal((12, 4, 2, 3)), rng.standard_normal((4, T, 2, 3))
    arrays = {
        "pages_BX": np.array([[3, 0, 7, 12], [5, 11, 2, 1], [6, 8, 12, 12], [9, 4, 10, 12]], np.int32),
        "lengths_B": np.array([0, 5, 7, 12], np.int32),
        "counts_B": np.array([T, T // 2 + 1, min(T, 2), 0], np.int32),
    }
    want = reference.write_pages(pool, new, **arrays)
    got = _write(jnp.asarray(pool), jnp.asarray(new), **{name: jnp.asarray(x) for name, x in arrays.items()})
    np.testing.assert_array_equal(got, want)
    assert (want != pool).any(axis=(1, 2, 3)).sum() >= 2


def test_bad_heads_and_implementations_raise():
    arrays: dict[str, Any] = {name: jnp.asarray(x) for name, x in case(0, [3], [1], heads=(4, 3)).items()}
    q, k = arrays.pop("q_BTNH"), arrays.pop("k_PSKH")
    with pytest.raises(
        ValueError, match="paged_attention: expected query heads to be a multiple of 3; got 4"
    ):
        paged_attention(q, k, scale=1.0, **arrays)
    with pytest.raises(ValueError, match="'xla'; got 'cuda'"):
        paged_attention(q[:, :, :3], k, scale=1.0, implementation="cuda", **arrays)
