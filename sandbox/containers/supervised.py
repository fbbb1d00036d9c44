"""The owner's side of a supervisor: starting one, and ending what it minds."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("supervisor.py")


@dataclass
class Running:
    """One container under its supervisor."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    answer: asyncio.Future[dict[str, Any]] | None = None

    async def kill(self) -> dict[str, Any]:
        """Ends everything in it; how it ended. The working copy stays."""
        if self.answer is None:
            self.answer = asyncio.ensure_future(self._kill())
        return await asyncio.shield(self.answer)

    async def _kill(self) -> dict[str, Any]:
        with suppress(OSError):  # it ended already
            self.control.send(b"k")
        line = await asyncio.get_running_loop().sock_recv(self.control, 4096)
        return json.loads(line) if line else {"status": -9, "reason": ""}

    async def dismiss(self) -> None:
        """Ends everything and lets go of the supervisor."""
        await self.kill()
        with suppress(OSError):
            self.control.send(b"f")
        await asyncio.to_thread(self.process.wait)
        self.control.close()


def supervise(
    config: dict[str, Any], control: socket.socket, stdin: int, stdout: int, environment: Mapping[str, str]
) -> Running:
    """Starts a container under a supervisor; `config` is the supervisor's, `control` the owner's end."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_SCRIPT), json.dumps(config)],
        stdin=stdin,
        stdout=stdout,
        stderr=stdout,
        pass_fds=[config["control"]],
        cwd=os.sep,
        env=environment,
        start_new_session=True,
    )
    return Running(process, control)
