"""Where the engine's arrays lie on a mesh: heads over the tensor axis where they divide, the rest everywhere.

Slots and pages are not split: every device of the other axes holds, and decodes, all of them.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.model.attention import PagedKv
from jaxrl.model.gdn import GdnCache


def constrained(tree: Any, mesh: Mesh) -> Any:
    """`tree` with every array told where to lie; for use inside `jax.jit`."""
    return jax.tree.map(lambda node: _constrained(node, mesh), tree, is_leaf=_is_cache)


def _is_cache(node: Any) -> bool:
    return isinstance(node, GdnCache | PagedKv)


def _constrained(node: Any, mesh: Mesh) -> Any:
    def put(array: jax.Array, *axes: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*axes)))

    match node:
        case PagedKv(k, v):
            axis = _over_heads(k.shape[2], mesh)
            return PagedKv(put(k, None, None, axis), put(v, None, None, axis))
        case GdnCache(taps, state):
            return GdnCache(put(taps), put(state, None, _over_heads(state.shape[1], mesh)))
    return put(node)


def _over_heads(heads: int, mesh: Mesh) -> str | None:
    return "tensor" if heads % mesh.shape["tensor"] == 0 else None
