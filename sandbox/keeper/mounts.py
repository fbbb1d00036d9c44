"""Mount and namespace calls that Python's library lacks. All raise `OSError`.

The numbers of the newer system calls are the same on every architecture.
"""

import ctypes
import os

NEW_NAMESPACE, NEW_USERS = 0x00020000, 0x10000000
READ_ONLY, NO_SUID, NO_DEVICES, BIND, RECURSIVE = 0x1, 0x2, 0x4, 0x1000, 0x4000
REMOUNT, PRIVATE, SLAVE, SHARED = 0x20, 1 << 18, 1 << 19, 1 << 20
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE, _FROM_DESCRIPTOR, _EMPTY_PATH, _IDMAP = 0x1, 0x4, 0x1000, 0x00100000
_DETACH, _SET_DUMPABLE, _HERE = 2, 4, -100

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def unshare(namespaces: int) -> None:
    """unshare(2)."""
    _checked(_libc.unshare(namespaces), "unshare")


def mount(source: str, target: str, kind: str | None, *, flags: int = 0, options: str = "") -> None:
    """mount(2); `kind` None for binds and changes."""
    arguments = [os.fsencode(source), os.fsencode(target), kind.encode() if kind else None]
    _checked(_libc.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(options) or None), target)


def detach(target: str) -> None:
    """Takes a mount out of this namespace; who has it open keeps it."""
    _checked(_libc.umount2(os.fsencode(target), _DETACH), target)


def clone_tree(path: str) -> int:
    """Descriptor of a mount of `path` that is attached nowhere yet."""
    call = (_OPEN_TREE, _HERE, os.fsencode(path), _CLONE | os.O_CLOEXEC)
    return _checked(_libc.syscall(*call), path)


def attach(tree: int, target: str) -> None:
    """Attaches what `clone_tree` gave at `target`."""
    call = (_MOVE_MOUNT, tree, b"", _HERE, os.fsencode(target), _FROM_DESCRIPTOR)
    _checked(_libc.syscall(*call), target)


def map_owners(tree: int, userns: int) -> None:
    """Shows the files of a detached mount with other owners, by the id maps of a user namespace."""
    attributes = _MountAttributes(set=_IDMAP, userns=userns)
    size = ctypes.sizeof(attributes)
    call = (_MOUNT_SETATTR, tree, b"", _EMPTY_PATH, ctypes.byref(attributes), size)
    _checked(_libc.syscall(*call), "a mount with other owners")


def user_namespace(uid_map: str, gid_map: str) -> int:
    """Descriptor of a new user namespace with these maps, held by no process. Needs root."""
    (ready, say_ready), (end, say_end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            unshare(NEW_USERS)
            os.write(say_ready, b"1")
            os.close(say_end)
            os.read(end, 1)
        finally:
            os._exit(0)
    try:
        os.close(say_ready)
        os.read(ready, 1)
        for name, text in (("uid_map", uid_map), ("gid_map", gid_map)):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(text)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (ready, end, say_end):
            os.close(fd)
        os.waitpid(pid, 0)


def own_user_namespace() -> None:
    """Moves this process to new user and mount namespaces in which its ids are the same.

    It may mount there; what it executes as a plain user has no capabilities.
    """
    uid, gid = os.getuid(), os.getgid()
    # A process that changed its ids may not write its own maps unless it is dumpable.
    _checked(_libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")
    unshare(NEW_USERS | NEW_NAMESPACE)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _checked(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), what)
    return result
