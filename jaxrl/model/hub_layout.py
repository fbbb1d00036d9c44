"""Which tensors of a hub directory make up which weight; layouts are told apart by name alone.

| part | names |
|---|---|
| text model | `model.language_model.*`, or `model.*` of the text-only class |
| experts, fused | `mlp.experts.gate_up_proj` [E, 2F, D], `mlp.experts.down_proj` [E, D, F] |
| experts, one by one | `mlp.experts.{e}.{gate,up,down}_proj.weight` [F, D], [F, D], [D, F] |
| carried as they are | `mtp.*`, `model.visual.*` |
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl.model.hub_files import CODES, INDEX, SINGLE, Entry, HubError, read_directory
from jaxrl.model.params import Path as WeightPath
from jaxrl.model.params import Weight, accumulation_dtype, all_weights
from jaxrl.model.spec import ModelSpec

TEXT_PREFIX = "model.language_model."
TEXT_ONLY_PREFIX = "model."
OUTSIDE_PREFIXES = ("lm_head.", "mtp.")
CARRIED_PREFIXES = ("mtp.", "model.visual.")
PROBLEMS_SHOWN = 3

type Region = tuple[tuple[int, int], ...]  # start and stop along each axis
type Fetch = Callable[[tuple[slice, ...]], np.ndarray]


@dataclass(frozen=True)
class Piece:
    """A tensor on disk as the block at `start` of a weight in the hub's fused form."""

    entry: Entry
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def region(self) -> Region:
        """The block it fills."""
        return tuple((a, a + size) for a, size in zip(self.start, self.shape, strict=True))

    def fetch(self, inside: tuple[slice, ...]) -> np.ndarray:
        """Part of the block, mapped; a reader copies it and lets go."""
        return self.entry.map().reshape(self.shape)[inside]


@dataclass(frozen=True)
class Hub:
    """A hub directory whose headers fit its config; no data has been read.

    `spec` has the dtype of the files. `carried` are tensors that the text model does not hold.
    """

    directory: Path
    spec: ModelSpec
    pieces: Mapping[WeightPath, tuple[Piece, ...]]
    carried: Mapping[str, Entry]


def open_hub(directory: Path | str, *, mtp: bool = False) -> Hub:
    """Reads the config and all headers, and checks every tensor's name, shape and dtype.

    `mtp` counts the multi-token-prediction block to the model; otherwise its tensors are carried.

    Raises:
      FileNotFoundError: `config.json` or the tensors are missing.
      HubError: a tensor is truncated, missing, misnamed or of another shape or dtype than the config says.
    """
    directory = Path(directory)
    spec = read_spec(directory / "config.json", mtp=mtp)
    entries = read_directory(directory)
    prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in entries) else TEXT_ONLY_PREFIX
    table = all_weights(spec)
    named = {path: _parts(hub_name(path, weight, prefix), weight, entries) for path, weight in table.items()}
    held = {name for parts in named.values() for name, *_ in parts}
    carried = {n: e for n, e in entries.items() if n.startswith(CARRIED_PREFIXES) and n not in held}
    text = {name: entry for name, entry in entries.items() if name not in carried}
    _check(directory, spec, named, text)
    pieces = {
        path: tuple(Piece(text[name], start, shape) for name, start, shape, _ in parts)
        for path, parts in named.items()
    }
    return Hub(directory, spec, pieces, carried)


def hub_name(path: WeightPath, weight: Weight, prefix: str = TEXT_PREFIX) -> str:
    """The full name of a weight on the hub."""
    if weight.hub.startswith(OUTSIDE_PREFIXES):
        return weight.hub
    layer = f"layers.{path[1]}." if path[0] == "layers" else ""
    return f"{prefix}{layer}{weight.hub}"


def hub_order[T](weight: Weight, items: tuple[T, ...], unit: T) -> tuple[T, ...]:
    """Values per axis of a weight in the order of the hub's axes; `unit` stands for its axis of size 1."""
    ordered = list(items)
    if weight.swap is not None:
        first, second = weight.swap
        ordered[first], ordered[second] = ordered[second], ordered[first]
    if weight.unit is not None:
        ordered.insert(weight.unit, unit)
    return tuple(ordered)


def model_order[T](weight: Weight, items: tuple[T, ...]) -> tuple[T, ...]:
    """The inverse of `hub_order`."""
    ordered = [item for axis, item in enumerate(items) if axis != weight.unit]
    if weight.swap is not None:
        first, second = weight.swap
        ordered[first], ordered[second] = ordered[second], ordered[first]
    return tuple(ordered)


def model_view(weight: Weight, block: np.ndarray) -> np.ndarray:
    """A block in the hub's order of axes, seen in the model's."""
    block = block if weight.unit is None else block.squeeze(weight.unit)
    return block if weight.swap is None else block.swapaxes(*weight.swap)


def read_block(weight: Weight, pieces: tuple[Piece, ...], region: Region, dtype: Any) -> np.ndarray:
    """The block of a weight that `region` names, [in, out] as the model holds it, in `dtype`."""
    block = np.empty([stop - start for start, stop in region], dtype)
    target, window = weight.to_hub(block), hub_order(weight, region, (0, 1))
    for piece in pieces:
        copy_shared(target, window, piece.fetch, piece.region)
    return block


