"""Reads and writes a model as a hub repository in one file: `config.json` and `model.safetensors`.

The layout is the published one: text weights under `model.language_model.`, experts fused in three
dimensions. Vision and multi-token-prediction tensors are skipped when reading.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxrl.model.params import Path as WeightPath
from jaxrl.model.params import Weight, all_weights
from jaxrl.model.spec import Dtype, ModelSpec
from jaxrl.model.transformer import Transformer

TEXT_PREFIX = "model.language_model."
SKIPPED_PREFIXES = ("mtp.", "model.visual.")


def hub_name(path: WeightPath, weight: Weight) -> str:
    """The full name of a weight on the hub."""
    if path == ("head",):
        return weight.hub
    layer = f"layers.{path[1]}." if path[0] == "layers" else ""
    return f"{TEXT_PREFIX}{layer}{weight.hub}"


def load_hub(directory: Path | str, *, dtype: Dtype | None = None) -> Transformer:
    """The model in `directory`, in its own dtype or in `dtype`.

    Raises:
      FileNotFoundError: a file is missing.
      KeyError: a tensor of the model is missing.
      ValueError: a tensor has another shape than the config says, or belongs to no part of the model.
    """
    directory = Path(directory)
    spec = ModelSpec.from_hub_config(json.loads((directory / "config.json").read_text()), dtype=dtype)
    tensors = _text_tensors(load_file(directory / "model.safetensors"))
    values: dict[WeightPath, np.ndarray] = {}
    for path, weight in all_weights(spec).items():
        name = hub_name(path, weight)
        if name not in tensors:
            raise KeyError(f"{directory}: expected tensor {name}; the file does not have it")
        values[path] = weight.from_hub(tensors.pop(name))
    if tensors:
        raise ValueError(
            f"{directory}: expected only tensors of the config's model; got also {sorted(tensors)[:5]}"
        )
    return _with_values(spec, values)


def save_hub(model: Transformer, directory: Path | str) -> None:
    """Writes `config.json` and `model.safetensors`; each file is replaced atomically."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    flat = {path: value[...] for path, value in _flat(nnx.state(model, nnx.Param))}
    tensors = {
        hub_name(path, weight): np.ascontiguousarray(weight.to_hub(np.asarray(flat[path])))
        for path, weight in all_weights(model.spec).items()
    }
    save_file(tensors, directory / "model.safetensors.partial", metadata={"format": "pt"})
    os.replace(directory / "model.safetensors.partial", directory / "model.safetensors")
    (directory / "config.json.partial").write_text(json.dumps(model.spec.to_hub_config(), indent=2) + "\n")
    os.replace(directory / "config.json.partial", directory / "config.json")


def _text_tensors(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Drops what the text model does not use; the text-only class writes `model.` for the prefix."""
    kept = {name: value for name, value in tensors.items() if not name.startswith(SKIPPED_PREFIXES)}
    if any(name.startswith(TEXT_PREFIX) for name in kept):
        return kept
    return {name.replace("model.", TEXT_PREFIX, 1): value for name, value in kept.items()}


def _flat(state: nnx.State) -> list[tuple[WeightPath, nnx.Variable]]:
    return list(cast(Any, nnx.to_flat_state(state)))


def _with_values(spec: ModelSpec, values: dict[WeightPath, np.ndarray]) -> Transformer:
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0))))
    table = all_weights(spec)
    filled = [
        (path, variable.replace(jnp.asarray(values[path], table[path].dtype)))
        for path, variable in _flat(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(filled))
