"""A bounded number of sandboxes at a time, some started ahead, from a backend whose health is watched."""

import asyncio
import errno
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sandbox.base import HOST, Image, Limits, Sandbox, SandboxError, SandboxProvider

# What a machine says that has no more to give just now, but will have when other sandboxes end.
_BUSY_NUMBERS = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EBUSY}
_BUSY_WORDS = ("too many open files", "resource temporarily unavailable", "cannot allocate memory")


@runtime_checkable
class Reaping(Protocol):
    """A provider whose sandboxes can outlive a killed owner and its sentinel."""

    async def reap(self) -> int:
        """Removes what dead owners left; how many sandboxes."""
        ...


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How a pool meets trouble. Times in seconds.

    A start that fails because the machine is full is tried again for `busy`. After `failures` other
    failures in a row the backend is left alone for `pause`, twice as long each time, at most `longest`.
    """

    busy: float = 60.0
    failures: int = 3
    pause: float = 1.0
    longest: float = 60.0


@dataclass(kw_only=True)
class Health:
    """What happened to the starts of one backend since the pool was made."""

    started: int = 0
    failed: int = 0  # starts that raised
    in_a_row: int = 0  # failures since the last success
    pauses: int = 0
    paused_until: float = 0.0  # of time.monotonic()
    busy: int = 0  # tries that met a full machine
    reaped: int = 0  # sandboxes that dead owners had left
    last_error: str = ""


class SandboxPool:
    """Leases sandboxes: at most `size` at once, further leases wait.

    With `warm` > 0, that many sandboxes of `image` are started without files ahead of their lease, so
    that a lease of that image only writes files. `report` is told when the backend is paused.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        *,
        size: int,
        warm: int = 0,
        limits: Limits | None = None,
        image: Image = HOST,
        patience: Patience | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        if size < 1 or not 0 <= warm <= size:
            raise ValueError(f"expected size >= 1 and 0 <= warm <= size, got size {size}, warm {warm}")
        self._provider, self._limits, self._warm, self._image = provider, limits or Limits(), warm, image
        self._patience, self._report = patience or Patience(), report or (lambda _: None)
        self._free = asyncio.Semaphore(size)
        self._ready: deque[asyncio.Task[Sandbox]] = deque()
        self._leased: set[Sandbox] = set()
        self._closed = False
        self.health = Health()

    async def start(self) -> None:
        """Removes what dead owners left and starts the warm sandboxes. Raises `SandboxError`."""
        if isinstance(self._provider, Reaping):
            self.health.reaped += await self._provider.reap()
        self._refill()
        await asyncio.gather(*self._ready)

    @asynccontextmanager
    async def lease(
        self, files: Mapping[str, bytes], *, image: Image | None = None, limits: Limits | None = None
    ) -> AsyncIterator[Sandbox]:
        """A fresh sandbox holding `files`; it is destroyed when the block ends, however it ends.

        Image and limits are the pool's unless given. Raises `SandboxError` if none can be started.
        """
        async with self._free:
            self._check_open()
            sandbox = await self._obtain(files, image or self._image, limits or self._limits)
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

    async def _obtain(self, files: Mapping[str, bytes], image: Image, limits: Limits) -> Sandbox:
        if self._ready and image == self._image and limits == self._limits:
            started = self._ready.popleft()
            self._refill()
            with suppress(SandboxError):  # it failed, or its time ran out while it waited
                return await _adopted(await started, files)
        return await self._create(files, image, limits)

    def _refill(self) -> None:
        while len(self._ready) < self._warm and not self._closed:
            self._ready.append(asyncio.ensure_future(self._create({}, self._image, self._limits)))

    async def _create(self, files: Mapping[str, bytes], image: Image, limits: Limits) -> Sandbox:
        """Starts a sandbox, when the backend is not paused and as soon as the machine has room."""
        deadline, wait = time.monotonic() + self._patience.busy, 0.05
        while True:
            await self._until_unpaused()
            try:
                sandbox = await self._provider.create(files, limits, image=image)
            except SandboxError as error:
                if not is_busy(error):
                    self._failed(error)
                    raise
                self.health.busy += 1
                if time.monotonic() + wait > deadline:
                    raise SandboxError(
                        f"the machine had no room for a sandbox for {self._patience.busy:.0f} s; "
                        f"lower the number of sandboxes at a time, or raise its limits: {error}"
                    ) from error
            else:
                self.health.started += 1
                self.health.in_a_row = 0
                return sandbox
            await asyncio.sleep(wait)
            wait = min(2 * wait, 2.0)

    def _failed(self, error: SandboxError) -> None:
        health, patience = self.health, self._patience
        health.failed += 1
        health.in_a_row += 1
        health.last_error = str(error)
        beyond = health.in_a_row - patience.failures
        if beyond >= 0 and time.monotonic() >= health.paused_until:
            pause = min(patience.pause * 2 ** min(beyond, 30), patience.longest)
            health.paused_until = time.monotonic() + pause
            health.pauses += 1
            self._report(
                f"{health.in_a_row} starts in a row failed; the next try is in {pause:.0f} s: {error}"
            )

    async def _until_unpaused(self) -> None:
        while (left := self.health.paused_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.5))
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox pool is closed")


def is_busy(error: BaseException) -> bool:
    """Whether a start failed for want of what other sandboxes will give back."""
    for link in _causes(error):
        if isinstance(link, OSError) and link.errno in _BUSY_NUMBERS:
            return True
    return any(words in str(error).lower() for words in _BUSY_WORDS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


async def _adopted(sandbox: Sandbox, files: Mapping[str, bytes]) -> Sandbox:
    try:
        await sandbox.adopt(files)
    except BaseException:
        await sandbox.destroy()
        raise
    return sandbox
