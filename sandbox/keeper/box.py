"""One sandbox as the keeper holds it: its disk, and the bubblewrap process that runs in it."""

import errno
import os
import resource
import select
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sandbox.keeper.cgroups import Group
from sandbox.keeper.disk import Disk, Scratch
from sandbox.keeper.files import open_in
from sandbox.keeper.wire import Header

_REPORT_TIMEOUT = 10_000  # milliseconds; a report takes a few


@dataclass
class Box:
    """Descriptors belong to the keeper. A sandbox that is rebuilt keeps its disk."""

    disk: Disk
    scratch: Scratch
    workdir: str
    memory: int  # bytes that its processes may need without a control group
    network: bool  # whether it has the host's
    group: Group | None
    counter: int  # file that says how many processes were killed for memory
    filter: str = ""  # file of its system call filter
    pid: int = 0
    outer: int = -1  # pidfd of bubblewrap
    info: int = -1  # pipe: bubblewrap's report; closed once read
    block: int = -1  # pipe: a byte in it lets the program start
    report: bytes = b""
    first: int = 0  # the sandbox's first process, and its pidfd
    inner: int = -1
    root: int = -1  # directory: the sandbox's /
    running: bool = False
    kills: int = 0
    status: int | None = None
    terminals: set[int] = field(default_factory=set)  # process ids of their shells

    def started(self, pid: int, info: int, block: int) -> None:
        """Bubblewrap runs as `pid`, will report through `info` and wait at `block`."""
        self.pid, self.outer, self.info, self.block = pid, os.pidfd_open(pid), info, block
        self.report, self.first, self.running, self.status = b"", 0, True, None

    def reported(self) -> None:
        """The report is there, or will never be: bubblewrap has its own mount namespace, or has ended."""
        os.close(self.info)
        self.info = -1
        self.scratch.hide()

    def confine(self, limits: Header) -> None:
        """Limits the first process, whose report is there, and lets its program start.

        Raises `OSError` if there is none: to the kernel, process 0 is the caller.
        """
        if not self.first:
            raise OSError(errno.ESRCH, "it ended before its report")
        if self.group is not None:
            self.group.join(self.first)
        for name, value in limits.items():
            limit(self.first, getattr(resource, name), value)
        os.write(self.block, b"1")

    def count_kill(self) -> None:
        """Another process was killed for memory, without a control group."""
        self.kills += 1
        os.pwrite(self.counter, f"oom_kill {self.kills}\n".encode(), 0)

    def kill(self) -> None:
        """Kills the first process, and with it the whole pid namespace."""
        fd = self.inner if self.inner >= 0 else self.outer
        if self.running:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def ended(self) -> None:
        """Reaps bubblewrap. Its exit means that all processes of the sandbox are gone."""
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.running = False
        for fd in (self.outer, self.inner, self.root, self.block):
            if fd >= 0:
                os.close(fd)
        self.outer = self.inner = self.root = self.block = -1

    def forget(self) -> None:
        """Removes what is left of a sandbox that ended."""
        self.scratch.close()
        self.disk.close()
        os.close(self.counter)
        self.remove_group()

    def remove_group(self) -> None:
        """Removes the control group, which would outlive the keeper."""
        if self.group is not None:
            self.group.remove()

    def opened_root(self) -> int:
        """The sandbox's / as a descriptor. Raises `OSError` while bubblewrap still makes it."""
        if not self.running or not self.first:
            raise OSError(3, "the sandbox does not run")
        if self.root < 0:
            program, bubblewrap = (os.stat(f"/proc/{pid}/exe") for pid in (self.first, self.pid))
            if os.path.samestat(program, bubblewrap):
                raise OSError(11, "the sandbox is still starting")
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            self.root = os.open(f"/proc/{self.first}/root", flags)
            os.close(open_in(self.root, self.workdir, flags))
        return self.root


def limit(pid: int, resource_number: int, value: int) -> None:
    """Sets a resource limit, or leaves the lower one that the owner itself runs under."""
    _, hard = resource.prlimit(pid, resource_number)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.prlimit(pid, resource_number, (value, value))


def readable(fd: int) -> bool:
    """Whether bubblewrap reports before it takes too long."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(_REPORT_TIMEOUT))


def bubblewrap_arguments(request: Header, known: Mapping[str, Sequence[str]]) -> list[str]:
    """The request's arguments, with what only the keeper knows in place of names in braces."""
    return [part for argument in request["argv"] for part in known.get(argument, (argument,))]


def binds(places: Mapping[str, str]) -> list[str]:
    """Bubblewrap's arguments that show every place at its target, writable."""
    return [part for target, place in places.items() for part in ("--bind", place, target)]
