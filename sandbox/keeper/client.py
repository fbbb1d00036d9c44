"""The owner's side of the keeper: starts it, talks to it, ends it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox.keeper.channel import Channel
from sandbox.keeper.wire import Header

_BOOT = (
    "import sys, json; sys.path.insert(0, sys.argv[1]); "
    "from sandbox.keeper.boot import main; main(json.loads(sys.argv[2]))"
)
_ROOT = Path(__file__).resolve().parents[2]


class KeeperClient:
    """One keeper process, and as root its porter. Belongs to the event loop that created it."""

    def __init__(self, config: dict[str, Any]) -> None:
        names = ("control", "porter") if config["uid"] is not None else ("control",)
        pairs = {name: socket.socketpair() for name in names}
        theirs = {name: pair[1].fileno() for name, pair in pairs.items()}
        try:
            self._process = _start({**config, **theirs}, tuple(theirs.values()))
        finally:
            for _, end in pairs.values():
                end.close()
        self._channels = {name: Channel(pair[0]) for name, pair in pairs.items()}

    @property
    def pid(self) -> int:
        """Process id of the keeper, or of the porter, its parent."""
        return self._process.pid

    async def call(
        self, header: Header, *, payload: bytes = b"", fds: Sequence[int] = ()
    ) -> tuple[Header, bytes]:
        """Asks the keeper. Raises `SandboxError` if it is gone, `OSError` (by errno) if it refused."""
        return await self._channels["control"].call(header, payload=payload, fds=fds)

    async def share(self, path: str, *, owned: bool) -> str:
        """Where the keeper sees `path`, if `owned` as if it owned it. Raises like `call`."""
        if "porter" not in self._channels:
            return path
        header = {"op": "share", "path": path, "owned": owned}
        return (await self._channels["porter"].call(header))[0]["path"]

    async def open_archive(self, path: str, *, offset: int, squashfuse: str | None) -> str:
        """Where the keeper sees the content of a squashfs. Raises like `call`."""
        if "porter" not in self._channels:
            raise PermissionError(1, "only root can mount it")
        header = {"op": "open", "path": path, "offset": offset, "squashfuse": squashfuse}
        return (await self._channels["porter"].call(header))[0]["path"]

    async def release(self, shown: str) -> None:
        """Takes back what `share` gave, once no sandbox uses it."""
        if "porter" in self._channels:
            await self._channels["porter"].call({"op": "release", "path": shown})

    async def close(self) -> None:
        """Ends the keeper, and with it every sandbox."""
        for channel in self._channels.values():
            channel.close("the keeper was closed")
        while self._process.poll() is None:
            await asyncio.sleep(0.002)


def _start(config: dict[str, Any], sockets: tuple[int, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-B", "-c", _BOOT, str(_ROOT), json.dumps(config)]
    return subprocess.Popen(
        command,
        pass_fds=sockets,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Without the second, an interpreter that finds its own library through it would not start.
        env={"LC_ALL": "C.UTF-8", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
        cwd=os.sep,
        start_new_session=True,
    )
