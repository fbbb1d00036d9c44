"""Image builder: squashfs, Debian roots, the command line. Environments: see test_tasks_real.py."""

import os
import sys
from pathlib import Path

import pytest
from sif_writer import Item, write_sif

from sandbox.images.__main__ import main
from sandbox.images.cache import cache_directory
from sandbox.images.debian import build_debian
from sandbox.images.environment import ImageBuildError
from sandbox.images.unpack import unpack

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny.squashfs"  # by mksquashfs, gzip


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only programs on PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    return folder


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!{sys.executable}\nimport os, sys\nfrom pathlib import Path\n{body}\n")
    (folder / name).chmod(0o755)


def test_squashfs_is_unpacked_by_the_package(programs: Path, tmp_path: Path) -> None:
    sif = tmp_path / "image.sif"
    write_sif(sif, [Item(TINY.read_bytes())])
    for image in (TINY, sif):
        root = unpack(image)
        assert (root / "etc/motd").read_text() == "hello\n"
        assert os.readlink(root / "etc/link") == "../bin/tool"
        assert (root / "bin/tool").stat().st_mode & 0o777 == 0o755
        assert unpack(image) == root


def test_squashfs_is_unpacked_by_the_program(programs: Path) -> None:
    program(
        programs,
        "unsquashfs",
        "target = Path(sys.argv[sys.argv.index('-dest') + 1])\ntarget.mkdir()\n"
        "(target / 'said').write_text(' '.join(sys.argv[1:]))",
    )
    said = (unpack(TINY) / "said").read_text()
    assert "-offset 0" in said and said.endswith(str(TINY))


def test_an_unpacking_that_fails_leaves_nothing(programs: Path) -> None:
    program(programs, "unsquashfs", "print('no space', file=sys.stderr)\nsys.exit(1)")
    with pytest.raises(ImageBuildError, match=r"tiny.squashfs: unsquashfs ended with 1: no space"):
        unpack(TINY)
    assert list(cache_directory("unpacked").iterdir()) == []


def test_without_a_reader_the_error_names_what_would_do(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.images.unpack.find_spec", lambda name: None)
    with pytest.raises(ImageBuildError, match=r"unsquashfs.*squashfuse.*PySquashfsImage"):
        unpack(TINY)


@pytest.mark.parametrize("content", [b"", b"hsq", b"x" * 4096])
def test_what_is_no_squashfs_is_refused(programs: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "image").write_bytes(content)
    with pytest.raises(ImageBuildError, match="image: expected a squashfs at byte 0, got"):
        unpack(tmp_path / "image")


def test_a_debian_root_comes_from_mmdebstrap(programs: Path) -> None:
    with pytest.raises(ImageBuildError, match="apt install mmdebstrap"):
        build_debian("stable")
    (programs / "tar").symlink_to("/usr/bin/tar" if Path("/usr/bin/tar").exists() else "/bin/tar")
    program(
        programs,
        "mmdebstrap",
        "import io, tarfile\nassert '--include=a,b' in sys.argv, sys.argv\n"
        "with tarfile.open(sys.argv[-1], 'w') as tar:\n"
        "    for name in ('./etc/motd', './dev/null', './var/cache/x'):\n"
        "        tar.addfile(tarfile.TarInfo(name), io.BytesIO())",
    )
    root = build_debian("stable", ["b", "a"])
    assert [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()] == ["etc/motd"]
    assert not (root.parent / "root.tar").exists()
    program(programs, "mmdebstrap", "print('E: no mirror', file=sys.stderr)\nsys.exit(7)")
    assert build_debian("stable", ["a", "b"]) == root
    with pytest.raises(
        ImageBuildError, match=r"could not make a root of Debian sid: .*ended with 7: E: no mirror"
    ):
        build_debian("sid")


def test_the_command_line_prints_what_it_made_or_why_not(
    programs: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["unpack", str(TINY)]) == 0
    assert Path(capsys.readouterr().out.strip(), "etc/motd").is_file()
    for arguments, message in (
        (["unpack", "none.img"], "error: none.img: expected a squashfs or SIF file"),
        (["debian"], "error: expected mmdebstrap on PATH"),
        (["build", "none.txt"], "error: none.txt: expected a file of pins"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
