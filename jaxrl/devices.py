"""The mesh that the settings name, and where a model's arrays lie on it. Only entry points import this."""

import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.mesh import make_mesh, row_sharding, shardings
from jaxrl.rl.learner import Placement


def build_mesh(config: Config) -> Mesh | None:
    """The mesh of the section `mesh` over all devices; None for one device.

    Raises `ConfigError` for another number of devices, and for what a mesh cannot do.
    """
    axes = config.mesh.model_dump()
    size = math.prod(axes.values())
    if size == 1:
        return None
    shown = ", ".join(f"mesh.{name} = {value}" for name, value in axes.items())
    if size != len(jax.devices()):
        raise ConfigError(
            f"{shown}: expected a product of {len(jax.devices())}, the number of devices here, or 1, "
            f"got {size}"
        )
    parts = config.mesh.data * config.mesh.fsdp
    if config.rl.rows_per_microbatch % parts:
        raise ConfigError(
            f"rl.rows_per_microbatch = {config.rl.rows_per_microbatch}: expected a multiple of mesh.data * "
            f"mesh.fsdp = {parts}, over which rows are split"
        )
    if config.rl.lora is not None:
        raise ConfigError(f"rl.lora: expected null with {shown}: adapters lie on one device")
    return make_mesh(**axes)


def place_learner(model: nnx.Module, mesh: Mesh | None) -> Placement | None:
    """Where the learner's arrays lie. Raises `ConfigError` for a model that cannot be divided so."""
    if mesh is None:
        return None
    return Placement(mesh=mesh, parameters=_places(nnx.state(model), mesh), batch=row_sharding(mesh).spec)


def _places(state: Any, mesh: Mesh) -> Any:
    try:
        return shardings(state, mesh)
    except ValueError as error:
        raise ConfigError(f"mesh: {error}; choose other axes") from error
