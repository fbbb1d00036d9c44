"""Reads and writes a model as a hub repository: `config.json` and safetensors, in one file or sharded.

All published layouts are read (see `jaxrl.model.hub_layout`), block by block into arrays that already
lie where the mesh wants them: the host holds the parameters placed on it and at most one tensor more.
Written is the published layout: text weights under `model.language_model.`, experts fused. Vision and
multi-token-prediction tensors stay on disk, unless that block is asked for; `save_hub` copies them from
the source it is given.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from jaxrl.mesh import shardings
from jaxrl.model.hub_files import CODES, NUMPY, HubError, Outgoing, write_directory, write_text
from jaxrl.model.hub_layout import (
    Hub,
    Piece,
    Region,
    copy_shared,
    hub_name,
    hub_order,
    model_order,
    model_view,
    open_hub,
    read_block,
)
from jaxrl.model.params import Path as WeightPath
from jaxrl.model.params import Weight, all_weights
from jaxrl.model.spec import Dtype, ModelSpec
from jaxrl.model.transformer import Transformer

__all__ = ["HubError", "Layout", "hub_name", "load_hub", "open_hub", "save_hub"]

Layout = Literal["hub", "source"]
SHARD_BYTES = 5 * 10**9


def load_hub(
    directory: Path | str, *, dtype: Dtype | None = None, mesh: Mesh | None = None, mtp: bool = False
) -> Transformer:
    """The model in `directory`, in its own dtype or in `dtype`.

    Args:
      mesh: place every parameter as `jaxrl.mesh` says; each process reads only its own devices' blocks.
        None: whole arrays on the default device.
      mtp: load the multi-token-prediction block, too.

    Raises:
      FileNotFoundError: `config.json` or the tensors are missing.
      HubError: a tensor is truncated, missing, misnamed or of another shape or dtype than the config says.
      ValueError: an axis cannot be divided over the mesh, or float64 is wanted without `jax_enable_x64`.
    """
    source = open_hub(directory, mtp=mtp)
    spec = replace(source.spec, dtype=dtype or source.spec.dtype)
    if spec.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError(f"{directory}: expected jax_enable_x64 for float64; got it off: set it")
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0))))
    places = dict(flat_state(shardings(state, mesh))) if mesh is not None else {}
    table = all_weights(spec)
    filled = [
        (path, variable.replace(_read(table[path], source.pieces[path], places.get(path))))
        for path, variable in flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def save_hub(
    model: Transformer,
    directory: Path | str,
    *,
    source: Path | str | None = None,
    layout: Layout = "hub",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a hub repository; each file is replaced atomically, the config last.

    Args:
      source: the repository the model came from. Its config, its dtype of each tensor and its vision and
        multi-token-prediction tensors are kept. None: a text-only config and the parameters' own dtypes.
      layout: `source` keeps also the source's tensor names, as for experts stored one by one.
      shard_bytes: size from which on the tensors are split into several files.

    Raises:
      HubError: `source` is damaged or another model's, or `directory` holds a sharded checkpoint.
      ValueError: a parameter is spread over other processes.
    """
    directory = Path(directory)
    values = {path: variable[...] for path, variable in flat_state(nnx.state(model, nnx.Param))}
    for path, value in values.items():
        if not value.is_fully_addressable:
            raise ValueError(f"expected {path} to be addressable by this process; got {value.sharding}")
    opened = open_hub(source, mtp=model.spec.mtp) if source is not None else None
    if opened is not None:
        _require_same_model(opened, model.spec)
    tensors = list(_outgoing(model.spec, values, opened, layout))
    directory.mkdir(parents=True, exist_ok=True)
    config = _config_text(model.spec, opened)
    write_directory(directory, tensors, shard_bytes=shard_bytes)
    write_text(directory / "config.json", config)


def flat_state(state: Any) -> list[tuple[WeightPath, nnx.Variable]]:
    """The variables of a state by path, as in `all_weights`."""
    return list(cast(Any, nnx.to_flat_state(state)))


def _read(weight: Weight, pieces: tuple[Piece, ...], variable: nnx.Variable | None) -> jax.Array:
    """One parameter; waits for it, since a copy under way holds its host block."""
    if variable is None:
        whole = tuple((0, size) for size in weight.shape)
        return jax.block_until_ready(jax.device_put(read_block(weight, pieces, whole, weight.dtype)))
    sharding: Sharding = variable.get_value()
    shards: list[jax.Array] = []
    for region, devices in _regions(sharding, weight.shape).items():
        block = read_block(weight, pieces, region, weight.dtype)
        shards += jax.block_until_ready([jax.device_put(block, device) for device in devices])
        del block
    return jax.make_array_from_single_device_arrays(weight.shape, sharding, shards)


def _regions(sharding: Sharding, shape: tuple[int, ...]) -> dict[Region, list[Any]]:
    """The distinct blocks of this process's devices, so that a replicated block is read once."""
    regions: dict[Region, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        regions.setdefault(_bounds(index, shape), []).append(device)
    return regions


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _require_same_model(source: Hub, spec: ModelSpec) -> None:
    expected, got = (vars(each) | {"dtype": None} for each in (spec, source.spec))
    if different := [name for name in expected if expected[name] != got[name]]:
        shown = ", ".join(f"{name}: expected {expected[name]}; got {got[name]}" for name in different[:3])
        raise HubError(f"{source.directory / 'config.json'}: source is another model's: {shown}")


def _config_text(spec: ModelSpec, source: Hub | None) -> str:
    if source is None:
        return json.dumps(spec.to_hub_config(), indent=2) + "\n"
    return (source.directory / "config.json").read_text(encoding="utf-8")


def _outgoing(
    spec: ModelSpec, values: Mapping[WeightPath, jax.Array], source: Hub | None, layout: Layout
) -> Iterator[Outgoing]:
    for path, weight in all_weights(spec).items():
        pieces = source.pieces[path] if source is not None else ()
        code = pieces[0].entry.dtype if pieces else CODES[np.dtype(weight.dtype)]
        if pieces and (layout == "source" or path[0] == "mtp"):
            parts = [(piece.entry.name, piece.entry.shape, piece.region) for piece in pieces]
        else:
            shape = hub_order(weight, weight.shape, 1)
            parts = [(hub_name(path, weight), shape, tuple((0, size) for size in shape))]
        for name, shape, region in parts:
            yield Outgoing(name, code, shape, partial(_bytes, weight, values[path], region, NUMPY[code]))
    for entry in source.carried.values() if source is not None else ():
        yield Outgoing(entry.name, entry.dtype, entry.shape, entry.chunks)


def _bytes(weight: Weight, value: jax.Array, region: Region, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The bytes of a block, `region` being in the order of the hub's axes."""
    block = np.empty([stop - start for start, stop in region], dtype)
    target, window = model_view(weight, block), model_order(weight, region)
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            held = _bounds(shard.index, value.shape)
            copy_shared(target, window, partial(_fetch, shard.data), held)
    yield block.reshape(-1).view(np.uint8)


def _fetch(data: jax.Array, inside: tuple[slice, ...]) -> np.ndarray:
    """A block of a device's array, by way of a new array: JAX's host copy of that one dies with it."""
    starts, sizes = [part.start for part in inside], tuple(part.stop - part.start for part in inside)
    if sizes == data.shape:
        return np.asarray(jax.make_array_from_single_device_arrays(sizes, data.sharding, [data]))
    return np.asarray(jax.lax.dynamic_slice(data, starts, sizes))
