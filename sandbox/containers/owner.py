"""Whose containers are whose: a label that tells whether the owner still lives, and its sentinel."""

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

LABEL = "jaxrl.sandbox.owner"
_SCRIPT = Path(__file__).with_name("sentinel.py")


def new_owner() -> str:
    """A label value for this process: host, pid namespace, process id, start time, a random part."""
    pid = os.getpid()
    return ":".join([_place(), str(pid), str(_start_time(pid)), secrets.token_hex(6)])


def is_dead(owner: str) -> bool:
    """Whether an owner is known to have ended. One of another host or pid namespace is never."""
    parts = owner.rsplit(":", 3)
    if len(parts) != 4 or parts[0] != _place() or not parts[1].isdigit():
        return False
    return str(_start_time(int(parts[1]))) != parts[2]


def _place() -> str:
    return f"{socket.gethostname()}:{os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> int:
    """Clock ticks since boot; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


class Sentinel:
    """The process that removes this owner's containers when the owner dies."""

    def __init__(self, address: str, owner: str) -> None:
        command = [sys.executable, "-I", "-S", "-B", str(_SCRIPT), address, f"{LABEL}={owner}"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"LC_ALL": "C.UTF-8", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
            cwd=os.sep,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """All is removed: it ends without doing anything."""
        try:
            self._process.communicate(b".", timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
