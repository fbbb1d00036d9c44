"""The owner's end of a pseudo terminal inside a namespace sandbox."""

import asyncio
import os
from contextlib import suppress

from sandbox.base import SandboxError
from sandbox.launched import Launched
from sandbox.pipes import ready

_CHUNK = 1 << 16
_STUCK = 10.0  # seconds; a program that does not read for so long never will
_ENDED = "the terminal ended: its shell, or its sandbox, is gone; open a new one"


class NamespaceTerminal:
    """See `Terminal`. It also ends when a command that ran out of time has its sandbox rebuilt."""

    def __init__(self, master: int, pid: int, launched: Launched) -> None:
        self._master, self._pid, self._launched = master, pid, launched
        os.set_blocking(master, False)

    async def send(self, data: bytes) -> None:
        """See `Terminal.send`. Also raises if nothing reads what was typed."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._open(), view) :]
            except BlockingIOError:
                await self._until_ready(_STUCK, write=True)
            except OSError as error:
                raise SandboxError(_ENDED) from error

    async def receive(self, timeout: float) -> bytes:
        """See `Terminal.receive`."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                if data := os.read(self._open(), _CHUNK):
                    return data
                raise SandboxError(_ENDED)
            except BlockingIOError:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or not await self._until_ready(left):
                    return b""
            except OSError as error:
                raise SandboxError(_ENDED) from error

    async def close(self) -> None:
        """See `Terminal.close`."""
        pid, self._pid = self._pid, 0
        if pid:
            with suppress(SandboxError):
                await self._launched.request("hangup", pid=pid)  # which wakes whoever still reads
        self.abandon()

    def abandon(self) -> None:
        """Closes the owner's end. Idempotent."""
        master, self._master = self._master, -1
        if master >= 0:
            os.close(master)

    def _open(self) -> int:
        if self._master < 0:
            raise SandboxError(_ENDED)
        return self._master

    async def _until_ready(self, timeout: float, *, write: bool = False) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await ready(self._open(), write=write)
        except TimeoutError as error:
            if write:
                raise SandboxError("the program on the terminal does not read what is typed") from error
            return False
        return True
