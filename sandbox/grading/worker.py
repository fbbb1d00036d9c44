"""One grader sandbox: a pre-imported Python server that forks once per request."""

import asyncio
import json
from importlib import resources
from typing import Any

from sandbox.base import Limits, SandboxError
from sandbox.namespace import Launched, NamespaceProvider

_START_TIMEOUT, _GRACE = 30.0, 10.0  # seconds
_MAX_ANSWER = 4 << 20  # bytes
_MAX_USES = 500  # bounds what gradings could leave in kernel objects that no one lists
_LIMITS = Limits(memory=512 << 20, pids=32, disk=16 << 20, wall=86_400.0)


class GraderWorker:
    """Serves one request at a time. Replaces its sandbox whenever something was left in it."""

    def __init__(self, provider: NamespaceProvider) -> None:
        self._provider = provider
        self._launched: Launched | None = None
        self._buffer = bytearray()
        self._uses = 0

    async def start(self) -> None:
        """Starts the server unless it runs. Raises `SandboxError`."""
        if self._launched is not None:
            return
        source = resources.files("sandbox.grading").joinpath("server.py").read_text()
        program = [self._provider.python.executable, "-I", "-S", "-B", "-c", source]
        self._launched = await self._provider.launch(program, _LIMITS, scratch=False)
        self._uses = 0
        try:
            await self._receive(_START_TIMEOUT)
        except BaseException:
            await self.close()
            raise

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer of the server. Raises `SandboxError` if it is lost."""
        await self.start()
        fields = {"workdir": self._provider.workdir, "memory": _LIMITS.memory}
        answer: dict[str, Any] = {}
        try:
            answer = await self._exchange({**request, **fields})
        finally:
            self._uses += 1
            if answer.get("ended") != "ended" or not answer["clean"] or self._uses >= _MAX_USES:
                await self.close()
        if answer["ended"] == "error":
            raise SandboxError(f"the grading server failed: {answer['error']}")
        return answer

    async def close(self) -> None:
        """Ends the sandbox; the next request starts a fresh one."""
        launched, self._launched = self._launched, None
        self._buffer.clear()
        if launched is not None:
            try:
                await asyncio.shield(asyncio.ensure_future(launched.destroy()))
            finally:
                launched.pipes.close()

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._launched is not None
        await self._launched.pipes.write(json.dumps(request).encode() + b"\n")
        return await self._receive(request["timeout"] + _GRACE)

    async def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout):
                line = await self._line()
            return json.loads(line)
        except (TimeoutError, ValueError) as error:
            raise SandboxError(f"the grading server gave no answer: {error!r}") from error

    async def _line(self) -> bytes:
        assert self._launched is not None
        while b"\n" not in self._buffer:
            chunk = await self._launched.pipes.read()
            self._buffer += chunk
            if not chunk or len(self._buffer) > _MAX_ANSWER:
                said = bytes(self._buffer[-500:]).decode(errors="replace")
                raise SandboxError(f"the grading server ended: {said}")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line
