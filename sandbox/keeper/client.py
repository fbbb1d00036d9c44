"""The owner's side of the keeper: requests and answers over one socket, without blocking the loop."""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox.base import SandboxError
from sandbox.keeper.wire import Header, Unpacker, pack

_BOOT = (
    "import sys, json; sys.path.insert(0, sys.argv[1]); "
    "from sandbox.keeper.process import main; main(json.loads(sys.argv[2]))"
)
_ROOT = Path(__file__).resolve().parents[2]


class KeeperClient:
    """One keeper process. Belongs to the event loop that created it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = _start({**config, "control": theirs.fileno()}, theirs.fileno())
        self._unpacker, self._ids = Unpacker(), itertools.count()
        self._pending: dict[int, asyncio.Future[tuple[Header, bytes]]] = {}
        self._sending = asyncio.Lock()
        self._loop.add_reader(self._socket, self._receive)

    @property
    def pid(self) -> int:
        """Process id of the keeper."""
        return self._process.pid

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

    async def close(self) -> None:
        """Ends the keeper, and with it every sandbox."""
        self._fail("the keeper was closed")
        while self._process.poll() is None:
            await asyncio.sleep(0.002)

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
            return self._fail("the sandbox keeper ended")
        for header, payload in self._unpacker.feed(data):
            future = self._pending.get(header["id"])
            if future is not None and not future.done():
                future.set_result((header, payload))

    def _fail(self, reason: str) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(SandboxError(reason))


def _start(config: dict[str, Any], control: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-B", "-c", _BOOT, str(_ROOT), json.dumps(config)]
    return subprocess.Popen(
        command,
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Without the second, an interpreter that finds its own library through it would not start.
        env={"LC_ALL": "C.UTF-8", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
        cwd=os.sep,
        start_new_session=True,
    )
