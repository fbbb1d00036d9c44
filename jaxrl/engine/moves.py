"""Programs that move rows and pages within the device and to the host, whatever the model computes.

Index lists of any length go through programs of one width, call by call: the number of compiled programs
is fixed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.engine import cache as device
from jaxrl.engine.cache import EngineCache, HostCopy, Sizes
from jaxrl.engine.places import constrained
from jaxrl.model.spec import ModelSpec

_INDICES = 64  # of one call; only those meant cost anything
_PAGES = 16  # that travel between host and device in one call


class Moves:
    """Copies, fills, reads and writes; every method that returns a cache takes the old one for good."""

    def __init__(self, spec: ModelSpec, sizes: Sizes, *, mesh: Mesh | None = None):
        self.spec, self.sizes, self.mesh = spec, sizes, mesh
        self._jitted: list[Any] = []
        self._copy = self.compiled(device.copy_rows, donate_argnums=0)
        self._copy_within = self.compiled(device.copy_rows_within, donate_argnums=0)
        self._fill = self.compiled(device.fill_rows, donate_argnums=0)
        self._read = self.compiled(device.read_rows)
        self._write = self.compiled(device.write_rows, donate_argnums=0)

    def compiled(self, function: Callable[..., Any], **options: Any) -> Any:
        """`jax.jit`, counted by `programs`."""

        # A function of its own: all jits of one function share their programs.
        @wraps(function)
        def own(*args):
            made = function(*args)
            return made if self.mesh is None else constrained(made, self.mesh)

        self._jitted.append(jax.jit(own, **options))
        return self._jitted[-1]

    def programs(self) -> int:
        """Compiled variants so far, over all functions."""
        return sum(jitted._cache_size() for jitted in self._jitted)

    def init_cache(self) -> EngineCache:
        """An empty cache."""
        if self.mesh is None:
            return EngineCache.empty(self.spec, self.sizes)
        mesh = self.mesh
        return jax.jit(lambda: constrained(EngineCache.empty(self.spec, self.sizes), mesh))()

    def page_bytes(self) -> int:
        """Bytes of one page over all attention layers."""
        return device.page_bytes(self.spec, self.sizes.page_size)

    def row_bytes(self) -> int:
        """Bytes of one row of recurrent state over all GDN layers."""
        return device.row_bytes(self.spec)

    def copy(self, cache: EngineCache, *, sources: Sequence[int], targets: Sequence[int]) -> EngineCache:
        """Live rows `sources[i]` to live rows `targets[i]`: one prefix into many slots."""
        live = self._within(cache.live, sources, targets, self.sizes.slots)
        return cache._replace(live=live)

    def copy_pages(
        self, cache: EngineCache, *, sources: Sequence[int], targets: Sequence[int]
    ) -> EngineCache:
        """Pages `sources[i]` to pages `targets[i]`."""
        return cache._replace(kv=self._within(cache.kv, sources, targets, self.sizes.pages))

    def park(self, cache: EngineCache, *, slots: Sequence[int], rows: Sequence[int]) -> EngineCache:
        """Live rows `slots[i]` to parked rows `rows[i]`."""
        parked = cache.parked
        for slot_W, row_W, count in self._pairs(slots, rows, self.sizes.slots, self.sizes.parked):
            parked = self._copy(parked, cache.live, slot_W, row_W, count)
        return cache._replace(parked=parked)

    def unpark(self, cache: EngineCache, *, rows: Sequence[int], slots: Sequence[int]) -> EngineCache:
        """Parked rows `rows[i]` to live rows `slots[i]`."""
        live = cache.live
        for row_W, slot_W, count in self._pairs(rows, slots, self.sizes.parked, self.sizes.slots):
            live = self._copy(live, cache.parked, row_W, slot_W, count)
        return cache._replace(live=live)

    def fill(
        self,
        cache: EngineCache,
        *,
        value: float,
        slots: Sequence[int] = (),
        rows: Sequence[int] = (),
        pages: Sequence[int] = (),
    ) -> EngineCache:
        """Overwrites whole live rows, parked rows and pages with `value`."""

        def filled(tree, indices, limit):
            for index_W, count in _calls(indices, limit, _INDICES):
                tree = self._fill(tree, index_W, count, np.float32(value))
            return tree

        sizes = self.sizes
        return EngineCache(
            live=filled(cache.live, slots, sizes.slots),
            parked=filled(cache.parked, rows, sizes.parked),
            kv=filled(cache.kv, pages, sizes.pages),
        )

    def read(
        self, cache: EngineCache, *, pages: Sequence[int], slot: int | None = None, row: int | None = None
    ) -> HostCopy:
        """Pages, in order, and either a slot's row or a parked one, on the host.

        Raises:
          ValueError: neither or both of `slot` and `row`, or an index that does not exist.
        """
        if (slot is None) == (row is None):
            raise ValueError(f"expected either a slot or a parked row; got slot={slot} and row={row}")
        held, index, limit = (
            (cache.live, slot, self.sizes.slots) if row is None else (cache.parked, row, self.sizes.parked)
        )
        ((index_W, _),) = _calls([index], limit, 1)
        state = jax.tree.map(lambda leaf: np.asarray(leaf)[0], self._read(held, index_W))
        parts = [
            device.to_host(self._read(cache.kv, page_W), int(count))
            for page_W, count in _calls(pages, self.sizes.pages, _PAGES)
        ]
        none = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), cache.kv)
        return HostCopy(state, jax.tree.map(lambda *leaves: np.concatenate(leaves), none, *parts))

    def write(self, cache: EngineCache, copy: HostCopy, *, pages: Sequence[int], slot: int) -> EngineCache:
        """Puts what `read` returned into these pages and this slot, bit for bit.

        Raises:
          ValueError: another number of pages than was read, or an index that does not exist.
        """
        if any(len(leaf) != len(pages) for leaf in jax.tree.leaves(copy.kv)):
            raise ValueError(
                f"expected as many pages as were read, {len(copy.kv[0].k_PSKH)}; got {len(pages)}"
            )
        ((slot_W, one),) = _calls([slot], self.sizes.slots, 1)
        live = self._write(cache.live, jax.tree.map(lambda leaf: leaf[None], copy.row), slot_W, one)
        kv = cache.kv
        for start, (page_W, count) in enumerate(_calls(pages, self.sizes.pages, _PAGES)):
            at = slice(start * _PAGES, start * _PAGES + int(count))
            kv = self._write(kv, jax.tree.map(lambda leaf, at=at: _padded(leaf[at]), copy.kv), page_W, count)
        return cache._replace(live=live, kv=kv)

    def warm_up_moves(self, cache: EngineCache) -> EngineCache:
        """Runs every program once without effect."""
        none, zero = np.zeros(_INDICES, np.int32), np.int32(0)
        cache = cache._replace(
            live=self._copy_within(cache.live, none, none, zero),
            kv=self._copy_within(cache.kv, none, none, zero),
        )
        if self.sizes.parked:
            parked = self._copy(cache.parked, cache.live, none, none, zero)
            cache = cache._replace(parked=parked, live=self._copy(cache.live, parked, none, none, zero))
            self._read(cache.parked, none[:1])
        value = np.float32(0)
        kept = EngineCache(*(self._fill(p, none, zero, value) if _rows(p) else p for p in cache))  # pyright: ignore
        row, pages = self._read(kept.live, none[:1]), self._read(kept.kv, none[:_PAGES])
        return kept._replace(
            live=self._write(kept.live, device.to_host(row, 1), none[:1], zero),
            kv=self._write(kept.kv, device.to_host(pages, _PAGES), none[:_PAGES], zero),
        )

    def _within(self, tree, sources: Sequence[int], targets: Sequence[int], limit: int):
        if both := set(sources) & set(targets):
            raise ValueError(f"expected targets that are no sources; got {sorted(both)} as both")
        for source_W, target_W, count in self._pairs(sources, targets, limit, limit):
            tree = self._copy_within(tree, source_W, target_W, count)
        return tree

    @staticmethod
    def _pairs(
        sources: Sequence[int], targets: Sequence[int], source_limit: int, target_limit: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.int32]]:
        if len(sources) != len(targets):
            raise ValueError(
                f"expected one target per source; got {len(sources)} sources and {len(targets)} targets"
            )
        from_calls = _calls(sources, source_limit, _INDICES)
        into_calls = _calls(targets, target_limit, _INDICES)
        for (source_W, count), (target_W, _) in zip(from_calls, into_calls, strict=True):
            yield source_W, target_W, count


def _calls(indices: Sequence[Any], limit: int, width: int) -> list[tuple[np.ndarray, np.int32]]:
    """The indices in arrays of `width`, and how many of each are meant."""
    bad = next((index for index in indices if not 0 <= index < limit), None)
    if bad is not None:
        raise ValueError(f"expected an index within 0..{limit - 1}; got {bad}")
    calls = []
    for start in range(0, len(indices), width):
        part = indices[start : start + width]
        index_W = np.zeros(width, np.int32)
        index_W[: len(part)] = part
        calls.append((index_W, np.int32(len(part))))
    return calls


def _rows(tree: Any) -> int:
    """Length of the leading axis; 0 too where a model has no layer of the kind."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(tree)), 0)


def _padded(leaf: np.ndarray) -> np.ndarray:
    return np.concatenate([leaf, np.zeros((_PAGES - len(leaf), *leaf.shape[1:]), leaf.dtype)])
