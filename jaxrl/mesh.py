"""The device mesh, and the one table that maps logical axes of parameters to its axes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor", "expert", "context")

# Logical axis of a parameter -> mesh axis. An axis without an entry is replicated.
RULES: Mapping[str, str] = {
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": "expert",
}


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh with all five named axes over `devices`, by default all of them.

    Raises:
      ValueError: the product of the sizes is not the number of devices.
    """
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor, expert, context), strict=True))
    devices = jax.devices() if devices is None else devices
    if math.prod(sizes.values()) != len(devices):
        shown = " * ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"expected the product of the mesh axes to be {len(devices)}, the number of devices; "
            f"got {shown} = {math.prod(sizes.values())}: change one of them"
        )
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=kinds, devices=devices)


def shardings(state: nnx.State, mesh: Mesh | AbstractMesh) -> Any:
    """A tree like `state` with a NamedSharding in place of each variable's value.

    A variable's logical axes are its metadata `axes`; one without (a step counter) is replicated.

    Raises:
      ValueError: an axis cannot be divided among its mesh axis.
    """
    return jax.tree.map(lambda v: v.replace(_sharding(v, mesh)), state, is_leaf=_is_variable)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch, split over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _sharding(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> NamedSharding:
    axes = variable.get_metadata().get("axes", ())
    parts = [None if axis is None else RULES.get(axis) for axis in axes]
    for axis, part, size in zip(axes, parts, variable.shape, strict=False):
        if part is not None and size % mesh.shape[part]:
            raise ValueError(
                f"expected the size of logical axis {axis!r} to be a multiple of mesh axis "
                f"{part}={mesh.shape[part]}; got {size} in shape {variable.shape}"
            )
    return NamedSharding(mesh, PartitionSpec(*parts))
