"""Images that are squashfs or SIF files, in every way that this machine has."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sif_writer import Item, write_sif

from sandbox.base import Image, Limits, SandboxError
from sandbox.keeper.client import KeeperClient
from sandbox.namespace import NamespaceProvider

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/data/tiny.squashfs"
LIMITS = Limits(memory=256 << 20, pids=24, disk=8 << 20)


async def _edit(image: Image) -> None:
    provider = NamespaceProvider()
    try:
        one, two = [await provider.create({"new": b"1\n"}, LIMITS, image=image) for _ in range(2)]
        seen = await one.exec("cat etc/motd etc/link new; ls -l bin/tool | cut -c 1-10", 10)
        assert seen.output.startswith("hello\n") and seen.output.endswith("1\n-rwxr-xr-x\n"), seen
        changed = await one.exec("echo changed > etc/motd && rm bin/tool && echo ok", 10)
        assert changed.output == "ok\n"
        assert (await one.diff()).files == {"etc/motd": b"changed\n", "bin/tool": None}
        assert (await two.exec("cat etc/motd", 10)).output == "hello\n"
        assert (await two.diff()).empty
    finally:
        await provider.close()


@pytest.fixture(params=["squashfs", "padded", "sif"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A kernel mounts only what fills whole sectors, as mksquashfs makes it unless told otherwise."""
    if request.param == "squashfs":
        return TINY
    content = TINY.read_bytes().ljust(4096, b"\0")
    path = tmp_path / f"image.{request.param}"
    if request.param == "sif":
        write_sif(path, [Item(content)])
    else:
        path.write_bytes(content)
    return path


def test_mounted_or_unpacked(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    mounted = Path("/proc/self/mountinfo").read_text()
    asyncio.run(_edit(Image(source=archive)))
    assert Path("/proc/self/mountinfo").read_text() == mounted


def test_unpacked(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> str:
        raise PermissionError(1, "not here")

    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(KeeperClient, "open_archive", refuse)
    asyncio.run(_edit(Image(source=archive)))
    assert list((tmp_path / "cache/unpacked").iterdir())


SQUASHFUSE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from sandbox.keeper import archives, mounts
def refuse(*_): raise OSError(1, "no loop devices")
archives._by_kernel = refuse
mounts.unshare(mounts.NEW_NAMESPACE)
mounts.mount("none", "/", None, flags=mounts.RECURSIVE | mounts.PRIVATE)
os.mkdir(sys.argv[4])
pid = archives.mount_archive(sys.argv[2], sys.argv[4], offset=0, squashfuse=sys.argv[3] or None)
print(open(sys.argv[4] + "/etc/motd").read(), end="")
archives.end_program(pid)
"""


@pytest.mark.parametrize("program", [shutil.which("squashfuse") or "", "/bin/false"])
def test_squashfuse(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SQUASHFUSE, str(ROOT), str(TINY), program, str(tmp_path / "m")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if program.endswith("squashfuse") and os.geteuid() == 0:
        assert result.stdout == "hello\n", result.stderr
    else:
        assert "squashfuse" in result.stderr or "unshare" in result.stderr


def test_squashfs_as_the_whole_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny root has no programs: the host's come as layers."""
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    names = [name for name in ("usr", "lib", "lib64") if Path("/", name).is_dir()]
    layers = {f"/{name}": Path("/", name).resolve() for name in names}
    image = Image(root=TINY, layers=layers, workdir="/etc", environment={"LC_ALL": "C"})

    async def session() -> None:
        provider = NamespaceProvider()
        try:
            program = ["/usr/bin/env", "sh", "-c", "cat /etc/motd; cat /bin/tool; echo x > n; ls; read q"]
            launched = await provider.launch(program, LIMITS, scratch=False, image=image)
            said = b""
            while not said.endswith(b"n\n"):
                piece = await launched.pipes.read()
                assert piece, said
                said += piece
            assert said.startswith(b"hello\n#!/bin/sh") and said.endswith(b"link\nmotd\nn\n"), said
            await launched.destroy()
            launched.pipes.close()
        finally:
            await provider.close()

    asyncio.run(session())


def test_what_is_no_archive_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong.sif"
    wrong.write_bytes(b"nothing of the kind")
    with pytest.raises(SandboxError, match=r"wrong\.sif.*expected a squashfs"):
        asyncio.run(_edit(Image(source=wrong)))
