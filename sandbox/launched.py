"""A program running as the first process of a namespace sandbox, and how its start can fail."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sandbox.base import SandboxError
from sandbox.keeper.client import KeeperClient
from sandbox.pipes import Pipes

_T = TypeVar("_T")
_WORDS_TIMEOUT = 2.0  # seconds for what a program that failed to start has to say


@dataclass
class Launched:
    """A program running as the first process of a sandbox."""

    keeper: KeeperClient
    identity: int
    header: dict[str, Any]  # the request that starts it
    pipes: Pipes
    release: Callable[[], Awaitable[None]]
    environment: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0
    limits_by: str = ""
    _counter: int = field(default=-1, init=False)
    _kills: int = field(default=0, init=False)
    released: bool = field(default=False, init=False)

    async def request(self, op: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Asks the keeper to do something with this sandbox."""
        return await self.keeper.call({"op": op, "sandbox": self.identity, **fields}, payload=payload)

    async def spawn(self, payload: bytes = b"") -> None:
        """Starts the program: the first time with the files of `payload`, then around the same files.

        Raises `SandboxError`, with what the program said, or `OSError`.
        """
        theirs_in, ours_in, ours_out, theirs_out = _two_pipes()
        self.pipes.close()
        self.pipes = Pipes(ours_in, ours_out)
        try:
            answer, _ = await self.keeper.call(self.header, payload=payload, fds=(theirs_in, theirs_out))
        except SandboxError as error:
            os.close(theirs_out)
            theirs_out = -1
            raise SandboxError(await self._last_words() or str(error)) from error
        finally:
            os.close(theirs_in)
            if theirs_out >= 0:
                os.close(theirs_out)
        self.pid, self.limits_by = answer["pid"], answer["limits_by"]
        self._close_counter()
        self._counter = answer["fd"]

    def oom(self) -> bool:
        """Whether processes were killed for memory since this was asked before."""
        if self._counter < 0:
            return False
        found = re.search(rb"^oom_kill (\d+)", os.pread(self._counter, 4096, 0), re.MULTILINE)
        before, self._kills = self._kills, int(found[1]) if found else 0
        return self._kills > before

    async def kill(self) -> int | None:
        """Ends every process; the working copy stays readable. Returns the exit status."""
        return (await self.request("kill"))[0]["status"]

    async def destroy(self) -> None:
        """Ends every process and forgets the sandbox. Idempotent; the pipes stay open."""
        self._close_counter()
        await self.request("destroy")
        if not self.released:
            self.released = True
            await self.release()

    def _close_counter(self) -> None:
        fd, self._counter = self._counter, -1
        if fd >= 0:
            os.close(fd)

    async def _last_words(self) -> str:
        with suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_WORDS_TIMEOUT):
                return (await self.pipes.read()).decode(errors="replace").strip()
        return ""


def no_pipes() -> Pipes:
    """What a program has that was not started yet."""
    return Pipes(-1, -1)


def _two_pipes() -> tuple[int, int, int, int]:
    """(read, write, read, write). Raises `SandboxError` where the process has no descriptors left."""
    made: list[int] = []
    try:
        for _ in range(2):
            made += os.pipe()
    except OSError as error:
        for fd in made:
            os.close(fd)
        raise SandboxError(f"no pipe to a sandbox: {error}; raise the limit of open files") from error
    return made[0], made[1], made[2], made[3]


async def whole(work: Awaitable[_T]) -> _T:  # noqa: UP047 (syntax of newer interpreters only)
    """Awaits `work` to its end even if the caller is cancelled meanwhile, and cancels the caller then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # so that nobody is told that it was never retrieved
        raise
