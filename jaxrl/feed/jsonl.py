"""Append-only JSON lines: a writer that never raises once open, a reader that takes any prefix.

One process writes a file. SIGKILL or a full disk leaves at most a torn line, which the next write ends
and every reader skips.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Appender:
    """Appends bytes to one file. After `__init__` no failure of the disk is raised: `lost` counts it."""

    def __init__(self, path: Path) -> None:
        """Opens or creates `path` and its folders. Raises `OSError` if it can't."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.lost = 0

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file).st_size

    def append(self, content: bytes) -> int | None:
        """Offset of `content` in the file; None if it was not written whole."""
        try:
            offset = self.size
            _write_all(self._file, content)
        except OSError:
            self.lost += 1
            return None
        return offset

    def torn(self) -> bool:
        """Whether the file ends inside a line."""
        size = self.size
        return size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def close(self) -> None:
        os.close(self._file)


def _write_all(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


class JsonlWriter:
    """Appends rows to one file of JSON lines."""

    def __init__(self, path: Path) -> None:
        """Opens or creates `path`. Raises `OSError` if it can't."""
        self._appender = Appender(path)

    @property
    def lost(self) -> int:
        """Rows that could not be written."""
        return self._appender.lost

    def write(self, row: Mapping[str, Any]) -> bool:
        """Appends `row`; False if the disk refused. Raises `TypeError` for a value JSON can't hold."""
        line = encode(row)
        try:
            start = b"\n" if self._appender.torn() else b""
        except OSError:
            start = b"\n"  # an empty line costs nothing, a joined one costs two rows
        return self._appender.append(start + line) is not None

    def close(self) -> None:
        self._appender.close()


def encode(row: Mapping[str, Any]) -> bytes:
    """`row` as one line. Non-finite numbers become null and their places go to `nonfinite`."""
    places: list[str] = []
    clean = {key: finite(value, key, places) for key, value in row.items()}
    if places:
        clean["nonfinite"] = places
    return json.dumps(clean, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def finite(value: Any, place: str, places: list[str]) -> Any:
    """`value` as plain data for JSON, numpy's included; notes in `places` where null replaces a number."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        places.append(place)
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item, f"{place}.{key}", places) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, f"{place}.{index}", places) for index, item in enumerate(value)]
    return value


class Tail(NamedTuple):
    """Rows from an offset on, and the offset where the next read goes on."""

    rows: list[dict[str, Any]]
    offset: int
    skipped: int  # lines that were not rows: torn by a crash


def read_rows(path: Path, offset: int = 0) -> Tail:
    """Whole lines of a file that may still grow; a missing file has none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return Tail([], offset, 0)
    whole = content[: content.rfind(b"\n") + 1]
    lines = [line for line in whole.split(b"\n") if line]
    rows = [row for line in lines if (row := _parse(line)) is not None]
    return Tail(rows, offset + len(whole), len(lines) - len(rows))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
