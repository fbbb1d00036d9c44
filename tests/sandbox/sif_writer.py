"""Writes SIF files as `siftool` lays them out: header, 48 descriptors at 4096, data from 32768 on."""

import platform
import uuid
from dataclasses import dataclass
from pathlib import Path

from sandbox import sif

_COUNT, _TABLE, _DATA, _PAGE = 48, 4096, 32768, 4096
_GROUP = 0xF0000001
LAUNCH = b"#!/usr/bin/env run-singularity\n\0"
CODES = {machine: code for code, machine in sif.ARCHITECTURES.items()}


@dataclass(frozen=True)
class Item:
    """One data object; `role` and `fstype` matter for partitions only."""

    content: bytes
    kind: int = sif.DATA_PARTITION
    role: int = sif.PRIMARY_SYSTEM
    fstype: int = 1
    machine: str = platform.machine()
    used: bool = True


def write_sif(path: Path, items: list[Item]) -> None:
    """Writes `items` into a new SIF file."""
    table, data = b"", b""
    for number, item in enumerate(items, start=1):
        data += bytes(-(_DATA + len(data)) % _PAGE)
        offset = _DATA + len(data)
        extra = b""
        if item.kind == sif.DATA_PARTITION:
            extra = sif.PARTITION.pack(item.fstype, item.role, CODES.get(item.machine, "00").encode() + b"\0")
        size = len(item.content)
        table += sif.DESCRIPTOR.pack(
            item.kind, item.used, number, _GROUP, 0, offset, size, size, 1, 1, 0, 0, b"name", extra
        )
        data += item.content
    code = CODES[platform.machine()].encode() + b"\0"
    free = _COUNT - len(items)
    header = sif.HEADER.pack(
        LAUNCH, sif.MAGIC, sif.VERSION, code, uuid.uuid4().bytes, 1, 1, free, _COUNT, _TABLE,
        _COUNT * sif.DESCRIPTOR.size, _DATA, len(data),
    )  # fmt: skip
    table = table.ljust(_COUNT * sif.DESCRIPTOR.size, b"\0")
    path.write_bytes(header.ljust(_TABLE, b"\0") + table.ljust(_DATA - _TABLE, b"\0") + data)
