"""The owner's end of one socket to the keeper: requests and answers, without blocking the loop."""

import asyncio
import itertools
import socket
from collections.abc import Sequence

from sandbox.base import SandboxError
from sandbox.keeper.wire import Header, Unpacker, pack


class Channel:
    """Belongs to the event loop that created it. Owns `connection`."""

    def __init__(self, connection: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._socket.setblocking(False)
        self._unpacker, self._ids = Unpacker(), itertools.count()
        self._pending: dict[int, asyncio.Future[tuple[Header, bytes]]] = {}
        self._sending = asyncio.Lock()
        self._loop.add_reader(self._socket, self._receive)

    async def call(
        self, header: Header, *, payload: bytes = b"", fds: Sequence[int] = ()
    ) -> tuple[Header, bytes]:
        """Sends one request and waits for its answer.

        Raises `SandboxError` if the keeper is gone, `OSError` (by errno) if it refused.
        """
        identity = next(self._ids)
        answer = self._pending[identity] = self._loop.create_future()
        try:
            async with self._sending:
                await self._send(pack({"id": identity, **header}, payload), fds)
            reply, data = await answer
        finally:
            self._pending.pop(identity, None)
        if "error" in reply:
            raise OSError(reply["errno"], reply["error"]) if reply["errno"] else SandboxError(reply["error"])
        return reply, data

    def close(self, reason: str) -> None:
        """Closes the socket; pending calls fail with `reason`. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(SandboxError(reason))

    async def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        if self._socket.fileno() < 0:
            raise SandboxError("the sandbox keeper is gone; create a new provider")
        # A cancelled caller must neither garble the next request nor close descriptors in flight.
        sending = self._loop.create_task(self._send_whole(frame, fds))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait([sending])
            raise

    async def _send_whole(self, frame: bytes, fds: Sequence[int]) -> None:
        try:
            if fds:
                await self._send_fds(frame[:1], fds)
                frame = frame[1:]
            await self._loop.sock_sendall(self._socket, frame)
        except OSError as error:
            raise SandboxError(f"the sandbox keeper is gone: {error}") from error

    async def _send_fds(self, data: bytes, fds: Sequence[int]) -> None:
        while True:
            try:
                socket.send_fds(self._socket, [data], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self.close("the sandbox keeper ended")
        for header, payload in self._unpacker.feed(data):
            future = self._pending.get(header["id"])
            if future is not None and not future.done():
                future.set_result((header, payload))
