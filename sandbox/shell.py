"""A persistent shell at the other end of two pipes: one command in, its output and exit code out."""

import asyncio
import re
import secrets
import shlex
from contextlib import suppress
from dataclasses import dataclass

from sandbox.base import SandboxError
from sandbox.pipes import Pipes

# Descriptor 9 keeps the way out, so that a command that redirects the shell's own output does not
# hide its end from us. `command` keeps a syntax error from ending the shell.
_SETUP = b"exec 9>&1\n"
_RUN = "command eval {command} </dev/null >&9 2>&9\nprintf '\\n%s:%d:' {nonce} $? >&9\n"


class Capture:
    """Output of one command: at most `limit` bytes, the first and the last half of them."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head, self._tail, self._dropped = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        """Takes more output; forgets the middle."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._half:
            self._trim()

    def text(self) -> str:
        """What was kept, decoded as UTF-8 with replacement."""
        self._trim()
        gap = f"\n[{self._dropped} bytes left out]\n".encode() if self._dropped else b""
        return (bytes(self._head) + gap + bytes(self._tail)).decode(errors="replace")

    def _trim(self) -> None:
        extra = max(len(self._tail) - self._half, 0)
        self._dropped += extra
        del self._tail[:extra]


@dataclass(frozen=True)
class Finished:
    """How a command ended: `exit_code` None means that the shell did not come back."""

    output: str
    exit_code: int | None
    timed_out: bool = False


class Shell:
    """The shell of one sandbox; one command at a time."""

    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes

    async def start(self, timeout: float) -> Finished:
        """Waits until the shell answers. Without an exit code it ended instead, and said `output`."""
        try:
            await self._pipes.write(_SETUP)
            return await self.run(":", timeout, limit=4096)
        except SandboxError as error:
            if not isinstance(error.__cause__, BrokenPipeError):
                raise
            return await self._last_words(timeout)  # it was gone before it could be asked

    async def _last_words(self, timeout: float) -> Finished:
        capture = Capture(4096)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while chunk := await self._pipes.read():
                    capture.add(chunk)
        return Finished(capture.text(), None)

    async def run(self, command: str, timeout: float, *, limit: int) -> Finished:
        """Runs `command` for at most `timeout` seconds, keeping `limit` bytes of output.

        After a result without exit code the shell is lost. Raises `SandboxError` if it was before.
        """
        nonce, capture = secrets.token_hex(8), Capture(limit)
        script = _RUN.format(command=shlex.quote(command), nonce=nonce)
        try:
            async with asyncio.timeout(timeout):
                await self._pipes.write(script.encode(errors="surrogateescape"))
                code = await self._until(re.compile(rb"\n%s:(\d+):" % nonce.encode()), capture)
        except TimeoutError:
            return Finished(capture.text(), None, timed_out=True)
        return Finished(capture.text(), code)

    async def _until(self, mark: re.Pattern[bytes], capture: Capture) -> int | None:
        """Moves output into `capture` up to `mark`; its exit code, or None at the end of output."""
        held = b""
        try:
            while chunk := await self._pipes.read():
                held += chunk
                if match := mark.search(held):
                    held = held[: match.start()]
                    return int(match[1])
                # The mark may be split between two reads.
                capture.add(held[:-64])
                held = held[-64:]
            return None
        finally:
            capture.add(held)
