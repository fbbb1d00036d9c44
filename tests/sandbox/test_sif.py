"""SIF files: the root is found, and what is no whole SIF file is explained."""

import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sif_writer import Item, write_sif

from sandbox import sif
from sandbox.base import SandboxError
from sandbox.sif import find_partition, is_sif, open_partition

ROOT = b"hsqs" + bytes(range(256)) * 20
LABELS = Item(b'{"a": 1}', kind=0x4003)
DATA = Item(b"data", role=3)
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]


def test_sizes_are_those_of_the_format() -> None:
    assert (sif.HEADER.size, sif.DESCRIPTOR.size, sif.PARTITION.size) == (128, 585, 11)


@given(before=st.integers(0, 40), content=st.binary(max_size=9000), unused=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_the_primary_partition_is_found(tmp_path: Path, before: int, content: bytes, unused: bool) -> None:
    root, path = b"hsqs" + content, tmp_path / "image.sif"
    stale = [Item(b"hsqs old", used=False)] if unused else []
    write_sif(path, [*[LABELS, DATA] * (before // 2), *stale, Item(root), LABELS])
    offset, size, fstype = open_partition(path)
    assert path.read_bytes()[offset : offset + size] == root and fstype == "squashfs"
    assert offset % 4096 == 0 and is_sif(path)


def test_images_that_cannot_run_here_say_why(tmp_path: Path) -> None:
    path = tmp_path / "image.sif"
    write_sif(path, [Item(ROOT, machine=OTHER)])
    assert find_partition(path).machine == OTHER
    with pytest.raises(SandboxError, match=f"image.sif: expected an image for {platform.machine()}.*{OTHER}"):
        open_partition(path)
    for fstype, name in ((2, "ext3"), (5, "encrypted squashfs"), (9, "file system 9")):
        write_sif(path, [Item(ROOT, fstype=fstype)])
        with pytest.raises(SandboxError, match=f"expected a squashfs, got {name}"):
            open_partition(path)
    for items, count in (([DATA, LABELS], 0), ([Item(ROOT), Item(ROOT)], 2)):
        write_sif(path, items)
        with pytest.raises(SandboxError, match=f"one primary system partition, got {count}"):
            open_partition(path)
    write_sif(path, [Item(b"no squashfs")])
    with pytest.raises(SandboxError, match="a squashfs at byte 32768"):
        open_partition(path)


def test_every_truncated_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "image.sif"
    write_sif(path, [LABELS, Item(ROOT)])
    whole = path.read_bytes()
    for length in (0, 31, 127, 128, 4096, 4096 + 48 * 585 - 1, 32768, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(SandboxError, match=r"image\.sif: no usable SIF file"):
            open_partition(path)


@given(st.integers(0, 4096 + 3 * 585), st.binary(min_size=1, max_size=9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_damaged_files_are_explained_or_harmless(tmp_path: Path, position: int, noise: bytes) -> None:
    path = tmp_path / "image.sif"
    write_sif(path, [LABELS, DATA, Item(ROOT)])
    damaged = bytearray(path.read_bytes())
    damaged[position : position + len(noise)] = noise
    path.write_bytes(damaged)
    offset = size = -1
    with suppress(SandboxError):  # anything else fails the test
        offset, size, _ = open_partition(path)
    assert offset == -1 or (damaged[offset : offset + 4] == b"hsqs" and offset + size <= len(damaged))


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"hsqs" * 100, bytes(4096)])
def test_other_files_are_no_sif(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert not is_sif(path)
    with pytest.raises(SandboxError, match="no usable SIF file"):
        open_partition(path)
    with pytest.raises(SandboxError, match="cannot be read"):
        open_partition(tmp_path / "missing")


@pytest.mark.slow
def test_files_of_the_reference_tool(tmp_path: Path) -> None:
    """What `siftool` writes is read, and what the tests write is read by `siftool`."""
    if not all(map(shutil.which, ("siftool", "mksquashfs"))):
        pytest.skip("siftool or mksquashfs is missing: install Debian's siftool and squashfs-tools")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("content")
    root, made, ours = (str(tmp_path / name) for name in ("root.squashfs", "made.sif", "ours.sif"))
    code = {"x86_64": "2", "aarch64": "4"}[platform.machine()]
    options = ["--datatype", "4", "--parttype", "2", "--partfs", "1", "--partarch", code]
    for command in (
        ["mksquashfs", str(tmp_path / "tree"), root, "-quiet"],
        ["siftool", "new", made],
        ["siftool", "add", *options, made, root],
    ):
        subprocess.run(command, check=True, capture_output=True)
    content = Path(root).read_bytes()
    offset, size, _ = open_partition(Path(made))
    assert Path(made).read_bytes()[offset : offset + size] == content
    write_sif(Path(ours), [LABELS, Item(content)])
    dumped = subprocess.run(["siftool", "dump", "2", ours], check=True, capture_output=True)
    assert dumped.stdout == content
