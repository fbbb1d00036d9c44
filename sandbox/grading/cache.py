"""Verdicts by (task, diff): equal patches of one task are graded once."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from sandbox.grading.verdict import Verdict

_LASTING = ("resolved", "unresolved", "tampering")
Key = tuple[str, str]  # instance id, digest of the diff


class VerdictCache:
    """What was graded, and what is being graded. `hits` and `misses` count answered and new gradings."""

    def __init__(self) -> None:
        self.hits = self.misses = 0
        self._verdicts: dict[Key, Verdict] = {}
        self._running: dict[Key, asyncio.Task[Verdict]] = {}

    async def get(self, key: Key, make: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """The verdict of `key`, made by `make` unless it is known. Faults and timeouts are not kept."""
        if key in self._verdicts:
            self.hits += 1
            return dataclasses.replace(self._verdicts[key], cached=True, seconds=0.0)
        if shared := key in self._running:
            self.hits += 1
        else:
            self.misses += 1
            running = self._running[key] = asyncio.ensure_future(make())
            running.add_done_callback(lambda _: self._running.pop(key))
        # Shielded: one caller's cancellation must not take the verdict from the others.
        verdict = await asyncio.shield(self._running[key])
        if verdict.status in _LASTING and "timed out" not in verdict.detail:
            self._verdicts[key] = dataclasses.replace(verdict, cached=False)
        return dataclasses.replace(verdict, cached=shared)

    async def cancel(self) -> None:
        """Cancels the gradings that still run."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Cached:
    """What graders with a cache have in common."""

    def __init__(self) -> None:
        self._cache = VerdictCache()

    @property
    def hits(self) -> int:
        """Gradings that the cache answered."""
        return self._cache.hits

    @property
    def misses(self) -> int:
        """Gradings that ran."""
        return self._cache.misses
