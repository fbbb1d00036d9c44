"""File access into a sandbox from outside, confined to its root whatever links it holds.

Paths are resolved by the kernel with RESOLVE_IN_ROOT: absolute links and `..` stay inside,
as if the caller had chrooted, without a window between check and use.
"""

import ctypes
import os
import stat

_OPENAT2 = 437  # the same number on every architecture
_NO_MAGICLINKS, _IN_ROOT = 0x02, 0x10

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
        _refuse_kernel_file(root, fd, path)
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
        _refuse_kernel_file(root, fd, path)
        os.ftruncate(fd, 0)
        file.write(content)


def _refuse_kernel_file(root: int, fd: int, path: str) -> None:
    """Files of /proc act on whoever opens them, here on this process and not on the sandbox."""
    try:
        proc = open_in(root, "/proc", os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        if os.fstat(fd).st_dev == os.fstat(proc).st_dev != os.fstat(root).st_dev:
            raise OSError(f"{path}: expected a regular file, got one of /proc")
    finally:
        os.close(proc)


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
