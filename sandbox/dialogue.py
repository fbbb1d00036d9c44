"""Requests and answers, one JSON line each, with a program in a sandbox of its own."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sandbox.base import SandboxError
from sandbox.launched import Launched


class Dialogue:
    """One request at a time; whoever is at fault, `close` makes the next start a fresh program.

    Args:
      launch: starts the program, whose first line says that it is ready.
      name: who speaks, for errors.
      longest: bytes of an answer.
      patience: seconds for the first line.
    """

    def __init__(
        self, launch: Callable[[], Awaitable[Launched]], *, name: str, longest: int, patience: float
    ) -> None:
        self._launch, self._name = launch, name
        self._longest, self._patience = longest, patience
        self._launched: Launched | None = None
        self._buffer = bytearray()

    async def start(self) -> bool:
        """Starts the program unless it runs, and says whether it did. Raises `SandboxError`."""
        if self._launched is not None:
            return False
        self._launched = await self._launch()
        try:
            await self._receive(self._launched, self._patience)
        except BaseException:
            await self.close()
            raise
        return True

    async def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The program's answer within `timeout` seconds; it must have been started.

        Raises `SandboxError` if there is none: what is said later would answer this request, so close then.
        """
        if self._launched is None:
            raise SandboxError(f"{self._name} does not run")
        await self._launched.pipes.write(json.dumps(request).encode() + b"\n")
        return await self._receive(self._launched, timeout)

    async def close(self) -> None:
        """Ends the sandbox. Idempotent."""
        launched, self._launched = self._launched, None
        self._buffer.clear()
        if launched is not None:
            try:
                await asyncio.shield(asyncio.ensure_future(launched.destroy()))
            finally:
                launched.pipes.close()

    async def _receive(self, launched: Launched, timeout: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout):
                return json.loads(await self._line(launched))
        except (TimeoutError, ValueError) as error:
            raise SandboxError(f"{self._name} gave no answer: {error!r}") from error

    async def _line(self, launched: Launched) -> bytes:
        while b"\n" not in self._buffer:
            chunk = await launched.pipes.read()
            self._buffer += chunk
            if not chunk or len(self._buffer) > self._longest:
                said = bytes(self._buffer[-500:]).decode(errors="replace")
                raise SandboxError(f"{self._name} ended: {said}")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line
