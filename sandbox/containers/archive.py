"""Working copies as tar streams: what a container engine takes in and gives out."""

import io
import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sandbox.base import SandboxError
from sandbox.snapshots import Entry, Snapshot


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
    known.add({path: content})
    known.size += max(len(content), 1)


def _know_link(path: str, target: str, writer: TreeWriter, known: Snapshot) -> None:
    writer.link(path, target)
    known.files.pop(path, None)
    known.links[path] = target
    known.size += 1


def entries(chunks: Iterable[bytes]) -> Iterator[Entry]:
    """What a tar with one top folder holds. Raises `OSError` for one that is cut or no tar."""
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Reader(chunks)), mode="r|") as tar:
            for item in tar:
                yield _entry(tar, item)
    except tarfile.TarError as error:
        raise OSError(str(error)) from error


def _entry(tar: tarfile.TarFile, item: tarfile.TarInfo) -> Entry:
    path = item.name.partition("/")[2]
    if item.isdir():
        return Entry(path, "folder")
    if item.issym():
        return Entry(path, "link", target=item.linkname)
    if not item.isfile():
        return Entry(path, "hard link" if item.islnk() else "special file")
    return Entry(path, "file", size=item.size, read=lambda: _content(tar, item))


def _content(tar: tarfile.TarFile, item: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(item)
    assert file is not None
    try:
        return file.read()
    except tarfile.TarError as error:
        raise OSError(str(error)) from error
