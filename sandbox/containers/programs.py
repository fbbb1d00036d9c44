"""Programs that run in a container beside the held shell, as the sandbox's own user."""

import asyncio
import errno
import posixpath
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sandbox.base import Image, SandboxError
from sandbox.containers.engine import Engine
from sandbox.containers.settings import SHELL, exec_options
from sandbox.containers.streams import FramedStream, RawStream, StreamTerminal, attach

if TYPE_CHECKING:
    from docker import APIClient

_TIMEOUT = 20.0  # seconds for one file
# $1 file, $2 number of bytes. Codes of their own say what a path is; the rest is cat's or head's.
_FAULTS = """
[ -d "$1" ] && exit 121
[ -e "$1" ] && [ ! -f "$1" ] && exit 122
"""
_READ = _FAULTS + '[ -e "$1" ] || exit 102; exec head -c "$2" "$1"'
_WRITE = _FAULTS + 'mkdir -p "$3" && head -c "$2" > "$1"'
_CODES = {
    102: (errno.ENOENT, "No such file or directory"),
    121: (errno.EISDIR, "Is a directory"),
    122: (errno.EINVAL, "expected a regular file"),
}
# The number of the session, which `_END` ends with everything in it. It waits for a line before, because
# output that comes earlier than the engine attaches to it may be lost.
_TERMINAL = """read -r _; echo session $$ begins
command -v bash >/dev/null && exec bash --noprofile --norc -i; exec sh -i"""
_END = """for f in /proc/[0-9]*/stat; do
read -r line < "$f" || continue
pid=${line%% *}; set -- "$1" ${line##*) }
[ "$5" = "$1" ] && kill -9 "$pid"
done 2>/dev/null"""


class Programs:
    """Starts programs in one container."""

    def __init__(self, engine: Engine, container: str, image: Image) -> None:
        self._engine, self._container, self._image = engine, container, image

    async def launch(self, command: Sequence[str], *, tty: bool = False) -> tuple[str, socket.socket]:
        """Starts a program; its id and its streams, which the caller closes."""
        starting = asyncio.ensure_future(self._engine.run(lambda client: self._launch(client, command, tty)))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if starting.exception() is None:
                starting.result()[1].close()
            raise

    async def read(self, path: str, limit: int) -> bytes:
        """Content of a regular file. Raises `OSError`, also when it is larger than `limit` bytes."""
        code, output = await self._converse([_READ, self._absolute(path), str(limit + 1)], b"")
        _check(code, output, path)
        if len(output) > limit:
            raise OSError(f"{path}: expected at most {limit} bytes, got more")
        return output

    async def write(self, path: str, content: bytes, limit: int) -> None:
        """Creates or replaces a regular file and its parents. Raises `OSError`."""
        if len(content) > limit:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        place = self._absolute(path)
        command = [_WRITE, place, str(len(content)), posixpath.dirname(place)]
        _check(*await self._converse(command, content), path)

    async def terminal(self) -> StreamTerminal:
        """A shell on a pseudo terminal."""
        _, connection = await self.launch([SHELL, "-c", _TERMINAL], tty=True)
        with connection:
            stream = RawStream(connection)
        try:
            async with asyncio.timeout(_TIMEOUT):
                number = await _session(stream)
        except BaseException as error:
            stream.close()
            if isinstance(error, TimeoutError):
                raise SandboxError("the sandbox gave no terminal") from None
            raise

        async def end() -> None:
            with suppress(SandboxError, OSError):  # the sandbox ended, and all with it
                await self._converse([_END, number], b"")

        return StreamTerminal(stream, end)

    async def _converse(self, arguments: Sequence[str], content: bytes) -> tuple[int, bytes]:
        """Runs a script with `content` on its standard input; exit code and output."""
        script, *rest = arguments
        identity, connection = await self.launch([SHELL, "-c", script, SHELL, *rest])
        with connection:
            stream = FramedStream(connection)
        try:
            async with asyncio.timeout(_TIMEOUT):
                output = await _exchange(stream, content)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"no answer within {_TIMEOUT:.0f} seconds") from None
        finally:
            stream.close()
        state = await self._engine.run(lambda client: client.exec_inspect(identity))
        return state["ExitCode"], output

    def _launch(self, client: "APIClient", command: Sequence[str], tty: bool) -> tuple[str, socket.socket]:
        options: dict[str, Any] = exec_options(self._image)
        made = client.exec_create(self._container, list(command), stdin=True, tty=tty, **options)["Id"]
        return made, attach(self._engine.address, made, tty=tty)

    def _absolute(self, path: str) -> str:
        return posixpath.join(self._image.workdir, path)


async def _session(stream: RawStream) -> str:
    """Number of the session on a new terminal."""
    await stream.write(b"\n")
    said = b""
    while not (match := re.search(rb"session (\d+) begins\r?\n", said)):
        if not (chunk := await stream.read()):
            raise SandboxError(f"the sandbox gave no terminal: {said.decode(errors='replace').strip()}")
        said += chunk
    return match[1].decode()


async def _exchange(stream: FramedStream, content: bytes) -> bytes:
    """Sends `content` while reading to the end; a program that ends early leaves some of it unread."""
    sending = asyncio.ensure_future(stream.write(content))
    output = bytearray()
    try:
        while chunk := await stream.read():
            output += chunk
        return bytes(output)
    finally:
        sending.cancel()
        with suppress(asyncio.CancelledError, SandboxError):
            await sending


def _check(code: int, output: bytes, path: str) -> None:
    if code in _CODES:
        number, words = _CODES[code]
        raise OSError(number, words, path)
    if code != 0:
        words = output.decode(errors="replace").strip()[-300:]
        number = errno.ENOSPC if "space left" in words else errno.EACCES
        raise OSError(number, words or f"exit code {code}", path)
