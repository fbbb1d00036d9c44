"""Frames between the owner and the keeper: a JSON header and raw bytes, length-prefixed."""

import json
import struct
from typing import Any

_PREFIX = struct.Struct("!II")

Header = dict[str, Any]


def pack(header: Header, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    text = json.dumps(header).encode()
    return _PREFIX.pack(len(text), len(payload)) + text + payload


class Unpacker:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[Header, bytes]]:
        """Frames completed by `data`, in order."""
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> tuple[Header, bytes] | None:
        if len(self._buffer) < _PREFIX.size:
            return None
        text, payload = _PREFIX.unpack_from(self._buffer)
        start, stop = _PREFIX.size + text, _PREFIX.size + text + payload
        if len(self._buffer) < stop:
            return None
        frame = json.loads(self._buffer[_PREFIX.size : start]), bytes(self._buffer[start:stop])
        del self._buffer[:stop]
        return frame


def join_files(files: dict[str, bytes]) -> tuple[list[tuple[str, int]], bytes]:
    """Files as (path, size) pairs and their concatenated content."""
    return [(path, len(content)) for path, content in files.items()], b"".join(files.values())


def split_files(sizes: list[tuple[str, int]], payload: bytes) -> dict[str, bytes]:
    """Inverse of `join_files`."""
    files, start = {}, 0
    for path, size in sizes:
        files[path] = payload[start : start + size]
        start += size
    return files
