"""The writable part of one sandbox: a size-limited tmpfs, over an image's tree where there is one.

Its mounts exist in the keeper's own namespace only and end with it.
"""

import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from sandbox.keeper import mounts

_BYTES_PER_INODE = 1024  # about what the kernel spends on one: empty files are limited, too
_UNTIL_COPIED = 1 << 40  # bytes; the kernel cannot limit later what was unlimited at first
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Disk:
    """A working copy for `size` bytes of writes over the directory `lower`, which stays as it is.

    Shown at `place` in the keeper's namespace. Descriptors: `work` is the same as `place`, `upper`
    holds what was written, or everything if `whole`; `lower` (-1: none) is the image's tree.
    """

    def __init__(self, stage: str, name: str, *, size: int, lower: int) -> None:
        self.place, self._disk = f"{stage}/{name}", f"{stage}/{name}.disk"
        self.upper = self.work = -1
        self.lower = lower
        self._mounted: list[str] = []
        try:
            # The kernel refuses to take over a file whose owner has no id in this namespace.
            self.whole = lower < 0 or os.fstat(self.lower).st_uid != os.getuid() or not _xattrs(stage)
            self._make(size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Forgets the disk; it is gone as soon as no sandbox shows it."""
        for place in self._mounted:
            self._unmount(place)
        for fd in (self.upper, self.lower, self.work):
            if fd >= 0:
                os.close(fd)
        self.upper = self.lower = self.work = -1

    def _make(self, size: int) -> None:
        copied = self.whole and self.lower >= 0
        self._mount(self._disk, "tmpfs", _limit(_UNTIL_COPIED if copied else size))
        os.mkdir(f"{self._disk}/upper", 0o755)
        self.upper = _folder(f"{self._disk}/upper")
        if copied:
            taken = copy_tree(self.lower, self.upper)
            mounts.mount("disk", self._disk, None, flags=mounts.REMOUNT, options=_limit(size + taken))
        if self.whole:
            self.place = f"{self._disk}/upper"
        else:
            self._overlay()
        self.work = _folder(self.place)

    def _overlay(self) -> None:
        os.mkdir(f"{self._disk}/work", 0o755)
        # Through a descriptor, so that no character of the path has a meaning.
        lower = f"lowerdir=/proc/self/fd/{self.lower}"
        upper = f"upperdir={self._disk}/upper,workdir={self._disk}/work"
        self._mount(self.place, "overlay", f"{lower},{upper},userxattr")
        self._unmount(self._disk)  # every mount of the keeper makes every start a little slower

    def _mount(self, place: str, kind: str, options: str) -> None:
        os.mkdir(place)
        _mount(place, kind, options)
        self._mounted = [*self._mounted, place]

    def _unmount(self, place: str) -> None:
        mounts.detach(place)
        os.rmdir(place)
        self._mounted = [other for other in self._mounted if other != place]


class Scratch:
    """Empty file systems of one sandbox for `size` bytes each, by the path inside where they are shown."""

    def __init__(self, stage: str, name: str, *, size: int, targets: Sequence[str]) -> None:
        self.places = {target: f"{stage}/{name}.{number}" for number, target in enumerate(targets)}
        self._size = size
        self._mounted: list[str] = []
        for place in self.places.values():
            os.mkdir(place)

    def make(self) -> None:
        """New ones, in the keeper's namespace until `hide`."""
        for place in self.places.values():
            _mount(place, "tmpfs", _limit(self._size))
            self._mounted.append(place)

    def hide(self) -> None:
        """Leaves them to who has them in a namespace of its own. Idempotent."""
        while self._mounted:
            mounts.detach(self._mounted.pop())

    def close(self) -> None:
        """Forgets them. While a sandbox starts, its mounts would go with the folders below them."""
        self.hide()
        for place in self.places.values():
            os.rmdir(place)


def copy_tree(source: int, target: int) -> int:
    """Copies a directory of files, folders and symbolic links. Returns the bytes that it takes.

    Raises `OSError` for what is unreadable, and for special files.
    """
    taken = 0
    with os.scandir(source) as entries:
        for entry in entries:
            taken += _PAGE + _copy_entry(entry, source, target)
    return taken


def _copy_entry(entry: os.DirEntry[str], source: int, target: int) -> int:
    info = entry.stat(follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(entry.name, dir_fd=source), entry.name, dir_fd=target)
        return _PAGE
    if stat.S_ISDIR(info.st_mode):
        os.mkdir(entry.name, 0o755, dir_fd=target)
        return _copied(entry.name, source, target, os.O_DIRECTORY)
    if stat.S_ISREG(info.st_mode):
        mode = info.st_mode & 0o755 | 0o600
        os.close(os.open(entry.name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=target))
        return _copied(entry.name, source, target, 0)
    raise OSError(22, "expected a file, folder or symbolic link", entry.name)


def _copied(name: str, source: int, target: int, flags: int) -> int:
    inner = os.open(name, flags | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
    access = os.O_RDONLY if flags else os.O_WRONLY
    outer = os.open(name, flags | access | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
    try:
        if flags:
            return copy_tree(inner, outer)
        with open(inner, "rb", closefd=False) as reader, open(outer, "wb", closefd=False) as writer:
            shutil.copyfileobj(reader, writer)
            return -(-writer.tell() // _PAGE) * _PAGE
    finally:
        os.close(inner)
        os.close(outer)


def _mount(place: str, kind: str, options: str) -> None:
    mounts.mount("disk", place, kind, flags=mounts.NO_SUID | mounts.NO_DEVICES, options=options)


def _limit(size: int) -> str:
    return f"mode=755,size={size},nr_inodes={size // _BYTES_PER_INODE + 64}"


def _folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@cache
def _xattrs(stage: str) -> bool:
    """Whether the kernel's tmpfs has what an overlay needs of its upper layer (Linux 6.6)."""
    with suppress(OSError):
        os.setxattr(stage, "user.overlay.opaque", b"n")
        os.removexattr(stage, "user.overlay.opaque")
        return True
    return False
