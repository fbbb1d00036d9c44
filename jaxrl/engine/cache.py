"""The engine's hybrid cache: keys and values in pages, recurrent state in rows.

A live row belongs to a slot; parked rows keep the states of idle sessions and of shared prefixes, to which
no later token may be added. Pages know no owner: which slot reads which page is the host's to say. W is
the width of an index list, whose first `count` entries are meant.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxrl.model.attention import PagedKv
from jaxrl.model.gdn import GdnCache
from jaxrl.model.spec import ModelSpec
from jaxrl.model.transformer import Cache


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Fixed sizes of the compiled programs.

    Raises:
      ValueError: sizes that do not fit together, named with their values.
    """

    slots: int  # live rows
    context: int  # tokens a slot can hold, a multiple of page_size
    pages: int  # pages in the pool of each attention layer
    page_size: int = 32  # tokens of a page
    parked: int = 0  # rows of recurrent state beside the live ones
    prefill_rows: int = 8  # pieces of one prefill
    prefill_buckets: tuple[int, ...] = (16, 64)  # lengths that pieces are padded to, ascending
    decode_steps: int = 4  # most tokens per slot of one `generate`
    top_logprobs: int = 0  # most-likely tokens recorded beside each sampled one
    routed_experts: bool = False  # record the experts chosen for every token fed

    def __post_init__(self) -> None:
        for name in ("slots", "context", "pages", "page_size", "prefill_rows", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1; got {getattr(self, name)}")
        if self.context % self.page_size:
            raise ValueError(f"expected context in whole pages of {self.page_size}; got {self.context}")
        if min(self.parked, self.top_logprobs) < 0:
            raise ValueError(
                f"expected counts of 0 or more; got parked={self.parked}, top_logprobs={self.top_logprobs}"
            )
        buckets = self.prefill_buckets
        if not buckets or min(buckets) < 1 or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"expected ascending, distinct prefill_buckets; got {buckets}")

    @property
    def slot_pages(self) -> int:
        """Pages of a slot whose context is full."""
        return self.context // self.page_size


class EngineCache(NamedTuple):
    """Device arrays, donated to every program that changes them; one entry per layer of a kind."""

    live: tuple[GdnCache, ...]  # leading axis: slot
    parked: tuple[GdnCache, ...]  # leading axis: parked row
    kv: tuple[PagedKv, ...]  # leading axis: page

    @classmethod
    def empty(cls, spec: ModelSpec, sizes: Sizes) -> "EngineCache":
        """Zeros."""
        gdn, attention = _kinds(spec)
        return cls(
            live=tuple(GdnCache.empty(spec, rows=sizes.slots) for _ in range(gdn)),
            parked=tuple(GdnCache.empty(spec, rows=sizes.parked) for _ in range(gdn)),
            kv=tuple(
                PagedKv.empty(spec, pages=sizes.pages, page_size=sizes.page_size) for _ in range(attention)
            ),
        )


@dataclass(frozen=True)
class HostCopy:
    """One state row and some pages, as NumPy arrays: what a session needs to go on later."""

    row: tuple[GdnCache, ...]  # without the leading axis
    kv: tuple[PagedKv, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.row, self.kv)))


def page_bytes(spec: ModelSpec, page_size: int) -> int:
    """Bytes of one page over all attention layers."""
    return _kinds(spec)[1] * _bytes(partial(PagedKv.empty, spec, pages=1, page_size=page_size))


def row_bytes(spec: ModelSpec) -> int:
    """Bytes of one row of recurrent state over all GDN layers."""
    return _kinds(spec)[0] * _bytes(partial(GdnCache.empty, spec, rows=1))


def layered(spec: ModelSpec, live: tuple[GdnCache, ...], kv: tuple[PagedKv, ...]) -> Cache:
    """The model's form: one entry per layer, in order."""
    rows, pages = iter(live), iter(kv)
    return tuple(next(rows if kind == "linear_attention" else pages) for kind in spec.layer_types)


def by_kind(cache: Cache) -> tuple[tuple[GdnCache, ...], tuple[PagedKv, ...]]:
    """The inverse of `layered`."""
    live = tuple(layer for layer in cache if isinstance(layer, GdnCache))
    return live, tuple(layer for layer in cache if isinstance(layer, PagedKv))


# What follows runs on the device. Loops, not gathers: the cost is that of the entries meant, in place.


def copy_rows(target, source, source_W: Int[Array, " W"], target_W: Int[Array, " W"], count: Array):
    """`target` with the first `count` rows target_W taken from rows source_W of `source`."""

    def body(i, target):
        return jax.tree.map(
            lambda into, leaf: lax.dynamic_update_index_in_dim(into, leaf[source_W[i]], target_W[i], 0),
            target,
            source,
        )

    return lax.fori_loop(0, count, body, target)


def copy_rows_within(target, source_W: Int[Array, " W"], target_W: Int[Array, " W"], count: Array):
    """As `copy_rows` from `target` itself."""

    def body(i, target):
        return jax.tree.map(
            lambda leaf: lax.dynamic_update_index_in_dim(leaf, leaf[source_W[i]], target_W[i], 0), target
        )

    return lax.fori_loop(0, count, body, target)


def fill_rows(target, target_W: Int[Array, " W"], count: Array, value: Array):
    """`target` with the first `count` rows target_W set to `value`."""

    def body(i, target):
        return jax.tree.map(
            lambda leaf: lax.dynamic_update_index_in_dim(
                leaf, jnp.full(leaf.shape[1:], value, leaf.dtype), target_W[i], 0
            ),
            target,
        )

    return lax.fori_loop(0, count, body, target)


def read_rows(source, source_W: Int[Array, " W"]):
    """Rows source_W of every leaf."""
    return jax.tree.map(lambda leaf: leaf.at[source_W].get(mode="clip"), source)


def write_rows(target, rows, target_W: Int[Array, " W"], count: Array):
    """`target` with the first `count` of `rows` at target_W."""

    def body(i, target):
        return jax.tree.map(
            lambda into, leaf: lax.dynamic_update_index_in_dim(into, leaf[i], target_W[i], 0), target, rows
        )

    return lax.fori_loop(0, count, body, target)


def to_host(tree, count: int):
    """The first `count` rows as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], tree)


def _kinds(spec: ModelSpec) -> tuple[int, int]:
    gdn = spec.layer_types.count("linear_attention")
    return gdn, len(spec.layer_types) - gdn


def _bytes(make) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make)))
