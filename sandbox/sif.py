"""Where a SIF file keeps its root file system, so that it can be mounted without Apptainer.

A SIF file is a header of 128 bytes, a table of descriptors and the data they point at. The root is the data
of the one descriptor that is the primary system partition, nearly always a squashfs.
"""

import os
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sandbox.base import SandboxError

# Launch line, magic, version, architecture, id, two times, then: unused and all descriptors, offset and
# length of their table, offset and length of the data. Everything is little-endian and unpadded.
HEADER = struct.Struct("<32s10s3s3s16s8q")
# Type, in use, id, group, link, offset, size, size with padding, two times, user, group, name, extra.
DESCRIPTOR = struct.Struct("<i?III7q128s384s")
PARTITION = struct.Struct("<ii3s")  # the extra of a partition: file system, role, architecture

MAGIC, VERSION = b"SIF_MAGIC\0", b"01\0"
DATA_PARTITION = 0x4004
PRIMARY_SYSTEM = 2
FILE_SYSTEMS = {1: "squashfs", 2: "ext3", 3: "archive", 4: "raw", 5: "encrypted squashfs"}
ARCHITECTURES = {"01": "i386", "02": "x86_64", "03": "arm", "04": "aarch64", "06": "ppc64le", "11": "s390x"}
_SQUASHFS_MAGIC = b"hsqs"
_MAX_DESCRIPTORS = 4096  # files have 48


@dataclass(frozen=True)
class Partition:
    """The root file system inside a SIF file. `offset` and `size` in bytes; `machine` as `uname -m` says."""

    offset: int
    size: int
    fstype: str
    machine: str


def is_sif(path: Path) -> bool:
    """Whether a file begins as a SIF file does. Raises `OSError`."""
    with path.open("rb") as file:
        return file.read(42)[32:42] == MAGIC


def open_partition(path: Path) -> tuple[int, int, str]:
    """Offset, size (bytes) and file system of the root in a SIF file that this machine can run.

    Raises `SandboxError`, naming the file and what was expected, for anything else.
    """
    partition = find_partition(path)
    if partition.machine != platform.machine():
        raise SandboxError(
            f"{path}: expected an image for {platform.machine()}, got one for {partition.machine}"
        )
    if partition.fstype != "squashfs":
        raise SandboxError(
            f"{path}: expected a squashfs, got {partition.fstype}; "
            "convert it: apptainer build new.sif old.sif makes a squashfs of every kind but the encrypted"
        )
    return partition.offset, partition.size, partition.fstype


def find_partition(path: Path) -> Partition:
    """The primary system partition. Raises `SandboxError` for a file that is no whole SIF."""
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            primary = [part for part in _partitions(path, file, length) if part is not None]
            if len(primary) != 1:
                raise _not_a_sif(path, f"one primary system partition, got {len(primary)}")
            _check(path, file, length, primary[0])
            return primary[0]
    except OSError as error:
        raise SandboxError(f"{path}: cannot be read: {error}") from error


def _partitions(path: Path, file: BinaryIO, length: int) -> Iterator[Partition | None]:
    """One item per descriptor in use: the partition if it is the primary one."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise _not_a_sif(path, f"a header of {HEADER.size} bytes, got {len(header)}")
    _, magic, version, _, _, _, _, _, total, offset, *_ = HEADER.unpack(header)
    if magic != MAGIC:
        raise _not_a_sif(path, f"the magic {MAGIC!r} at byte 32, got {magic!r}")
    if version != VERSION:
        raise _not_a_sif(path, f"format version {VERSION[:2].decode()}, got {version!r}")
    if not 0 < total <= _MAX_DESCRIPTORS or not HEADER.size <= offset <= length - total * DESCRIPTOR.size:
        raise _not_a_sif(path, f"a table of descriptors within its {length} bytes; is it truncated?")
    file.seek(offset)
    table = file.read(total * DESCRIPTOR.size)
    for fields in DESCRIPTOR.iter_unpack(table):
        if fields[1]:
            yield _primary(fields)


def _primary(fields: tuple) -> Partition | None:
    kind, extra, offset, size = fields[0], fields[13], fields[5], fields[6]
    if kind != DATA_PARTITION:
        return None
    fstype, role, code = PARTITION.unpack_from(extra)
    if role != PRIMARY_SYSTEM:
        return None
    machine = code.rstrip(b"\0").decode(errors="replace")
    return Partition(
        offset=offset,
        size=size,
        fstype=FILE_SYSTEMS.get(fstype, f"file system {fstype}"),
        machine=ARCHITECTURES.get(machine, f"architecture {machine!r}"),
    )


def _check(path: Path, file: BinaryIO, length: int, part: Partition) -> None:
    if part.offset < HEADER.size or part.size <= 0 or part.offset + part.size > length:
        end = part.offset + part.size
        raise _not_a_sif(path, f"its partition to end at byte {end}, got {length} bytes; is it truncated?")
    file.seek(part.offset)
    if part.fstype == "squashfs" and (magic := file.read(4)) != _SQUASHFS_MAGIC:
        raise _not_a_sif(path, f"a squashfs at byte {part.offset}, got {magic!r}")


def _not_a_sif(path: Path, expected: str) -> SandboxError:
    return SandboxError(f"{path}: no usable SIF file: expected {expected}. Copy or build the image again")
