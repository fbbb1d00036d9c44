"""Source releases: fetched by name, version and hash, unpacked and cleaned, kept in the cache."""

import hashlib
import re
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sandbox.images.cache import built, cache_directory
from sandbox.images.environment import pip

_FORMAT = "2"  # of what is unpacked: part of its address
_LEFT_OUT = re.compile(
    r"(^|/)(\.git|\.hg|\.svn|__pycache__|\.pytest_cache|\.tox|[^/]+\.egg-info|[^/]+\.dist-info)(/|$)"
    r"|\.(orig|rej|pyc|pyo|so|pyd)$|^(build|dist)/|^PKG-INFO$"
)


class SourceError(RuntimeError):
    """A source release could not be had as asked; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A source release on the package index. `sha256` (hex) is that of its archive."""

    name: str
    version: str
    sha256: str


def source_tree(release: Release, *, metadata: str | None = None) -> Path:
    """The unpacked release, read-only by convention, from the cache or fetched.

    Links, caches, build leftovers and package metadata are left out; with `metadata` (a folder of the
    tree, "" for its top) the release's name and version can be asked for at run time, as if it were
    installed from there. Raises `SourceError`.
    """
    place = cache_directory("sources") / f"{release.name}-{release.version}-{_address(release, metadata)}"
    return built(place, lambda top: _unpack(release, top, metadata), recorded=True)


def _address(release: Release, metadata: str | None) -> str:
    return hashlib.sha256(f"{_FORMAT}\0{release.sha256}\0{metadata}".encode()).hexdigest()[:16]


def fetch(release: Release) -> Path:
    """The archive as released, from the cache or by pip. Raises `SourceError` or `ImageBuildError`."""
    place = cache_directory("archives") / release.sha256
    archives = sorted(built(place, lambda top: _download(release, top)).iterdir())
    if len(archives) != 1 or _digest(archives[0]) != release.sha256:
        raise SourceError(
            f"{place}: expected one archive of sha256 {release.sha256}; it was damaged: delete the folder"
        )
    return archives[0]


def _download(release: Release, top: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(f"{release.name}=={release.version} --hash=sha256:{release.sha256}\n")
        # Of this one package alone: what is needed to read its metadata may come in any form.
        form = ["--no-deps", "--no-binary", release.name, "--require-hashes"]
        pip(
            ["download", "--quiet", *form, "--dest", str(top), "--requirement", str(wanted)],
            doing=f"fetch the source of {release.name} {release.version} (sha256 {release.sha256})",
        )
    archives = sorted(top.iterdir())
    if len(archives) != 1 or _digest(archives[0]) != release.sha256:
        names = [each.name for each in archives]
        raise SourceError(
            f"{release.name} {release.version}: expected one archive of sha256 {release.sha256}, got {names}"
        )


def _unpack(release: Release, top: Path, metadata: str | None) -> None:
    archive = fetch(release)
    if not archive.name.endswith((".tar.gz", ".tar.bz2", ".tgz")):
        raise SourceError(f"{archive.name}: expected a tar archive; choose a release that has one")
    with tempfile.TemporaryDirectory(dir=top.parent) as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, members=_kept(tar.getmembers()), filter="data")
        inner = list(Path(folder).iterdir())
        if len(inner) != 1 or not inner[0].is_dir():
            raise SourceError(f"{archive.name}: expected one folder in it, got {len(inner)} entries")
        for entry in inner[0].iterdir():
            shutil.move(entry, top)
    if metadata is not None:
        _describe(release, top / metadata)


def _kept(members: Sequence[tarfile.TarInfo]) -> list[tarfile.TarInfo]:
    kept = []
    for member in members:
        inner = "/".join(PurePosixPath(member.name).parts[1:])
        if member.isfile() and not _LEFT_OUT.search(inner):
            kept.append(member)
    return kept


def _describe(release: Release, folder: Path) -> None:
    name = re.sub(r"[-_.]+", "_", release.name).lower()
    place = folder / f"{name}-{release.version}.dist-info"
    place.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {release.name}\nVersion: {release.version}\n"
    (place / "METADATA").write_text(text)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
