"""Runs test files of a project in one sandbox, with some of its files changed for the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from sandbox.base import Image, Limits
from sandbox.dialogue import Dialogue
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
        self._program = Dialogue(
            self._launch, name="the tests' sandbox", longest=_MAX_ANSWER, patience=_START_TIMEOUT
        )

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
            await self._program.start()
            answer = await self._program.ask(request, timeout * len(tests) + _GRACE)
        except BaseException:
            await self.close()
            raise
        return {path: _file_run(run) for path, run in answer.items()}

    async def close(self) -> None:
        """Ends the sandbox; the next run starts a fresh one."""
        await self._program.close()

    async def _launch(self) -> Launched:
        source = resources.files("sandbox.tasks.probe").joinpath("script.py").read_text()
        program = [self._image.python or self._provider.python.executable, "-I", "-c", source]
        return await self._provider.launch(program, LIMITS, scratch=True, image=self._image)


def _file_run(answer: Mapping[str, Any]) -> FileRun:
    reasons = {node: Reason(**reason) for node, reason in answer.get("reasons", {}).items()}
    lines = {path: frozenset(numbers) for path, numbers in answer.get("lines", {}).items()}
    whole = answer["ended"] == "ended" and not answer["broken"]
    return FileRun(
        whole=whole, seconds=answer["seconds"], results=answer["results"], reasons=reasons, lines=lines
    )
