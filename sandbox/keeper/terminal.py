"""Interactive shells on pseudo terminals inside sandboxes that run already."""

import ctypes
import fcntl
import os
import resource
import signal
import struct
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sandbox.keeper.cgroups import Group
from sandbox.keeper.files import open_in
from sandbox.keeper.signals import restore_defaults

_UNLOCK, _PEER = 0x40045431, 0x5441  # ioctls TIOCSPTLCK and TIOCGPTPEER, as on x86-64 and aarch64
_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
_NO_NEW_PRIVILEGES, _DROP_BOUND, _SUBREAPER, _SECCOMP, _CAPABILITIES = 38, 24, 36, 22, 64
_ROWS, _COLUMNS, _ROUNDS = 24, 80, 100

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


@dataclass(frozen=True)
class Program:
    """What runs on a terminal: the first of `commands` that exists, with the limits of the sandbox."""

    commands: Sequence[Sequence[str]]
    environment: Mapping[str, str]
    workdir: str
    rlimits: Mapping[str, int]
    filter: bytes  # of system calls
    group: Group | None


def adopt_orphans() -> None:
    """Makes this process the parent of those whose own parent ended: of each shell on a terminal."""
    if _libc.prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become a subreaper")


def open_pair(root: int) -> tuple[int, int]:
    """Both ends of a new pseudo terminal of the sandbox whose / is `root`. Raises `OSError`."""
    master = open_in(root, "/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    try:
        fcntl.ioctl(master, _UNLOCK, struct.pack("i", 0))
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        return master, fcntl.ioctl(master, _PEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except BaseException:
        os.close(master)
        raise


def start(program: Program, *, first: int, slave: int) -> int:
    """Runs `program` on `slave` in all namespaces of the process with pidfd `first`.

    Returns its process id as the keeper sees it, which has to reap it: a pid namespace does not end
    before. Raises `OSError`.
    """
    report, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _enter(program, first, slave, end)
    os.close(end)
    try:
        os.waitpid(pid, 0)
        words = _read_all(report).decode().split(" ", 2)
    finally:
        os.close(report)
    if words[0] != "pid":
        raise OSError(int(words[1]), words[2])
    return int(words[1])


def kill_tree(pid: int) -> None:
    """Kills a subreaper with all that descends from it; it keeps its orphans while it is stopped."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for _ in range(_ROUNDS):  # what forks meanwhile is found the next time
        for child in (below := descendants([pid])[pid]):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if not below:
            break
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(roots: Sequence[int], check: Callable[[], None] = lambda: None) -> dict[int, list[int]]:
    """Live processes below each of `roots`, by one look at every process; `check` is called for each."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        check()
        with suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found: dict[int, list[int]] = {}
    for root in roots:
        found[root] = list(children.get(root, ()))
        for pid in found[root]:
            found[root] += children.get(pid, ())
    return found


def _enter(program: Program, first: int, slave: int, report: int) -> None:
    """In a forked process: joins the namespaces; its child, which is inside all of them, executes."""
    try:
        if program.group is not None:
            program.group.join(os.getpid())
        if _libc.setns(first, _NAMESPACES):
            raise OSError(ctypes.get_errno(), "cannot enter the sandbox")
        if pid := os.fork():
            os.write(report, f"pid {pid}".encode())
            os._exit(0)
        _execute(program, slave)
    except OSError as error:
        os.write(report, f"error {error.errno} {error.strerror}".encode())
    finally:
        os._exit(127)


def _execute(program: Program, slave: int) -> None:
    for target in (0, 1, 2):
        os.dup2(slave, target)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(program.workdir)
    for name, value in program.rlimits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    restore_defaults()
    _restrict(program.filter)
    for command in program.commands:
        with suppress(FileNotFoundError):
            os.execve(command[0], list(command), dict(program.environment))


def _restrict(instructions: bytes) -> None:
    """Entering gave every capability in the sandbox's namespace: none of them may come back."""
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    for capability in range(_CAPABILITIES):
        _libc.prctl(_DROP_BOUND, capability, 0, 0, 0)
    program = _Filter(len(instructions) // 8, instructions)
    if _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or _libc.prctl(_SECCOMP, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "cannot confine the terminal")


def _read_all(fd: int) -> bytes:
    data = b""
    while piece := os.read(fd, 4096):
        data += piece
    return data
