"""Packs documents of different lengths into rows of one fixed length. Pure NumPy.

Every microbatch of a run has the same shape, so the training step is compiled once. All
per-token arrays of a `Microbatch` are aligned with *predictions*: entry t belongs to the token
that position t predicts, which is token t + 1 of the same document.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int16, Int32

PackingOrder = Literal["in_order", "first_fit_decreasing"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One document to train on.

    `weights_T[t]` is the loss weight of token t: 0 or 1 in reinforcement learning, any
    non-negative number in supervised training. The first token is predicted by nothing, so its
    weight must be 0. `logprobs_T` are the sampler's, 0 where nothing was sampled. `routes_TLX` are the X
    experts of each of L layers that the sampler used for a token, -1 where it recorded none; None where
    routing is not replayed.
    """

    tokens_T: Int32[np.ndarray, " T"]
    weights_T: Float32[np.ndarray, " T"]
    logprobs_T: Float32[np.ndarray, " T"] | None = None
    advantage: float = 0.0
    routes_TLX: Int16[np.ndarray, "T L X"] | None = None


class Microbatch(NamedTuple):
    """B rows of T tokens. Segment 0 is padding; segments 1, 2, .. are whole documents.

    NumPy arrays on the host, JAX arrays inside a training step.

    `old_logprobs_BT` and `reference_logprobs_BT` are NaN until a trainer pass fills them, so that a loss
    which needs them fails visibly instead of using something else. `routes_BTLX` is aligned with
    `tokens_BT`, -1 where the model chooses its experts itself, and None where no example has any.
    """

    tokens_BT: Int32[Any, "B T"]
    targets_BT: Int32[Any, "B T"]
    segment_ids_BT: Int32[Any, "B T"]
    positions_BT: Int32[Any, "B T"]
    weights_BT: Float32[Any, "B T"]
    advantages_BT: Float32[Any, "B T"]
    sampler_logprobs_BT: Float32[Any, "B T"]
    old_logprobs_BT: Float32[Any, "B T"]
    reference_logprobs_BT: Float32[Any, "B T"]
    routes_BTLX: Int16[Any, "B T L X"] | None = None


def pack(
    examples: Iterable[Example],
    *,
    rows: int,
    row_length: int,
    order: PackingOrder = "in_order",
) -> Iterator[Microbatch]:
    """Yields microbatches of `rows` x `row_length` that hold every example exactly once.

    `in_order` keeps the order of the examples over microbatches and needs no look-ahead, so a
    microbatch is ready as soon as its examples are. `first_fit_decreasing` sorts by length
    first (ties by position) and wastes less. Both depend on nothing but the examples.

    Raises:
        ValueError: an example is empty, longer than a row, or malformed.
    """
    _check_sizes(rows, row_length)
    if order == "in_order":
        yield from _in_order(examples, rows, row_length)
    elif order == "first_fit_decreasing":
        checked = [_checked(example, row_length) for example in examples]
        for bins in _first_fit_decreasing(checked, rows, row_length):
            yield _fill(bins, rows, row_length)
    else:
        raise ValueError(f"expected order in_order or first_fit_decreasing, got {order!r}")


def fill_fraction(batch: Microbatch) -> float:
    """Share of the batch's positions that hold a token."""
    return float(np.mean(batch.segment_ids_BT > 0))


def trained_tokens(batch: Microbatch) -> int:
    """Number of tokens with a loss weight."""
    return int(np.count_nonzero(batch.weights_BT))


def _check_sizes(rows: int, row_length: int) -> None:
    if rows < 1 or row_length < 1:
        raise ValueError(f"expected rows and row_length of at least 1, got {rows} and {row_length}")


def _checked(example: Example, row_length: int) -> Example:
    length = len(example.tokens_T)
    if not 0 < length <= row_length:
        raise ValueError(
            f"expected a document of 1 to {row_length} tokens, got {length}: "
            "raise row_length or cut the document"
        )
    for name, array in (("weights_T", example.weights_T), ("logprobs_T", example.logprobs_T)):
        if array is not None and array.shape != (length,):
            raise ValueError(f"expected {name} of shape ({length},) like tokens_T, got {array.shape}")
    if example.weights_T[0] != 0:
        raise ValueError(
            "expected weight 0 on a document's first token, which nothing predicts, "
            f"got {example.weights_T[0]}"
        )
    if example.routes_TLX is not None and len(example.routes_TLX) != length:
        raise ValueError(f"expected routes_TLX of {length} tokens, got {len(example.routes_TLX)}")
    if not (np.isfinite(example.weights_T).all() and (example.weights_T >= 0).all()):
        raise ValueError("expected finite, non-negative weights_T; a sign or scale belongs into `advantage`")
    return example


