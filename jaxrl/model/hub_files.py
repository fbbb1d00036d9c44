"""Tensors of a hub directory on disk: headers checked first, data mapped one tensor at a time.

A mapping lives only while one tensor is copied, so that a file's pages never add up in memory.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_CAP = 100_000_000  # what the format allows
COPY_BYTES = 1 << 24

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8}
_BITS |= {"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
_BITS |= {"I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64}
_NUMPY = {"F16": "float16", "F32": "float32", "F64": "float64"}
NUMPY: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{code: np.dtype(name) for code, name in _NUMPY.items()},
}
CODES: Mapping[np.dtype, str] = {dtype: code for code, dtype in NUMPY.items()}


class HubError(ValueError):
    """A hub directory is damaged or another model's: names file, tensor, expected and got."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; `start` counts bytes from the beginning of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def map(self) -> np.ndarray:
        """The tensor, read-only and read on access; nothing stays resident once it is dropped."""
        return np.memmap(self.file, NUMPY[self.dtype], "r", self.start, self.shape)

    def chunks(self) -> Iterator[bytes]:
        """The bytes as they are, in order."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            left = self.nbytes
            while left:
                chunk = file.read(min(left, COPY_BYTES))
                if not chunk:
                    raise _error(self.file, self.name, f"{self.nbytes} bytes", f"{self.nbytes - left}")
                left -= len(chunk)
                yield chunk


@dataclass(frozen=True)
class Outgoing:
    """A tensor to be written; `chunks` makes its bytes when their turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Any]]

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return _nbytes(self.dtype, self.shape)


def read_directory(directory: Path) -> dict[str, Entry]:
    """Every tensor by name, of the one file or of the shards that the index lists.

    Reads headers only.

    Raises:
      FileNotFoundError: there is no `model.safetensors` and no index.
      HubError: a header, a size or the index does not fit; the error names file and tensor.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.exists() and index.exists():
        raise HubError(f"{directory}: expected either {SINGLE} or {INDEX}; got both: remove the stale one")
    if index.exists():
        return _read_shards(index)
    if not single.exists():
        raise FileNotFoundError(f"{directory}: expected {SINGLE} or {INDEX}; got neither")
    return read_header(single)


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file, each within the file and of the size its shape and dtype say.

    Raises:
      HubError: the file is truncated, damaged or not of this format.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size - 8, HEADER_CAP):
            raise HubError(
                f"{file}: expected a header of {length} bytes; got a file of {size}: copy it again"
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = [_entry(file, name, info, 8 + length) for name, info in header.items()]
    except HubError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise HubError(f"{file}: expected a safetensors header; got {error!r}: copy it again") from error
    _check_extents(file, entries, 8 + length, size)
    return {entry.name: entry for entry in entries}


def write_file(path: Path, tensors: Iterable[Outgoing]) -> None:
    """Writes one file tensor by tensor and replaces `path` atomically."""
    ordered = sorted(tensors, key=lambda tensor: (-_BITS[tensor.dtype], tensor.name))
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(_header(ordered))
            for tensor in ordered:
                for chunk in tensor.chunks():
                    file.write(chunk)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """Replaces a small file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_directory(directory: Path, tensors: list[Outgoing], *, shard_bytes: int) -> None:
    """One file, or shards of about `shard_bytes` and their index.

    Raises:
      HubError: the directory holds a checkpoint in the other form, which would become ambiguous.
    """
    groups = _groups(tensors, shard_bytes)
    sharded = len(groups) > 1
    stale = [path.name for path in directory.glob("model*.safetensors*") if path.suffix != ".partial"]
    if stale and (sharded or stale != [SINGLE]):
        raise HubError(
            f"{directory}: expected no sharded checkpoint here; got {sorted(stale)[:3]}: remove it"
        )
    if not sharded:
        return write_file(directory / SINGLE, tensors)
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(directory / name, group)
        places |= {tensor.name: name for tensor in group}
    total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index = {"metadata": total, "weight_map": dict(sorted(places.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=2) + "\n")


def _error(file: Path, tensor: str, expected: str, got: str, advice: str = "copy the file again") -> HubError:
    return HubError(f"{file}: tensor {tensor}: expected {expected}; got {got}: {advice}")


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * _BITS[dtype] // 8)


def _entry(file: Path, name: str, info: Mapping[str, Any], base: int) -> Entry:
    dtype, shape, (start, stop) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    if dtype not in _BITS:
        raise _error(file, name, f"a dtype among {', '.join(_BITS)}", dtype)
    if any(size < 0 for size in shape):
        raise _error(file, name, "sizes of at least 0", f"{shape}")
    if stop - start != _nbytes(dtype, shape):
        expected = f"{_nbytes(dtype, shape)} bytes for {dtype} {shape}"
        raise _error(file, name, expected, f"{stop - start}")
    return Entry(file, name, dtype, shape, base + start, stop - start)


def _check_extents(file: Path, entries: list[Entry], base: int, size: int) -> None:
    """The tensors fill the rest of the file without gap or overlap."""
    end = base
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != end:
            raise _error(file, entry.name, f"data at byte {end}", f"{entry.start}")
        end += entry.nbytes
        if end > size:
            raise _error(file, entry.name, f"data up to byte {end}", f"a truncated file of {size} bytes")
    if end != size:
        raise HubError(f"{file}: expected {end} bytes; got {size}: copy the file again")


def _read_shards(index: Path) -> dict[str, Entry]:
    try:
        places = dict[str, str](json.loads(index.read_text(encoding="utf-8"))["weight_map"].items())
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HubError(f"{index}: expected JSON with a weight_map; got {error!r}: copy it again") from error
    held: dict[str, Entry] = {}
    for shard in sorted(set(places.values())):
        held |= _read_shard(index, shard, places)
    for name, shard in places.items():
        if name not in held:
            raise _error(index.parent / shard, name, f"the tensor, as {INDEX} says", "a file without it")
    return held


def _read_shard(index: Path, shard: str, places: Mapping[str, str]) -> dict[str, Entry]:
    file = index.parent / shard
    if not file.exists():
        tensor = min(name for name, place in places.items() if place == shard)
        raise _error(file, tensor, f"the file, as {INDEX} says", "no such file")
    entries = read_header(file)
    for name in entries:
        if places.get(name) != shard:
            raise _error(
                file, name, f"only tensors that {INDEX} places here", f"one placed in {places.get(name)}"
            )
    return entries


def _header(tensors: list[Outgoing]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _groups(tensors: list[Outgoing], shard_bytes: int) -> list[list[Outgoing]]:
    groups: list[list[Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups
