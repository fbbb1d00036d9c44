"""Work on the cache that precedes a program: moves, copies, and what goes to the host and comes back."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from jaxrl.engine.cache import EngineCache
from jaxrl.engine.context import Stored
from jaxrl.engine.step import Steps


class CopyPages(NamedTuple):
    """Keys and values of one page, to another."""

    source: int
    target: int


class Park(NamedTuple):
    """The state in a slot, to a spare row."""

    source: int
    target: int


class Unpark(NamedTuple):
    """The state in a spare row, to a slot."""

    source: int
    target: int


class Fill(NamedTuple):
    """NaN over what was freed (tests)."""

    slots: tuple[int, ...]
    rows: tuple[int, ...]
    pages: tuple[int, ...]


class Offload(NamedTuple):
    """State and pages to host memory; exactly one of slot and row is given."""

    stored: Stored
    pages: tuple[int, ...]
    slot: int | None
    row: int | None


class Restore(NamedTuple):
    """State and pages back from host memory."""

    stored: Stored
    pages: tuple[int, ...]
    slot: int


Op = CopyPages | Park | Unpark | Fill | Offload | Restore
_MOVES = (CopyPages, Park, Unpark)


def apply(ops: Sequence[Op], steps: Steps, cache: EngineCache) -> EngineCache:
    """Runs `ops` in order; moves of one kind that follow each other and don't meet share a dispatch."""
    for batch in _batches(ops):
        first = batch[0]
        match first:
            case Fill():
                cache = _fill(batch, steps, cache)
            case Offload(stored, pages, slot, row):
                stored.copy = steps.read(cache, pages=pages, slot=slot, row=row)
            case Restore(stored, pages, slot):
                assert stored.copy is not None, "offloading precedes restoring"
                cache = steps.write(cache, stored.copy, pages=pages, slot=slot)
            case _:
                cache = _move(batch, steps, cache)
    return cache


def _batches(ops: Sequence[Op]) -> Iterator[list[Op]]:
    for kind, group in groupby(ops, type):
        batch: list = []
        for op in group:
            if batch and (kind in (Offload, Restore) or (kind in _MOVES and _meets(op, batch))):
                yield batch
                batch = []
            batch.append(op)
        yield batch


def _meets(move, batch) -> bool:
    """Whether `move` reads or writes what one of `batch` writes, or writes what one of them reads."""
    return any(move.target in (other.source, other.target) or move.source == other.target for other in batch)


def _fill(batch, steps: Steps, cache: EngineCache) -> EngineCache:
    slots, rows, pages = ([place for op in batch for place in op[i]] for i in range(3))
    return steps.fill(cache, value=float("nan"), slots=slots, rows=rows, pages=pages)


def _move(batch, steps: Steps, cache: EngineCache) -> EngineCache:
    sources, targets = [op.source for op in batch], [op.target for op in batch]
    match batch[0]:
        case CopyPages():
            return steps.copy_pages(cache, sources=sources, targets=targets)
        case Park():
            return steps.park(cache, slots=sources, rows=targets)
        case _:
            return steps.unpark(cache, rows=sources, slots=targets)
