"""Both ends of a conversation with a program in a sandbox, over pipes, without blocking the loop."""

import asyncio
import os

from sandbox.base import SandboxError

_CHUNK = 1 << 16


class Pipes:
    """Write end of the program's stdin and read end of its output (both owned; -1: closed)."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdin, self._stdout = stdin, stdout
        for fd in (stdin, stdout):
            if fd >= 0:
                os.set_blocking(fd, False)

    async def write(self, data: bytes) -> None:
        """Sends all of `data`. Raises `SandboxError` if the program is gone."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                await ready(self._stdin, write=True)
            except OSError as error:
                raise SandboxError(f"the program in the sandbox is gone: {error}") from error

    async def read(self) -> bytes:
        """Next output, b"" after its end."""
        while True:
            try:
                return os.read(self._stdout, _CHUNK)
            except BlockingIOError:
                await ready(self._stdout)
            except OSError as error:
                raise SandboxError(f"the sandbox was destroyed: {error}") from error

    def close(self) -> None:
        """Closes both ends. Idempotent."""
        for fd in (self._stdin, self._stdout):
            if fd >= 0:
                os.close(fd)
        self._stdin = self._stdout = -1


async def ready(fd: int, *, write: bool = False) -> None:
    """Waits until `fd` can be read or written."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    add(fd, lambda: future.done() or future.set_result(None))
    try:
        await future
    finally:
        remove(fd)
