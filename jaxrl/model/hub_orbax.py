"""Weights as an Orbax tree beside a hub config: the form of a training checkpoint's `params`.

directory/config.json    the text-only hub config
          params/        one array per weight, named by its path joined with "/"
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from jaxrl.mesh import shardings
from jaxrl.model.hub import flat_state
from jaxrl.model.hub_files import HubError, write_text
from jaxrl.model.hub_layout import read_spec
from jaxrl.model.params import all_weights
from jaxrl.model.spec import Dtype
from jaxrl.model.transformer import Transformer

PARAMS, MTP = "params", "mtp/"


def save_orbax(model: Transformer, directory: Path | str) -> None:
    """Writes the weights and the config, the config last.

    Raises:
      FileExistsError: there are weights already; they are not overwritten.
    """
    directory = Path(directory).absolute()
    if (directory / PARAMS).exists():
        raise FileExistsError(
            f"{directory / PARAMS}: expected no weights yet; got some: choose another place"
        )
    directory.mkdir(parents=True, exist_ok=True)
    leaves = {_name(path): variable[...] for path, variable in flat_state(nnx.state(model, nnx.Param))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / PARAMS, leaves)
    write_text(directory / "config.json", json.dumps(model.spec.to_hub_config(), indent=2) + "\n")


def load_orbax(
    directory: Path | str,
    *,
    config: Path | str | None = None,
    dtype: Dtype | None = None,
    mesh: Mesh | None = None,
    mtp: bool = False,
) -> Transformer:
    """The model in `directory`, in its own dtype or in `dtype`; reads checkpoints of training runs too.

    Args:
      config: the `config.json` to go by, for a directory without one.
      mesh: place every parameter as `jaxrl.mesh` says.
      mtp: load the multi-token-prediction block, too, if it was saved.

    Raises:
      FileNotFoundError: there is no config or no weights.
      ValueError: `mtp` is asked of a model that was saved without that block.
      HubError: the weights' names or shapes are not the config's.
    """
    directory = Path(directory).absolute()
    spec = read_spec(Path(config) if config is not None else directory / "config.json", mtp=mtp)
    spec = replace(spec, dtype=dtype or spec.dtype)
    if not (directory / PARAMS).is_dir():
        raise FileNotFoundError(f"{directory}: expected a folder {PARAMS} of Orbax; got none")
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0))))
    places = dict(flat_state(shardings(state, mesh))) if mesh is not None else {}
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        _name(path): jax.ShapeDtypeStruct(
            weight.shape, weight.dtype, sharding=places[path].get_value() if places else device
        )
        for path, weight in all_weights(spec).items()
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        _check(directory / PARAMS, checkpointer, wanted)
        each = ocp.checkpoint_utils.construct_restore_args(wanted)
        # Names are checked above; what is left out is the block that nobody asked for.
        request = ocp.args.PyTreeRestore(wanted, restore_args=each, partial_restore=True)
        leaves = checkpointer.restore(directory / PARAMS, args=request)
    filled = [(path, variable.replace(leaves[_name(path)])) for path, variable in flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _name(path: tuple[str | int, ...]) -> str:
    return "/".join(map(str, path))


def _check(at: Path, checkpointer: Any, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Orbax would pad or cut an array of another shape."""
    held = checkpointer.metadata(at).item_metadata
    held = {name: held[name] for name in held}
    if not any(name.startswith(MTP) for name in wanted):
        held = {name: leaf for name, leaf in held.items() if not name.startswith(MTP)}
    if missing := sorted(wanted.keys() - held.keys()):
        raise HubError(f"{at}: tensor {missing[0]}: expected it, as config.json says; got no such tensor")
    if extra := sorted(held.keys() - wanted.keys()):
        raise HubError(f"{at}: tensor {extra[0]}: expected only tensors of config.json's model; got it")
    for name, leaf in wanted.items():
        if tuple(held[name].shape) != leaf.shape:
            raise HubError(f"{at}: tensor {name}: expected shape {leaf.shape}; got {tuple(held[name].shape)}")
