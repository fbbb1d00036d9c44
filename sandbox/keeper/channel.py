"""The owner's end of one socket to the keeper: requests and answers, without blocking the loop."""

import asyncio
import itertools
import os
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
        self._fds: list[int] = []  # received, their answers still incomplete
        self._sending = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None  # what a sender waits for while the socket is full
        self._loop.add_reader(self._socket, self._receive)

    async def call(
        self, header: Header, *, payload: bytes = b"", fds: Sequence[int] = ()
    ) -> tuple[Header, bytes]:
        """Sends one request and waits for its answer, whose header has "fd" if a descriptor came with it.

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
            if answer.done() and not answer.cancelled():
                answer.exception()  # closed before it was awaited: nobody else asks for it
        if "error" in reply:
            raise OSError(reply["errno"], reply["error"]) if reply["errno"] else SandboxError(reply["error"])
        return reply, data

    def close(self, reason: str) -> None:
        """Closes the socket; pending calls fail with `reason`. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._wake()
            for fd in self._fds:
                os.close(fd)
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
            sending.exception()  # the caller is gone, so that nobody else asks for it
            raise

    async def _send_whole(self, frame: bytes, fds: Sequence[int]) -> None:
        try:
            if fds:
                await self._send_fds(frame[:1], fds)
                frame = frame[1:]
            view = memoryview(frame)
            while view:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    await self._writable()
        except OSError as error:
            raise SandboxError(f"the sandbox keeper is gone: {error}") from error

    async def _writable(self) -> None:
        """Until the socket takes more, or is closed (the loop's own senders would not hear of that)."""
        self._room = self._loop.create_future()
        self._loop.add_writer(self._socket, self._wake)
        try:
            await self._room
        finally:
            if self._socket.fileno() >= 0:
                self._loop.remove_writer(self._socket)

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _send_fds(self, data: bytes, fds: Sequence[int]) -> None:
        while True:
            try:
                socket.send_fds(self._socket, [data], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 18, 16)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds += fds
        if not data:
            return self.close("the sandbox keeper ended")
        for header, payload in self._unpacker.feed(data):
            self._deliver(header, payload)

    def _deliver(self, header: Header, payload: bytes) -> None:
        if header.get("fd"):  # a descriptor comes with the first byte of its answer
            header["fd"] = self._fds.pop(0)
        future = self._pending.get(header["id"])
        if future is not None and not future.done():
            future.set_result((header, payload))
        elif header.get("fd"):
            os.close(header["fd"])
