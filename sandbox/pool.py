"""A bounded number of sandboxes at a time, some of them started ahead."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from sandbox.base import Limits, Sandbox, SandboxError, SandboxProvider


class Adoptable(Sandbox, Protocol):
    """A sandbox that can get its first files after its start."""

    async def adopt(self, files: Mapping[str, bytes]) -> None: ...


class SandboxPool:
    """Leases sandboxes: at most `size` at once, further leases wait.

    With `warm` > 0, that many sandboxes are started without files ahead of their lease, so that a
    lease only writes files. The provider's sandboxes then must be `Adoptable`.
    """

    def __init__(
        self, provider: SandboxProvider, *, size: int, warm: int = 0, limits: Limits | None = None
    ) -> None:
        if size < 1 or not 0 <= warm <= size:
            raise ValueError(f"expected size >= 1 and 0 <= warm <= size, got size {size}, warm {warm}")
        self._provider, self._limits, self._warm = provider, limits or Limits(), warm
        self._free = asyncio.Semaphore(size)
        self._ready: deque[asyncio.Task[Sandbox]] = deque()
        self._leased: set[Sandbox] = set()
        self._closed = False

    async def start(self) -> None:
        """Starts the warm sandboxes. Raises `SandboxError` if they cannot start."""
        self._refill()
        await asyncio.gather(*self._ready)

    @asynccontextmanager
    async def lease(self, files: Mapping[str, bytes]) -> AsyncIterator[Sandbox]:
        """A fresh sandbox holding `files`; it is destroyed when the block ends, however it ends."""
        async with self._free:
            if self._closed:
                raise SandboxError("the sandbox pool is closed")
            sandbox = await self._obtain(files)
            self._leased.add(sandbox)
            try:
                yield sandbox
            finally:
                self._leased.discard(sandbox)
                await sandbox.destroy()

    async def close(self) -> None:
        """Destroys every sandbox, leased ones too, and the provider's."""
        self._closed = True
        for started in self._ready:
            started.cancel()
        await asyncio.gather(*self._ready, return_exceptions=True)
        await asyncio.gather(*(sandbox.destroy() for sandbox in list(self._leased)))
        await self._provider.close()

    async def _obtain(self, files: Mapping[str, bytes]) -> Sandbox:
        if not self._ready:
            return await self._provider.create(files, self._limits)
        started = self._ready.popleft()
        self._refill()
        sandbox: Adoptable = await started  # type: ignore[assignment]
        try:
            await sandbox.adopt(files)
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    def _refill(self) -> None:
        while len(self._ready) < self._warm and not self._closed:
            self._ready.append(asyncio.ensure_future(self._provider.create({}, self._limits)))
