"""What a sandbox changed: its upper layer against the image's tree, at a cost of what was written.

Both are read through descriptors from outside, and no link is followed. In the upper layer of an
overlay, a whiteout (character device 0, 0) means that the name below was deleted, and an opaque
folder hides the one below. An upper layer that is `whole` hides everything below.
"""

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

_MAX_NEW, _MAX_DEPTH = 20_000, 64  # entries that the lower tree has not; folders in each other
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1 << 18


@dataclass
class Changes:
    """`files` differ from the lower tree or are asked for; `deleted`: the lower tree's that are gone.

    `problem` says why it must not be trusted as a patch.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    problem: str = ""


@dataclass
class Pair:
    """The same folder in both layers. Descriptors; `lower` is -1 where there is none or it is hidden."""

    prefix: str
    upper: int
    lower: int
    opaque: bool

    def below(self, name: str) -> os.stat_result | None:
        """The lower tree's entry."""
        if self.lower >= 0:
            with suppress(FileNotFoundError):
                return os.stat(name, dir_fd=self.lower, follow_symlinks=False)
        return None


def changes(upper: int, lower: int, *, whole: bool, known: Collection[str], limit: int) -> Changes:
    """Compares two folders. Files in `known` are always read; at most `limit` bytes are, in all."""
    reader = _Reader(whole, frozenset(known), limit)
    try:
        reader.walk(Pair("", upper, lower, whole))
    except (OSError, UnicodeEncodeError) as error:
        reader.found.problem = reader.found.problem or f"the working copy cannot be read: {error}"
    return reader.found


class _Reader:
    def __init__(self, whole: bool, known: frozenset[str], limit: int) -> None:
        self.found = Changes()
        self._whole, self._known, self._left, self._new = whole, known, limit, 0

    def walk(self, pair: Pair) -> None:
        """Adds what changed in one folder and below."""
        if pair.prefix.count("/") > _MAX_DEPTH:
            return self._reject("too many files or too deep")
        seen = set()
        with os.scandir(pair.upper) as entries:
            for entry in entries:
                seen.add(entry.name)
                with suppress(FileNotFoundError):  # deleted since its folder was listed
                    self._entry(pair, entry)
                if self._new > _MAX_NEW:
                    return self._reject("too many files or too deep")
        if pair.opaque and pair.lower >= 0:
            for name in os.listdir(pair.lower):
                if name not in seen:
                    self._delete(pair, name)

    def _entry(self, pair: Pair, entry: os.DirEntry[str]) -> None:
        path = pair.prefix + entry.name
        path.encode()
        info, below = entry.stat(follow_symlinks=False), pair.below(entry.name)
        self._new += below is None
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0 and not self._whole:
            if below is not None:
                self._delete(pair, entry.name)
        elif stat.S_ISDIR(info.st_mode):
            self._folder(pair, entry.name, info, below)
        elif stat.S_ISREG(info.st_mode):
            self._file(pair, entry.name, info, below)
        elif not stat.S_ISLNK(info.st_mode):
            self._reject(f"{path} is no regular file")
        elif below is None or not stat.S_ISLNK(below.st_mode) or not self._same_link(pair, entry.name):
            self._reject(f"{path} is a symbolic link")

    def _folder(self, pair: Pair, name: str, info: os.stat_result, below: os.stat_result | None) -> None:
        path = pair.prefix + name
        if info.st_mode & 0o500 != 0o500:
            return self._reject(f"{path} cannot be read")
        upper, lower = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=pair.upper), -1
        try:
            if below is not None and stat.S_ISDIR(below.st_mode):
                lower = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=pair.lower)
            elif below is not None:
                self.found.deleted.append(path)
            self.walk(Pair(path + "/", upper, lower, pair.opaque or _opaque(upper)))
        finally:
            for fd in (upper, lower):
                if fd >= 0:
                    os.close(fd)

    def _file(self, pair: Pair, name: str, info: os.stat_result, below: os.stat_result | None) -> None:
        path = pair.prefix + name
        if info.st_nlink > 1:
            self._reject(f"{path} is a hard link")
        if not info.st_mode & 0o400:
            return self._reject(f"{path} cannot be read")
        if below is not None and stat.S_ISDIR(below.st_mode):
            self._delete(pair, name)
        fd = os.open(name, _FLAGS, dir_fd=pair.upper)
        try:
            regular = below is not None and stat.S_ISREG(below.st_mode)
            if path in self._known or not regular or not _same_file(fd, pair.lower, name):
                self._keep(path, fd)
        finally:
            os.close(fd)

    def _keep(self, path: str, fd: int) -> None:
        with open(fd, "rb", closefd=False) as file:
            file.seek(0)
            content = file.read(self._left + 1)
        if len(content) > self._left:
            return self._reject(f"{path}: expected at most {self._left} more bytes")
        self._left -= len(content)
        self.found.files[path] = content

    def _delete(self, pair: Pair, name: str) -> None:
        """Everything that the lower tree has at or below `name` is gone."""
        path = pair.prefix + name
        below = pair.below(name)
        if below is None or not stat.S_ISDIR(below.st_mode):
            self.found.deleted.append(path)
            return
        lower = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=pair.lower)
        try:
            for inner in os.listdir(lower):
                self._delete(Pair(path + "/", -1, lower, True), inner)
        finally:
            os.close(lower)

    def _same_link(self, pair: Pair, name: str) -> bool:
        return os.readlink(name, dir_fd=pair.upper) == os.readlink(name, dir_fd=pair.lower)

    def _reject(self, reason: str) -> None:
        self.found.problem = self.found.problem or reason


def _opaque(folder: int) -> bool:
    with suppress(OSError):
        return os.getxattr(folder, "user.overlay.opaque") == b"y"
    return False


def _same_file(fd: int, lower: int, name: str) -> bool:
    other = os.open(name, _FLAGS, dir_fd=lower)
    try:
        if os.fstat(fd).st_size != os.fstat(other).st_size:
            return False
        with open(fd, "rb", closefd=False) as left, open(other, "rb", closefd=False) as right:
            while piece := left.read(_CHUNK):
                if piece != right.read(len(piece)):
                    return False
            return True
    finally:
        os.close(other)