type _Rows = list[list[Example]]


class Packer:
    """Packs in order as examples arrive: first fit among the rows of one microbatch.

    The first example that fits nowhere closes the microbatch, so microbatches depend on the order of
    the examples alone, not on when they came.
    """

    def __init__(self, *, rows: int, row_length: int) -> None:
        """Raises `ValueError` for sizes below 1."""
        _check_sizes(rows, row_length)
        self._rows, self._row_length = rows, row_length
        self._bins: _Rows = []
        self._free: list[int] = []

    def add(self, example: Example) -> Iterator[Microbatch]:
        """Takes `example`; yields the microbatch that it closed, if any. Raises as `pack` does."""
        _checked(example, self._row_length)
        if not self._place(example):
            yield from self.flush()
            self._place(example)

    def flush(self) -> Iterator[Microbatch]:
        """Yields what is left, if anything, padded to the full shape."""
        bins, self._bins, self._free = self._bins, [], []
        if bins:
            yield _fill(bins, self._rows, self._row_length)

    def _place(self, example: Example) -> bool:
        return _place(example, self._bins, self._free, rows=self._rows, row_length=self._row_length)


def _in_order(examples: Iterable[Example], rows: int, row_length: int) -> Iterator[Microbatch]:
    packer = Packer(rows=rows, row_length=row_length)
    for example in examples:
        yield from packer.add(example)
    yield from packer.flush()


def _first_fit_decreasing(examples: Sequence[Example], rows: int, row_length: int) -> Iterator[_Rows]:
    bins: _Rows = []
    free: list[int] = []
    for example in sorted(examples, key=lambda e: -len(e.tokens_T)):
        _place(example, bins, free, rows=len(examples), row_length=row_length)
    for start in range(0, len(bins), rows):
        yield bins[start : start + rows]


def _place(example: Example, bins: _Rows, free: list[int], *, rows: int, row_length: int) -> bool:
    length = len(example.tokens_T)
    for index, room in enumerate(free):
        if length <= room:
            bins[index].append(example)
            free[index] -= length
            return True
    if len(bins) == rows:
        return False
    bins.append([example])
    free.append(row_length - length)
    return True


def _empty(rows: int, row_length: int, routes: tuple[int, ...] | None) -> Microbatch:
    def zeros(dtype: type[np.generic]) -> np.ndarray:
        return np.zeros((rows, row_length), dtype)

    unknown = np.full((rows, row_length), np.nan, np.float32)
    return Microbatch(
        tokens_BT=zeros(np.int32),
        targets_BT=zeros(np.int32),
        segment_ids_BT=zeros(np.int32),
        positions_BT=zeros(np.int32),
        weights_BT=zeros(np.float32),
        advantages_BT=zeros(np.float32),
        sampler_logprobs_BT=zeros(np.float32),
        old_logprobs_BT=unknown,
        reference_logprobs_BT=unknown.copy(),
        routes_BTLX=None if routes is None else np.full((rows, row_length, *routes), -1, np.int16),
    )


def _routes_shape(bins: _Rows) -> tuple[int, ...] | None:
    """(layers, experts of a token) of the examples' routes; None if they have none."""
    shapes = {None if e.routes_TLX is None else e.routes_TLX.shape[1:] for row in bins for e in row}
    if len(shapes) > 1:
        raise ValueError(
            f"expected routes of one shape in all examples or in none, got {shapes}: record the experts of "
            "every rollout (EngineOptions.routed_experts)"
        )
    return shapes.pop()


def _fill(bins: _Rows, rows: int, row_length: int) -> Microbatch:
    batch = _empty(rows, row_length, _routes_shape(bins))
    for row, examples in enumerate(bins):
        start = 0
        for segment, example in enumerate(examples, start=1):
            _write(batch, example, row=row, start=start, segment=segment)
            start += len(example.tokens_T)
    return batch


def _write(batch: Microbatch, example: Example, *, row: int, start: int, segment: int) -> None:
    length = len(example.tokens_T)
    document = (row, slice(start, start + length))
    predictions = (row, slice(start, start + length - 1))
    batch.tokens_BT[document] = example.tokens_T
    batch.segment_ids_BT[document] = segment
    batch.positions_BT[document] = np.arange(length)
    batch.targets_BT[predictions] = example.tokens_T[1:]
    batch.weights_BT[predictions] = example.weights_T[1:]
    batch.advantages_BT[document] = example.advantage
    if example.logprobs_T is not None:
        batch.sampler_logprobs_BT[predictions] = example.logprobs_T[1:]
    if example.routes_TLX is not None:
        assert batch.routes_BTLX is not None
        batch.routes_BTLX[document] = example.routes_TLX
