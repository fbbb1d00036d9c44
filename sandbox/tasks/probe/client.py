"""Runs test files of a project in one sandbox, with some of its files changed for the run."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from sandbox.base import Image, Limits, SandboxError
from sandbox.namespace import Launched, NamespaceProvider

LIMITS = Limits(memory=1 << 30, pids=64, disk=256 << 20, wall=7200.0)
_START_TIMEOUT, _GRACE = 60.0, 10.0  # seconds
_MAX_ANSWER = 64 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a test failed: the exception's type and message, the statements of the test that led to it.

    `asserted`: raised by the last statement itself, not by what it called; `arguments`: those of a
    parametrised test, as texts.
    """

    type: str
    message: str
    statement: str
    asserted: bool
    arguments: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class FileRun:
    """One run of a test file.

    `whole`: it ended in time and everything in it could be collected. `results` has an outcome per
    node id (passed, failed, skipped, xfailed: over all phases), `lines` the executed lines by file.
    """

    whole: bool
    seconds: float
    results: Mapping[str, str]
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    lines: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def ids(self, outcome: str) -> frozenset[str]:
        """Node ids that ended so."""
        return frozenset(each for each, got in self.results.items() if got == outcome)


class Prober:
    """A sandbox of `image` in which test files run one after the other, each in a fork."""

    def __init__(self, provider: NamespaceProvider, image: Image) -> None:
        self._provider, self._image = provider, image
        self._launched: Launched | None = None
        self._buffer = bytearray()

    async def run(
        self,
        tests: Sequence[str],
        files: Mapping[str, str | None],
        *,
        timeout: float,
        trace: Sequence[str] = (),
    ) -> dict[str, FileRun]:
        """Runs each file of `tests` for at most `timeout` seconds. Raises `SandboxError`."""
        request = {"tests": list(tests), "files": dict(files), "timeout": timeout, "trace": list(trace)}
        try:
            await self._start()
            assert self._launched is not None
            await self._launched.pipes.write(json.dumps(request).encode() + b"\n")
            answer = await self._receive(timeout * len(tests) + _GRACE)
        except BaseException:
            await self.close()
            raise
        return {path: _file_run(run) for path, run in answer.items()}

    async def close(self) -> None:
        """Ends the sandbox; the next run starts a fresh one."""
        launched, self._launched = self._launched, None
        self._buffer.clear()
        if launched is not None:
            try:
                await asyncio.shield(asyncio.ensure_future(launched.destroy()))
            finally:
                launched.pipes.close()

    async def _start(self) -> None:
        if self._launched is None:
            source = resources.files("sandbox.tasks.probe").joinpath("script.py").read_text()
            program = [self._image.python or self._provider.python.executable, "-I", "-c", source]
            self._launched = await self._provider.launch(program, LIMITS, scratch=True, image=self._image)
            await self._receive(_START_TIMEOUT)

    async def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout):
                return json.loads(await self._line())
        except (TimeoutError, ValueError) as error:
            raise SandboxError(f"the tests' sandbox gave no answer: {error!r}") from error

    async def _line(self) -> bytes:
        assert self._launched is not None
        while b"\n" not in self._buffer:
            chunk = await self._launched.pipes.read()
            self._buffer += chunk
            if not chunk or len(self._buffer) > _MAX_ANSWER:
                said = bytes(self._buffer[-500:]).decode(errors="replace")
                raise SandboxError(f"the tests' sandbox ended: {said}")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line


def _file_run(answer: Mapping[str, Any]) -> FileRun:
    reasons = {node: Reason(**reason) for node, reason in answer.get("reasons", {}).items()}
    lines = {path: frozenset(numbers) for path, numbers in answer.get("lines", {}).items()}
    whole = answer["ended"] == "ended" and not answer["broken"]
    return FileRun(
        whole=whole, seconds=answer["seconds"], results=answer["results"], reasons=reasons, lines=lines
    )
