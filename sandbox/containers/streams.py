"""The attached streams of a process in a container, without blocking the loop."""

import asyncio
import json
import os
import socket
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sandbox.base import SandboxError
from sandbox.pipes import Pipes

_CONNECT_TIMEOUT = 60.0  # seconds
_PORT = 2375  # Docker's own choice
_API = "v1.40"
_HEADER = 8  # bytes: stream number, three zeros, big-endian length


class RawStream(Pipes):
    """Both directions over one socket of which this object owns duplicates."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(os.dup(connection.fileno()), os.dup(connection.fileno()))


class FramedStream(RawStream):
    """The same for a process without a terminal: the engine wraps its output in frames."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._held, self._left = b"", 0

    async def read(self) -> bytes:
        """Next output of stdout or stderr, b"" after the end."""
        while True:
            if self._left and self._held:
                piece, self._held = self._held[: self._left], self._held[self._left :]
                self._left -= len(piece)
                return piece
            if not self._left and len(self._held) >= _HEADER:
                self._left = int.from_bytes(self._held[4:_HEADER], "big")
                self._held = self._held[_HEADER:]
                continue
            if not (chunk := await super().read()):
                return b""
            self._held += chunk


class StreamTerminal:
    """A shell on a pseudo terminal behind a stream; `end` kills it and what runs in it."""

    def __init__(self, stream: Pipes, end: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._end = stream, end
        self._waiting: set[asyncio.Future[Any]] = set()
        self._over = ""

    async def send(self, data: bytes) -> None:
        """See `Terminal.send`."""
        self._check()
        await self._unless_over(self._stream.write(data))
        self._check()

    async def receive(self, timeout: float) -> bytes:
        """See `Terminal.receive`."""
        self._check()
        chunk = await self._unless_over(self._stream.read(), timeout)
        if chunk == b"":
            self._over = self._over or "the terminal ended"
        self._check()
        return chunk or b""

    async def close(self) -> None:
        """See `Terminal.close`."""
        if not self._over or self._over == "the terminal ended":
            self._over = "the terminal was closed"
            await self._end()
            await self.abandon()

    async def abandon(self) -> None:
        """Wakes whoever waits and lets go of the stream: all processes are gone, or soon will be."""
        self._over = self._over or "the sandbox was destroyed or rebuilt"
        for waiting in self._waiting:
            waiting.cancel()
        if self._waiting:
            await asyncio.wait(self._waiting)
        self._stream.close()

    async def _unless_over[T](self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T | None:
        """Result of `work`; None if it took longer than `timeout` or the terminal was abandoned."""
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        try:
            await asyncio.wait([task], timeout=timeout)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])  # until the stream is let go
            self._waiting.discard(task)
        return None if task.cancelled() else task.result()

    def _check(self) -> None:
        if self._over:
            raise SandboxError(f"{self._over}; open a new terminal")


def attach(address: str, identity: str, *, tty: bool) -> socket.socket:
    """Starts a program that was created in a container; the connection carries its streams from then on.

    Blocks. Not by the SDK: its buffered reader may swallow the first output. Raises `SandboxError`.
    """
    body = json.dumps({"Detach": False, "Tty": tty})
    request = (
        f"POST /{_API}/exec/{identity}/start HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
        f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    connection = open_connection(address)
    try:
        connection.sendall(request.encode())
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            if not (byte := connection.recv(1)):
                raise SandboxError(f"the container engine hung up: {answer.decode(errors='replace')}")
            answer += byte
        if answer.split()[1] not in (b"101", b"200"):
            words = answer + connection.recv(4096)
            raise SandboxError(f"the container engine refused: {words.decode(errors='replace')}")
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise SandboxError(f"no answer from the container engine at {address}: {error}") from error
        raise
    return connection


def open_connection(address: str) -> socket.socket:
    """A connection to an engine's API. Raises `SandboxError`, saying what to do."""
    place = urllib.parse.urlsplit(address)
    family, target = (
        (socket.AF_UNIX, place.path)
        if place.scheme == "unix"
        else (socket.AF_INET, (place.hostname, place.port or _PORT))
    )
    connection = socket.socket(family)
    try:
        connection.settimeout(_CONNECT_TIMEOUT)
        connection.connect(target)
    except OSError as error:
        connection.close()
        raise SandboxError(
            f"no container engine answers at {address}: {error}. "
            "Start dockerd or `podman system service`, or set DOCKER_HOST"
        ) from error
    return connection
