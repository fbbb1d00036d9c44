"""Runs one container of a command line for its owner, watches what it uses, and ends all of it.

    python supervisor.py CONFIG

It is the reaper of everything below it, so that no process can get away from it, and it holds one end of a
socket: when the other end closes, by whatever end of the owner, everything is killed and the sandbox's
directory removed. CONFIG is JSON: command, control (descriptor), folder, work, memory, disk and file_size
(bytes), pids, tty. A line on the socket says how it ended: {"status": exit code, "reason": what was exceeded}
"""

import ctypes
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

_POLL = 1.0  # seconds between looks at what is used
_DISK_EVERY = 5  # looks
_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants() -> dict[int, int]:
    """Every process below this one, parents first: resident bytes by process id."""
    parents, resident = dict[int, int](), dict[int, int]()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        parents[int(name)], resident[int(name)] = int(fields[1]), int(fields[21]) * _PAGE
    ours = [os.getpid()]
    while more := [pid for pid, parent in parents.items() if parent in ours and pid not in ours]:
        ours += more
    return {pid: resident[pid] for pid in ours[1:]}


def used_bytes(top: str) -> int:
    """Bytes of the files below a directory."""
    total = 0
    for _, _, names, fd in os.fwalk(top, onerror=None):
        for name in names:
            try:
                total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_size
            except OSError:
                continue
    return total


class Supervisor:
    """One container."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._control = socket.socket(fileno=config["control"])
        # A sandbox that was ended for its size and begins anew has time to delete, but may not grow.
        self._disk = max(config["disk"], used_bytes(config["work"]))
        self._child = _start(config)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # the container's alone: their end tells the owner of its end
            os.dup2(nowhere, stream)
        self._looks = 0

    def serve(self) -> None:
        """Until the container or the owner ends."""
        handle = os.pidfd_open(self._child.pid)
        reason = ""
        while not reason:
            ready, _, _ = select.select([self._control, handle], [], [], _POLL)
            if self._control in ready and not self._control.recv(64):
                self._end()
                shutil.rmtree(self._config["folder"], ignore_errors=True)
                return
            if ready:
                break
            reason = self._excess()
        self._end()
        answer = {"status": self._child.returncode, "reason": reason}
        try:
            self._control.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            pass
        self._wait_for_owner()

    def _wait_for_owner(self) -> None:
        """The directory is the owner's to remove, unless it dies before it says so."""
        try:
            said = self._control.recv(64)
        except OSError:
            said = b""
        if not said:
            shutil.rmtree(self._config["folder"], ignore_errors=True)

    def _excess(self) -> str:
        """What is used beyond its limit."""
        below = descendants()
        if sum(below.values()) > self._config["memory"]:
            return "memory"
        if len(below) > self._config["pids"]:
            return "processes"
        self._looks += 1
        if self._looks % _DISK_EVERY == 0 and used_bytes(self._config["work"]) > self._disk:
            return "disk"
        return ""

    def _end(self) -> None:
        """Kills until nothing is left below this process.

        Parents first: a shell must not see its children end, nor tell of it.
        """
        while below := descendants():
            for pid in below:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self._reap()
            time.sleep(0.005)

    def _reap(self) -> None:
        self._child.poll()
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child.pid:
                self._child.returncode = os.waitstatus_to_exitcode(status)


def _start(config: dict[str, Any]) -> subprocess.Popen[bytes]:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def prepare() -> None:
        for name, value in (("FSIZE", config["file_size"]), ("NOFILE", 1024), ("CORE", 0)):
            number = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)  # a background job's are ignored, and our SIGHUP is
        if config["tty"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    return subprocess.Popen(config["command"], start_new_session=True, preexec_fn=prepare)


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Supervisor(json.loads(sys.argv[1])).serve()


if __name__ == "__main__":
    main()
