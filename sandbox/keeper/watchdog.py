"""Memory limits without control groups: the keeper looks at every sandbox's processes now and then."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from sandbox.keeper.box import Box
from sandbox.keeper.terminal import descendants

PERIOD = 0.1  # seconds
_MAX_SHARE = 0.1  # of a core that looking may take


class Watchdog:
    """Kills the largest process of a sandbox whose processes need more memory than its limit."""

    def __init__(self) -> None:
        self._next = 0.0

    def look(self, boxes: Iterable[Box]) -> None:
        """Looks at all of them, unless the last look was too recent for its cost."""
        started = time.monotonic()
        if started < self._next:
            return
        running = [box for box in boxes if box.running and box.first]
        below = descendants([box.first for box in running])
        for box in running:
            self._check(box, [box.first, *below[box.first]])
        ended = time.monotonic()
        self._next = ended + max(PERIOD, (ended - started) / _MAX_SHARE)

    def _check(self, box: Box, pids: list[int]) -> None:
        used = {pid: memory_of(pid) for pid in pids}
        own, shared = (sum(sizes) for sizes in zip(*used.values(), strict=True))
        # Who shares which pages takes longer to tell, and matters only if counting them often is too much.
        if own + shared > box.memory and own + sum(map(shared_part, pids)) > box.memory:
            largest = max(used, key=lambda pid: sum(used[pid]))
            with suppress(ProcessLookupError):
                os.kill(largest, signal.SIGKILL)
                box.count_kill()


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of a process: of its own, and shared with others; zeros if it has ended."""
    sizes = {b"RssAnon:": 0, b"RssShmem:": 0}
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            name, _, rest = line.partition(b"\t")
            if name in sizes:
                sizes[name] = int(rest.split()[0]) << 10
    return sizes[b"RssAnon:"], sizes[b"RssShmem:"]


def shared_part(pid: int) -> int:
    """Bytes of memory shared with others, divided by their number; 0 if the process has ended."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            name, _, rest = line.partition(b":")
            if name == b"Pss_Shmem":
                return int(rest.split()[0]) << 10
    return 0
