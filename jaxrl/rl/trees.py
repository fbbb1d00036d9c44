"""Names and digests of the leaves of a tree of arrays."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Names along a JAX key path, without the `value` that ends the path of an nnx variable."""
    names = tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
    return names[:-1] if len(names) > 1 and names[-1] == "value" else names


def flat(tree: Any) -> dict[str, Any]:
    """Leaves by their path, names joined with "/".

    Raises:
        ValueError: two leaves have the same name.
    """
    leaves = [("/".join(path_names(path)), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    named = dict(leaves)
    if len(named) != len(leaves):
        raise ValueError(f"expected distinct leaf names, got {sorted(name for name, _ in leaves)}")
    return named


def unflat(leaves: Mapping[str, Any], *, like: Any) -> Any:
    """The tree of `like` with the leaves of the same names."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in flat(like)])


def host_copy(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by name as NumPy arrays that share no memory with the device.

    Raises:
        ValueError: a leaf is spread over other processes.
    """
    for name, leaf in flat(tree).items():
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"expected {name} to be addressable by this process, got {leaf.sharding}")
    return {name: np.array(leaf, copy=True) for name, leaf in flat(tree).items()}


def describe(array: np.ndarray) -> dict[str, Any]:
    """Shape, dtype and SHA-256 of an array's bytes in C order."""
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}
