"""One patch of one task, run stage by stage: every stage in a sandbox of its own."""

import dataclasses
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import Any

from sandbox.base import Limits, Sandbox, SandboxError, SandboxProvider
from sandbox.grading.scan import Hit, scan
from sandbox.grading.suite_drive import GRACE, drive, job
from sandbox.grading.suite_driver import STRETCH
from sandbox.grading.suite_judge import Finding, judge_suite
from sandbox.grading.suite_patch import Patch, leave_out, without_new_tests
from sandbox.grading.suite_plan import Run, by_file
from sandbox.tasks.schema import SuiteTests, TaskSpec

_ATTEMPTS = 2


class _Stopped(Exception):  # noqa: N818 (no error: a finding that needs no run)
    def __init__(self, finding: Finding) -> None:
        self.finding = finding


class Trial:
    """Runs patches of one task. It reads each file of the untouched tree once, whatever the patch."""

    def __init__(self, provider: SandboxProvider, limits: Limits, task: TaskSpec, hidden: SuiteTests) -> None:
        self.task = task
        self.hidden = self._given = hidden
        self._provider, self._limits = provider, limits
        self._known: dict[str, bytes | None] = {}

    def of(self, task: TaskSpec, hidden: SuiteTests) -> bool:
        """Whether this trial is one of these."""
        same = task is self.task and hidden is self._given
        return same or (task == self.task and hidden == self._given)

    async def complete(self) -> None:
        """Adds to the hidden files the test files that only the image has. Raises `SandboxError`."""
        needed = by_file([*self.hidden.fail_to_pass, *self.hidden.pass_to_pass])
        more = await self._originals(needed.keys() - self.hidden.files.keys())
        self.hidden = dataclasses.replace(self.hidden, files={**more, **self.hidden.files})

    async def run(self, patch: Patch, stages: Iterable[Sequence[Run]], *, ours: bool = False) -> Finding:
        """What the stages find, up to the first that does not resolve; `ours`: a patch that needs no scan.

        Raises `SandboxError` when a sandbox fails twice.
        """
        runs: list[Run] = []
        results: list[dict[str, Any]] = []
        finding = Finding(status="unresolved", detail="nothing was run")
        try:
            patch = patch if ours else await self._screened(patch)
            for stage in filter(None, stages):
                results += await self._results(patch, stage)
                runs += stage
                finding = judge_suite(runs, results)
                if finding.status != "resolved":
                    break
        except _Stopped as stopped:
            return stopped.finding
        return finding

    async def _originals(self, paths: Iterable[str]) -> dict[str, bytes]:
        """What the untouched tree has at those of `paths` that are files."""
        wanted = set(paths)
        if unknown := wanted - self._known.keys():
            async with self._sandbox() as sandbox:
                found = await originals_of(sandbox, unknown)
            self._known |= {path: found.get(path) for path in unknown}
        return {path: data for path in wanted if (data := self._known[path]) is not None}

    async def _screened(self, patch: Patch) -> Patch:
        originals = await self._originals(patch.files)
        patch, hits = screen(without_new_tests(patch, originals), originals)
        if hits:
            raise _Stopped(Finding(status="tampering", detail="; ".join(map(str, hits[:5]))))
        return patch

    async def _results(self, patch: Patch, stage: Sequence[Run]) -> list[dict[str, Any]]:
        """A fault of the sandbox is tried again before anybody hears of it."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._once(patch, stage)
            except (SandboxError, OSError):
                continue
        return await self._once(patch, stage)

    async def _once(self, patch: Patch, stage: Sequence[Run]) -> list[dict[str, Any]]:
        async with self._sandbox() as sandbox:
            message = await drive(sandbox, self.task, job(self.task, self.hidden, patch, stage))
        if "fault" in message:
            raise SandboxError(f"the image cannot run pytest: {message['fault']}")
        if "stopped" in message:
            raise _Stopped(Finding(status="unresolved", detail=message["stopped"]))
        if "problem" in message:
            detail = f"the patch cannot be applied: {message['problem']}"
            raise _Stopped(Finding(status="unresolved", detail=detail))
        return message["results"]

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Sandbox]:
        files = {path: text.encode() for path, text in self.task.files.items()}
        limits = dataclasses.replace(self._limits, wall=2 * STRETCH * self.task.tests_timeout + 2 * GRACE)
        sandbox = await self._provider.create(files, limits, image=self.task.image)
        try:
            yield sandbox
        finally:
            await sandbox.destroy()


async def originals_of(sandbox: Sandbox, paths: Iterable[str]) -> dict[str, bytes]:
    """What the untouched tree has at those of `paths` that are files."""
    found: dict[str, bytes] = {}
    for path in paths:
        try:
            found[path] = await sandbox.read(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
    return found


def screen(patch: Patch, originals: Mapping[str, bytes]) -> tuple[Patch, list[Hit]]:
    """What is suspicious about a patch, without new files that nothing else of it mentions.

    Such a file is left out: a script that an agent wrote to look at the bug, as a rule.
    """
    hits = scan(originals, patch.files)
    new = {hit.path for hit in hits if hit.path not in originals}
    others = [data for path, data in patch.files.items() if path not in new and data is not None]
    aside = {path for path in new if not any(_mentions(data, path) for data in others)}
    return leave_out(patch, aside), [hit for hit in hits if hit.path not in aside]


def _mentions(content: bytes, path: str) -> bool:
    """Whether a file names the module that `path` is."""
    place = PurePosixPath(path)
    name = place.parent.name if place.stem == "__init__" else place.stem
    return re.search(rb"\b%s\b" % re.escape(name.encode()), content) is not None
