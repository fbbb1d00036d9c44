"""File access into a sandbox from outside, confined to its root whatever links it holds.

Paths are resolved by the kernel with RESOLVE_IN_ROOT: absolute links and `..` stay inside,
as if the caller had chrooted, without a window between check and use.
"""

import ctypes
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

_OPENAT2 = 437  # the same number on every architecture
_NO_MAGICLINKS, _IN_ROOT = 0x02, 0x10
_MAX_ENTRIES, _MAX_DEPTH = 20_000, 64

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Opens `path` as seen by a process whose root is the directory `root`. Raises `OSError`."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, _NO_MAGICLINKS | _IN_ROOT)
    fd = _libc.syscall(_OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)
    return fd


def read_file(root: int, path: str, limit: int) -> bytes:
    """Content of a regular file. Raises `OSError`, also when it is larger than `limit` bytes."""
    fd = open_in(root, path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return _read_regular(fd, path, limit)
    finally:
        os.close(fd)


def write_file(root: int, path: str, content: bytes) -> None:
    """Creates or replaces a regular file and its parents. Raises `OSError`."""
    _make_parents(root, path)
    # O_TRUNC only after the type is known: a device or pipe must not be touched.
    fd = open_in(root, path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
    with open(fd, "wb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path}: expected a regular file")
        os.ftruncate(fd, 0)
        file.write(content)


def write_link(root: int, path: str, target: str) -> None:
    """Creates a symbolic link and its parents. Raises `OSError`."""
    _make_parents(root, path)
    parent = open_in(root, os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        os.symlink(target, os.path.basename(path), dir_fd=parent)
    finally:
        os.close(parent)


@dataclass
class Tree:
    """What a directory holds; `problem` says why it must not be trusted as a patch."""

    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def read_tree(top: int, limit: int) -> Tree:
    """Regular files and links below `top`, links never followed, at most `limit` bytes in all."""
    tree, left = Tree(), limit
    for path, entry, parent in _walk(top, tree):
        left -= _collect(tree, path, entry, parent, left)
    return tree


def _make_parents(root: int, path: str) -> None:
    done = ""
    for part in os.path.dirname(path).strip("/").split("/"):
        if not part:
            continue
        parent = open_in(root, done or "/", os.O_PATH | os.O_DIRECTORY)
        try:
            os.mkdir(part, 0o755, dir_fd=parent)
        except FileExistsError:
            pass
        finally:
            os.close(parent)
        done += "/" + part


def _read_regular(fd: int, path: str, limit: int) -> bytes:
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(21, "Is a directory", path)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(f"{path}: expected a regular file")
    if info.st_size > limit:
        raise OSError(f"{path}: expected at most {limit} bytes, got {info.st_size}")
    with open(fd, "rb", closefd=False) as file:
        return file.read(limit + 1)[:limit]


def _walk(top: int, tree: Tree) -> Iterator[tuple[str, os.DirEntry[str], int]]:
    """Every entry that is not a directory, with an open descriptor of its parent."""
    stack, seen = [""], 0
    while stack:
        prefix = stack.pop()
        if (fd := _open_folder(top, prefix, tree)) is None:
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    seen += 1
                    path = prefix + entry.name
                    if seen > _MAX_ENTRIES or path.count("/") > _MAX_DEPTH:
                        tree.problem = "too many files or too deep"
                        return
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(path + "/")
                    else:
                        yield path, entry, fd
        finally:
            os.close(fd)


def _open_folder(top: int, prefix: str, tree: Tree) -> int | None:
    """None for a folder that vanished meanwhile, or that its owner made unreadable: that is a problem."""
    try:
        return open_in(top, "/" + prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        tree.problem = tree.problem or f"{prefix!r} cannot be read: {error}"
        return None


def _collect(tree: Tree, path: str, entry: os.DirEntry[str], parent: int, left: int) -> int:
    """Adds one entry to `tree`; returns the bytes used."""
    try:
        path.encode()
        if entry.is_symlink():
            tree.links[path] = os.readlink(entry.name, dir_fd=parent)
            tree.problem = tree.problem or f"{path} is a symbolic link"
            return 0
        fd = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:  # deleted since its folder was listed
        return 0
    except (OSError, UnicodeEncodeError) as error:
        tree.problem = tree.problem or f"{path!r} cannot be read: {error}"
        return 0
    try:
        if os.fstat(fd).st_nlink > 1:
            tree.problem = tree.problem or f"{path} is a hard link"
        tree.files[path] = _read_regular(fd, path, left)
        return len(tree.files[path])
    except OSError as error:
        tree.problem = tree.problem or str(error)
        return 0
    finally:
        os.close(fd)
