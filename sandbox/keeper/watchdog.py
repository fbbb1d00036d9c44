"""Memory limits without control groups: the keeper looks at every sandbox's processes now and then.

What a look cannot see must not be had: system call filters refuse memory that is not some process's own,
except files, whose file systems are limited in size. So a look adds up what processes have for themselves,
and the sockets between them, whose buffers no process shows.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache

from sandbox.keeper.box import Box
from sandbox.keeper.terminal import descendants

PERIOD = 0.1  # seconds
FILTERS = {"usual": "watched", "strict": "strict"}  # by the name of the filter with control groups
# A shared mapping of /dev/zero is memory that outlives all but one page of it. This reads the same.
DEVICES = ("--dev-bind", "/dev/full", "/dev/zero")
_MAX_SHARE = 0.1  # of a core that looking may take
_FREE_SOCKETS = 64
_OWN = (b"RssAnon", b"VmSwap", b"VmPTE")


class Watchdog:
    """Kills the largest process of a sandbox whose processes need more memory than its limit.

    `check` is called all along a look, and may end it by raising.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check_owner = check
        self._next = 0.0

    def look(self, boxes: Iterable[Box]) -> None:
        """Looks at all of them, unless the last look was too recent for its cost."""
        started = time.monotonic()
        if started < self._next:
            return
        tops = {id(box): (box, [box.first, *box.terminals]) for box in boxes if box.running and box.first}
        below = descendants([pid for _, pids in tops.values() for pid in pids], self._check_owner)
        for box, pids in tops.values():
            self._check(box, [pid for top in pids for pid in (top, *below[top])])
        ended = time.monotonic()
        self._next = ended + max(PERIOD, (ended - started) / _MAX_SHARE)

    def _check(self, box: Box, pids: Sequence[int]) -> None:
        used: dict[int, int] = {}
        for pid in pids:
            self._check_owner()
            used[pid] = memory_of(pid)
        if sum(used.values()) + (0 if box.network else socket_memory(box.first)) > box.memory:
            with suppress(ProcessLookupError):
                os.kill(max(used, key=used.__getitem__), signal.SIGKILL)
                box.count_kill()


def memory_of(pid: int) -> int:
    """Bytes that a process has for itself, also in swap, with its page tables; 0 if it has ended."""
    total = 0
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            name, _, rest = line.partition(b":")
            if name in _OWN:
                total += int(rest.split()[0]) << 10
    return total


def socket_memory(pid: int) -> int:
    """Bytes that the sockets in the network namespace of a process may hold, few of them for free."""
    with suppress(OSError), open(f"/proc/{pid}/net/sockstat", "rb") as file:
        return max(int(file.readline().split()[2]) - _FREE_SOCKETS, 0) * _socket_size()
    return 0


@cache
def _socket_size() -> int:
    """Bytes that one socket may hold for its reader: the kernel doubles what is asked for."""
    with open("/proc/sys/net/core/wmem_max") as file:
        return 2 * int(file.read())
