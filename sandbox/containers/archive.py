"""Working copies as tar streams: what a container engine takes in and gives out."""

import hashlib
import io
import posixpath
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.base import Diff, RejectedDiff, SandboxError
from sandbox.diffs import compare

_MAX_ENTRIES, _MAX_DEPTH = 20_000, 64


@dataclass
class Snapshot:
    """The state that a diff compares with: digest by file, target by link; `size` in bytes."""

    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    size: int = 0

    def add(self, files: Mapping[str, bytes]) -> None:
        """Counts `files` (relative paths) as known."""
        self.files |= {posixpath.normpath(path): digest(content) for path, content in files.items()}

    def copy(self) -> "Snapshot":
        """One that can change on its own."""
        return Snapshot(dict(self.files), dict(self.links), self.size)


class TreeWriter:
    """Builds a tar in which everything belongs to `owner`, parents included."""

    def __init__(self, owner: int) -> None:
        self._owner, self._buffer, self._folders = owner, io.BytesIO(), set[str]()
        self._tar = tarfile.TarFile(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT)

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Adds a regular file. Raises `OSError` for a path that leads out."""
        path = inside(path)
        self._parents(path)
        info = self._info(path, mode)
        info.size = len(content)
        self._tar.addfile(info, io.BytesIO(content))

    def link(self, path: str, target: str) -> None:
        """Adds a symbolic link."""
        path = inside(path)
        self._parents(path)
        info = self._info(path, 0o777)
        info.type, info.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(info)

    def folder(self, path: str) -> None:
        """Adds a directory, once."""
        if path and path not in self._folders:
            self._parents(path)
            self._folders.add(path)
            info = self._info(path, 0o755)
            info.type = tarfile.DIRTYPE
            self._tar.addfile(info)

    def content(self) -> bytes:
        """The whole archive; ends the writing."""
        self._tar.close()
        return self._buffer.getvalue()

    def _parents(self, path: str) -> None:
        self.folder(posixpath.dirname(path))

    def _info(self, path: str, mode: int) -> tarfile.TarInfo:
        info = tarfile.TarInfo(path)
        info.mode, info.uid, info.gid = mode, self._owner, self._owner
        return info


class _Reader(io.RawIOBase):
    """A file object over chunks, for `tarfile`."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._left = iter(chunks), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            try:
                self._left = next(self._chunks)
            except StopIteration:
                return 0
        taken = self._left[: len(buffer)]
        buffer[: len(taken)] = taken
        self._left = self._left[len(taken) :]
        return len(taken)


def digest(content: bytes) -> bytes:
    """What stands for a file's content in a snapshot."""
    return hashlib.sha256(content).digest()


def inside(path: str) -> str:
    """The normal form of a relative path. Raises `OSError` for one that leads out."""
    normal = posixpath.normpath(path)
    if not path or "\0" in path or normal.startswith(("/", "..")) or normal == ".":
        raise OSError(f"{path!r}: expected a path inside the working directory")
    return normal


def base_of(image: Iterable[bytes] | None, source: Path | None, owner: int) -> tuple[bytes, Snapshot]:
    """A working copy before the caller's files: the image's own (a tar with one top folder), then `source`.

    Raises `SandboxError` for trees that cannot be copied faithfully.
    """
    writer, known = TreeWriter(owner), Snapshot()
    if image is not None:
        _copy_archive(image, writer, known)
    if source is not None:
        _copy_folder(source, writer, known)
    return writer.content(), known


def _copy_archive(chunks: Iterable[bytes], writer: TreeWriter, known: Snapshot) -> None:
    with tarfile.open(fileobj=io.BufferedReader(_Reader(chunks)), mode="r|") as tar:
        for entry in tar:
            path = entry.name.partition("/")[2]
            if entry.isdir():
                writer.folder(path.rstrip("/"))
            elif entry.issym():
                _know_link(path, entry.linkname, writer, known)
            elif entry.isfile() and (file := tar.extractfile(entry)) is not None:
                _know_file(path, file.read(), entry.mode, writer, known)
            else:
                raise SandboxError(f"the image's working directory holds {path}, which is no file or link")


def _copy_folder(source: Path, writer: TreeWriter, known: Snapshot) -> None:
    if not source.is_dir():
        raise SandboxError(f"image source {source}: expected a directory")
    for folder, names, files in source.walk():
        place = folder.relative_to(source)
        for name in names + files:
            path, real = str(place / name), folder / name
            if real.is_symlink():
                _know_link(path, str(real.readlink()), writer, known)
            elif real.is_dir():
                writer.folder(path)
            elif real.is_file():
                _know_file(path, real.read_bytes(), real.stat().st_mode & 0o755, writer, known)
            else:
                raise SandboxError(f"image source {source}: {path} is no file, folder or link")


def _know_file(path: str, content: bytes, mode: int, writer: TreeWriter, known: Snapshot) -> None:
    writer.file(path, content, mode)
    known.links.pop(path, None)
    known.files[path] = digest(content)
    known.size += max(len(content), 1)


def _know_link(path: str, target: str, writer: TreeWriter, known: Snapshot) -> None:
    writer.link(path, target)
    known.files.pop(path, None)
    known.links[path] = target
    known.size += 1


def changes(chunks: Iterable[bytes], known: Snapshot, limit: int) -> Diff:
    """How the tree in a tar (one top folder) differs from `known`; at most `limit` bytes are kept."""
    found, content, links, left = dict[str, bytes](), dict[str, bytes](), dict[str, str](), limit
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Reader(chunks)), mode="r|") as tar:
            for seen, entry in enumerate(tar):
                path = entry.name.partition("/")[2]
                if problem := _problem(entry, path, seen - len(known.files)):
                    return RejectedDiff(reason=problem)
                if entry.issym():
                    links[path] = entry.linkname
                elif entry.isfile():
                    data = _data(tar, entry, left + known.size)
                    found[path] = digest(data)
                    if found[path] != known.files.get(path):
                        content[path], left = data, left - len(data)
                if left < 0:
                    return RejectedDiff(reason=f"more than {limit} bytes were changed")
    except (tarfile.TarError, UnicodeError, OSError) as error:
        return RejectedDiff(reason=f"the working copy cannot be read: {error}")
    for path, target in links.items():
        if known.links.get(path) != target:
            return RejectedDiff(reason=f"{path} is a symbolic link")
    before = known.files | dict.fromkeys(known.links, b"")
    differing = compare(before, found | dict.fromkeys(links, b"")).files
    return Diff(files={path: None if new is None else content[path] for path, new in differing.items()})


def _problem(entry: tarfile.TarInfo, path: str, extra: int) -> str:
    """Why this entry cannot be part of a patch, or ""."""
    if extra > _MAX_ENTRIES or path.count("/") > _MAX_DEPTH:
        return "too many files or too deep"
    if entry.islnk():
        return f"{path} is a hard link"
    if not (entry.isfile() or entry.isdir() or entry.issym()):
        return f"{path}: expected a regular file"
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"{path!r} cannot be read: its name is not UTF-8"
    return ""


def _data(tar: tarfile.TarFile, entry: tarfile.TarInfo, limit: int) -> bytes:
    if entry.size > limit:
        raise OSError(f"{entry.name}: expected at most {limit} bytes, got {entry.size}")
    file = tar.extractfile(entry)
    assert file is not None
    return file.read()
