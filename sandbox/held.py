"""What backends share whose sandbox is one held shell that is rebuilt around its files when it is lost."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from sandbox.base import Diff, ExecResult, Limits, SandboxError
from sandbox.living import Living
from sandbox.shell import Finished, Shell

_OOM_TIMEOUT = 5.0  # seconds; asking takes less than a millisecond


class HeldSandbox(ABC):
    """One sandbox: a shell, its working copy, and the order in which they are used.

    Methods with a leading underscore that raise `NotImplementedError` nowhere are the engine's part:
    `_begin`, `_replace`, `_kill`, `_remove`, `_put`, `_get`, `_set`, `_diff`.
    """

    def __init__(self, limits: Limits, living: Living[Any]) -> None:
        self._limits, self._living = limits, living
        self._lock = asyncio.Lock()
        self._shell: Shell | None = None
        self._usable = False  # the shell waits for a command
        self._repair: asyncio.Task[int] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @abstractmethod
    async def _begin(self, files: Mapping[str, bytes]) -> Shell:
        """Starts everything with `files` in the working copy; returns the shell."""

    @abstractmethod
    async def _replace(self) -> tuple[Shell, int]:
        """Ends every process and starts anew around the same files; also the old shell's exit status."""

    @abstractmethod
    async def _kill(self) -> None:
        """Ends every process of the sandbox, so that whoever reads from it wakes up. Never raises."""

    @abstractmethod
    async def _remove(self) -> None:
        """Ends everything and removes every trace."""

    @abstractmethod
    async def _put(self, files: Mapping[str, bytes]) -> None:
        """Writes `files`; `_diff` will not count them as changes."""

    @abstractmethod
    async def _get(self, path: str) -> bytes:
        """See `Sandbox.read`."""

    @abstractmethod
    async def _set(self, path: str, content: bytes) -> None:
        """See `Sandbox.write`."""

    @abstractmethod
    async def _diff(self) -> Diff:
        """See `Sandbox.diff`."""

    @abstractmethod
    async def _ran_out_of_memory(self, shell: Shell | None) -> bool:
        """Whether a process was killed for memory since the last question. `shell`: if it is usable."""

    async def start(self, files: Mapping[str, bytes]) -> None:
        """Starts the sandbox with `files`; completes or undoes itself if the caller is cancelled."""
        starting = asyncio.ensure_future(self._begin(files))
        try:
            self._shell = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            starting.exception()  # looked at: what was begun is removed by the caller
            raise
        self._usable = True
        self._alarm = asyncio.get_running_loop().call_later(self._limits.wall, self._expire)

    async def adopt(self, files: Mapping[str, bytes]) -> None:
        """See `Sandbox.adopt`."""
        async with self._lock:
            await self._settle()
            await self._put(files)

    async def exec(self, command: str, timeout: float) -> ExecResult:
        """See `Sandbox.exec`. `exit N` ends the shell: its state is lost, the files are kept."""
        async with self._lock:
            await self._settle()
            if not self._usable:  # an earlier command was cancelled in the middle
                await self._rebuild()
            try:
                finished = await self._run(command, timeout)
            except SandboxError:  # the shell ended while nobody waited for it, say for want of memory
                await self._rebuild()
                finished = await self._run(command, timeout)
            return await self._result(finished)

    async def read(self, path: str) -> bytes:
        """See `Sandbox.read`. Raises `OSError` for what is no regular file, or is too large."""
        await self._settle()
        return await self._get(_checked(path))

    async def write(self, path: str, content: bytes) -> None:
        """See `Sandbox.write`. Raises `OSError`, for example when the disk limit is reached."""
        async with self._lock:
            await self._settle()
            await self._set(_checked(path), content)

    async def diff(self) -> Diff:
        """See `Sandbox.diff`."""
        async with self._lock:
            await self._settle()
            return await self._diff()

    async def destroy(self) -> None:
        """See `Sandbox.destroy`. Completes even if the caller is cancelled."""
        self._expire()
        assert self._ending is not None
        await asyncio.shield(self._ending)

    async def _run(self, command: str, timeout: float) -> Finished:
        assert self._shell is not None
        self._usable = False
        finished = await self._shell.run(command, timeout, limit=self._limits.output)
        self._usable = finished.exit_code is not None
        return finished

    async def _result(self, finished: Finished) -> ExecResult:
        self._alive()
        code, oom = finished.exit_code, False
        if code != 0:
            oom = await self._ran_out_of_memory(self._shell if self._usable else None)
        if code is None:
            code = await self._rebuild()
        if finished.timed_out:
            code = -1
        return ExecResult(exit_code=code, output=finished.output, timed_out=finished.timed_out, oom=oom)

    async def _rebuild(self) -> int:
        """Replaces what runs. A cancelled caller leaves it going: the next one waits for it."""
        self._alive()
        if self._repair is None:
            self._usable = False
            self._repair = asyncio.ensure_future(self._replaced())
        try:
            return await asyncio.shield(self._repair)
        finally:
            if self._repair is not None and self._repair.done():
                self._repair = None

    async def _replaced(self) -> int:
        self._shell, status = await self._replace()
        self._usable = True
        return status

    async def _settle(self) -> None:
        """Until no rebuild is going on. Raises `SandboxError` if the sandbox is gone."""
        self._alive()
        if self._repair is not None:
            await self._rebuild()

    def _alive(self) -> None:
        if self._ending is not None:
            raise SandboxError("the sandbox was destroyed; create a new one")

    def _expire(self) -> None:
        self._ending = self._ending or asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        try:
            await self._kill()
            async with self._lock:  # the end of its output has woken whoever still reads
                if self._repair is not None:
                    await asyncio.wait([self._repair])
                    self._repair.exception()
                await self._remove()
        finally:
            self._living.forget(self)

    async def _count(self, shell: Shell, script: str) -> int:
        """Sum of the numbers that `script` prints in the held shell."""
        self._usable = False
        answer = await shell.run(script, _OOM_TIMEOUT, limit=4096)
        self._usable = answer.exit_code is not None
        return sum(int(word) for word in answer.output.split() if word.isdigit())


def _checked(path: str) -> str:
    if not path or "\0" in path:
        raise FileNotFoundError(2, "No such file or directory", path)
    return path
