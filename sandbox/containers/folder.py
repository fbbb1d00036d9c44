"""Working copies that are directories of the host, written by processes that nobody trusts."""

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.keeper.files import read_file, write_file
from sandbox.snapshots import Entry, Snapshot

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Folder:
    """One working copy. Paths are relative to it, and links never lead out of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Lets go of it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def read(self, path: str, limit: int) -> bytes:
        """See `Sandbox.read`."""
        if path == ".":
            raise IsADirectoryError(21, "Is a directory", path)
        return read_file(self._fd, path, limit)

    def write(self, files: Mapping[str, bytes]) -> None:
        """Creates or replaces files. Raises `OSError`."""
        for path, content in files.items():
            write_file(self._fd, path, content)

    def fill(self, source: Path) -> Snapshot:
        """Copies a tree into it, links as links. Raises `SandboxError`."""
        try:
            shutil.copytree(source, self.path, symlinks=True, dirs_exist_ok=True)
            os.chmod(self.path, 0o755)
        except (OSError, shutil.Error) as error:
            raise SandboxError(f"image source {source}: {error}") from error
        known = Snapshot()
        for entry in self.entries():
            if entry.kind == "link":
                known.links[entry.path] = entry.target
            elif entry.kind == "file":
                known.add({entry.path: entry.read()})
                known.size += max(entry.size, 1)
            elif entry.kind != "folder":
                raise SandboxError(f"image source {source}: {entry.path} is a {entry.kind}")
        return known

    def entries(self) -> Iterator[Entry]:
        """Everything below. Raises `OSError` for what cannot be read."""
        top = os.dup(self._fd)
        try:
            for place, folders, names, fd in os.fwalk(".", dir_fd=top, onerror=_raise):
                prefix = place[2:] + "/" if place != "." else ""
                for name in folders + names:
                    if (entry := _entry(prefix + name, name, fd)) is not None:
                        yield entry
        finally:
            os.close(top)


def _raise(error: OSError) -> None:
    raise error


def _entry(path: str, name: str, parent: int) -> Entry | None:
    """None for what was deleted meanwhile."""
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            return Entry(path, "link", target=os.readlink(name, dir_fd=parent))
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(info.st_mode):
        return Entry(path, "folder")
    if not stat.S_ISREG(info.st_mode):
        return Entry(path, "special file")
    if info.st_nlink > 1:
        return Entry(path, "hard link")
    return Entry(path, "file", size=info.st_size, read=lambda: _content(name, parent, info.st_size))


def _content(name: str, parent: int, size: int) -> bytes:
    with open(os.open(name, _READ, dir_fd=parent), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{name}: changed while it was read")
        return file.read(size)
