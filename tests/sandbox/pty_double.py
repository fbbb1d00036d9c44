"""A sandbox in a private directory, for tests of tools alone: bash on a pty, files, no isolation.

Only commands that a test spells out run in it.
"""

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from sandbox.base import Diff, ExecResult, SandboxError

PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


class PtyTerminal:
    """A bash whose controlling terminal is a pty of ours."""

    def __init__(self, folder: Path, program: list[str]) -> None:
        self._master, theirs = pty.openpty()
        self._process = subprocess.Popen(
            # A background job ignores SIGINT, and so would all that it starts.
            ["env", "--default-signal", "setsid", "--ctty", *program],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={"PATH": PATH, "HOME": str(folder), "LANG": "C.UTF-8"},
        )
        os.close(theirs)
        os.set_blocking(self._master, False)

    async def send(self, data: bytes) -> None:
        while data:
            self._check()
            try:
                data = data[os.write(self._master, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.002)
            except OSError as error:
                raise SandboxError("the terminal ended") from error

    async def receive(self, timeout: float) -> bytes:
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                if data := os.read(self._master, 1 << 16):
                    return data
            except BlockingIOError:
                pass
            except OSError as error:
                raise SandboxError("the terminal ended") from error
            if asyncio.get_running_loop().time() >= deadline:
                return b""
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        """Hangs up, at which bash ends with its jobs; kills it if it does not."""
        if self._master < 0:
            return
        os.close(self._master)
        self._master = -1
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _check(self) -> None:
        if self._master < 0:
            raise SandboxError("the terminal is closed")


class PtySandbox:
    """Files below `folder` under absolute paths as they are; `oom` is what the next `exec` reports."""

    def __init__(self, folder: Path, program: list[str] | None = None) -> None:
        self.folder, self.program, self.oom = folder, program or ["bash", "-i"], False
        self.terminals: list[PtyTerminal] = []
        self.gone = False

    async def terminal(self) -> PtyTerminal:
        if self.gone:
            raise SandboxError("the sandbox was destroyed")
        self.terminals.append(PtyTerminal(self.folder, self.program))
        return self.terminals[-1]

    async def exec(self, command: str, timeout: float) -> ExecResult:
        shell = ["sh", "-c", command]
        done = subprocess.run(
            shell, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False
        )
        return ExecResult(exit_code=done.returncode, output=done.stdout + done.stderr, oom=self.oom)

    async def adopt(self, files: Mapping[str, bytes]) -> None:
        raise NotImplementedError

    async def read(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    async def write(self, path: str, content: bytes) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    async def diff(self) -> Diff:
        raise NotImplementedError

    async def destroy(self) -> None:
        self.gone = True
        for terminal in self.terminals:
            await terminal.close()