def copy_shared(target: np.ndarray, window: Region, fetch: Fetch, held: Region) -> None:
    """Fills what `target`, the block `window` of a whole, shares with the block `held` of a source.

    Args:
      fetch: gives a part of the source's block; not called if nothing is shared.
    """
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(window, held, strict=True)]
    if any(stop <= start for start, stop in shared):
        return
    here = tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(shared, window, strict=True))
    there = tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(shared, held, strict=True))
    target[here] = fetch(there)


type _Part = tuple[
    str, tuple[int, ...], tuple[int, ...], tuple[int, ...]
]  # name, start, shape, shape on disk


def _parts(name: str, weight: Weight, entries: Mapping[str, Entry]) -> list[_Part]:
    """The tensors expected for a weight: itself, or one or two per expert if those are what is there."""
    shape = hub_order(weight, weight.shape, 1)
    head, experts, matrix = name.partition(".experts.")
    if not experts or name in entries:
        return [(name, (0,) * len(shape), shape, shape)]
    E, rows, cols = shape
    kinds = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    names = [[f"{head}.experts.{e}.{kind}.weight" for kind in kinds] for e in range(E)]
    if not any(each in entries for expert in names for each in expert):
        return [(name, (0, 0, 0), shape, shape)]
    rows //= len(kinds)
    return [
        (each, (e, rows * i, 0), (1, rows, cols), (rows, cols))
        for e, expert in enumerate(names)
        for i, each in enumerate(expert)
    ]


def _check(
    directory: Path, spec: ModelSpec, named: Mapping[WeightPath, list[_Part]], text: Mapping[str, Entry]
) -> None:
    problems = list(_problems(directory, spec, named, text))
    if problems:
        more = len(problems) - PROBLEMS_SHOWN
        rest = [f"and {more} more"] if more > 0 else []
        raise HubError("\n".join(problems[:PROBLEMS_SHOWN] + rest))


def _problems(
    directory: Path, spec: ModelSpec, named: Mapping[WeightPath, list[_Part]], text: Mapping[str, Entry]
) -> Iterator[str]:
    table = all_weights(spec)
    wanted = {name for parts in named.values() for name, *_ in parts}
    unexpected = sorted(text.keys() - wanted)
    place = directory / (INDEX if (directory / INDEX).exists() else SINGLE)
    missing = [name for parts in named.values() for name, *_ in parts if name not in text]
    for number, name in enumerate(missing):
        close = difflib.get_close_matches(name, unexpected, 1) if number < PROBLEMS_SHOWN else []
        got = f"no such tensor, but an unknown {close[0]}" if close else "no such tensor"
        yield f"{place}: tensor {name}: expected it, as config.json says; got {got}"
    for path, parts in named.items():
        for name, _, _, shape in parts:
            if name in text:
                yield from _mismatches(text[name], shape, _allowed(table[path], spec))
    for name in unexpected:
        hint = ": config.json says the head is tied" if name == "lm_head.weight" else ""
        yield f"{text[name].file}: tensor {name}: expected only tensors of config.json's model; got it{hint}"


def _mismatches(entry: Entry, shape: tuple[int, ...], dtypes: list[str]) -> Iterator[str]:
    at = f"{entry.file}: tensor {entry.name}"
    if entry.shape != shape:
        yield f"{at}: expected shape {shape}; got {entry.shape}: is this the config's model?"
    if entry.dtype not in dtypes:
        yield f"{at}: expected dtype {' or '.join(dtypes)}, as config.json says; got {entry.dtype}"


def _allowed(weight: Weight, spec: ModelSpec) -> list[str]:
    """The config's dtype; float32 also where the model keeps it (some releases store those in bfloat16)."""
    stored, held = jnp.dtype(spec.dtype), jnp.dtype(weight.dtype)
    exact = [CODES[held]] if held == accumulation_dtype(spec.dtype) and held != stored else []
    return [*exact, CODES[stored]]


def read_spec(file: Path, *, mtp: bool = False) -> ModelSpec:
    """The sizes in a `config.json`; `dtype` is that of the files.

    Raises:
      FileNotFoundError: there is none.
      HubError: it is not a config of this family.
    """
    config = read_config(file)
    try:
        spec = ModelSpec.from_hub_config(config, mtp=mtp)
    except KeyError as error:
        raise HubError(f"{file}: expected the key {error}; got none: is this a Qwen3.5 model?") from error
    except ValueError as error:
        raise HubError(f"{file}: {error}") from error
    known = [dtype.name for dtype in CODES]
    if spec.dtype not in known:
        raise HubError(f"{file}: expected dtype among {', '.join(known)}; got {spec.dtype}")
    return spec


def read_config(file: Path) -> dict[str, Any]:
    """A `config.json`.

    Raises:
      FileNotFoundError: there is none.
      HubError: it is not a JSON object.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HubError(f"{file}: expected JSON; got {error}: copy the file again") from error
    if not isinstance(config, dict):
        raise HubError(f"{file}: expected a JSON object; got {type(config).__name__}")
    return config
