"""Grades patches of project tasks: the hidden pytest suite runs in a fresh sandbox per grading."""

import asyncio
import dataclasses
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from sandbox.base import Diff, Limits, Sandbox, SandboxError, SandboxProvider
from sandbox.grading.cache import VerdictCache
from sandbox.grading.patch import BadPatchError, SuspiciousPatchError, digest
from sandbox.grading.scan import Hit, scan
from sandbox.grading.suite_drive import drive, job, longest
from sandbox.grading.suite_judge import Finding, judge_suite
from sandbox.grading.suite_patch import Patch, leave_out, select, without_new_tests
from sandbox.grading.suite_plan import Run, plan
from sandbox.grading.verdict import Verdict
from sandbox.tasks.schema import SuiteTests, TaskSpec

LIMITS = Limits(memory=2 << 30, pids=256, disk=256 << 20, output=32 << 20)
_ATTEMPTS = 2


class SuiteGrader:
    """Verdicts on project tasks, with a cache by (task, diff).

    At most `at_once` gradings run at a time, so that one does not take another's time; the others wait.
    Belongs to the event loop of its first use; the provider stays the caller's.
    """

    def __init__(self, provider: SandboxProvider, *, at_once: int = 2, limits: Limits = LIMITS) -> None:
        if at_once < 1:
            raise ValueError(f"expected at_once of 1 or more, got {at_once}")
        self._provider, self._limits = provider, limits
        self._room = asyncio.Semaphore(at_once)
        self._cache = VerdictCache()
        self._unfit: dict[str, set[str]] = {}  # node ids whose falsified form passes with the known fix

    @property
    def hits(self) -> int:
        """Gradings that the cache answered."""
        return self._cache.hits

    @property
    def misses(self) -> int:
        """Gradings that ran."""
        return self._cache.misses

    async def close(self) -> None:
        """Cancels the gradings that still run."""
        await self._cache.cancel()

    async def grade(self, task: TaskSpec, hidden: SuiteTests, diff: Diff) -> Verdict:
        """Whether `diff` resolves `task`. An empty diff is unresolved without running anything."""
        _check(task, hidden)
        if diff.empty:
            return Verdict(status="unresolved", detail="empty patch")
        try:
            patch = select(hidden, diff)
        except BadPatchError as error:
            return Verdict(status="unresolved", detail=str(error))
        except SuspiciousPatchError as error:
            return Verdict(status="tampering", detail=str(error))
        if not patch.files:
            return Verdict(status="unresolved", detail=f"only {patch.left_out[0]} and the like were changed")
        return await self._cache.get(
            (task.instance_id, digest(diff)), lambda: self._graded(task, hidden, patch)
        )

    async def check_unchanged(self, task: TaskSpec, hidden: SuiteTests) -> Verdict:
        """Runs the tests on the task as it is: a valid task is `unresolved`, a slow one `timeout`."""
        _check(task, hidden)
        verdict = await self._graded(task, hidden, Patch(files={}, left_out=()))
        slow = "timed out" in verdict.detail
        return dataclasses.replace(verdict, status="timeout") if slow else verdict

    async def _graded(self, task: TaskSpec, hidden: SuiteTests, patch: Patch) -> Verdict:
        async with self._room:
            started = time.monotonic()
            try:
                finding = await self._fair(task, hidden, patch)
            except (SandboxError, OSError) as error:
                finding = Finding(status="error", detail=str(error))
            return Verdict(status=finding.status, detail=finding.detail, seconds=time.monotonic() - started)

    async def _fair(self, task: TaskSpec, hidden: SuiteTests, patch: Patch) -> Finding:
        """No accusation by a falsified test that passes with the known fix, too; a second try if unsure."""
        unfit = self._unfit.setdefault(task.instance_id, set())
        runs = plan(hidden, unfit=unfit)
        finding = await self._attempts(task, hidden, patch, runs)
        if finding.unsure:
            runs = plan(hidden, unfit=unfit)
            finding = await self._attempts(task, hidden, patch, runs)
        if not finding.contradictions or not hidden.reference:
            return finding
        known = select(hidden, Diff(files=hidden.reference))
        excused = (await self._attempts(task, hidden, known, runs, ours=True)).contradictions
        unfit |= excused
        if not finding.contradictions <= excused:
            return finding
        return await self._attempts(task, hidden, patch, plan(hidden, unfit=unfit))

    async def _attempts(
        self, task: TaskSpec, hidden: SuiteTests, patch: Patch, runs: Sequence[Run], *, ours: bool = False
    ) -> Finding:
        """A fault of the sandbox is tried again before anybody hears of it."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._once(task, hidden, patch, runs, ours)
            except (SandboxError, OSError):
                continue
        return await self._once(task, hidden, patch, runs, ours)

    async def _once(
        self, task: TaskSpec, hidden: SuiteTests, patch: Patch, runs: Sequence[Run], ours: bool
    ) -> Finding:
        files = {path: text.encode() for path, text in task.files.items()}
        limits = dataclasses.replace(self._limits, wall=2 * longest(task))
        sandbox = await self._provider.create(files, limits, image=task.image)
        try:
            originals = await originals_of(sandbox, patch.files)
            patch = without_new_tests(patch, originals)
            patch, hits = (patch, []) if ours else screen(patch, originals)
            if hits:
                return Finding(status="tampering", detail="; ".join(map(str, hits[:5])))
            message = await drive(sandbox, task, job(task, hidden, patch, runs))
        finally:
            await sandbox.destroy()
        return _finding(message, runs)


def _check(task: TaskSpec, hidden: SuiteTests) -> None:
    if task.instance_id != hidden.instance_id:
        raise ValueError(f"expected the tests of {task.instance_id}, got those of {hidden.instance_id}")


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


def _finding(message: dict[str, Any], runs: Sequence[Run]) -> Finding:
    """Raises `SandboxError` for a fault of the image."""
    if "fault" in message:
        raise SandboxError(f"the image cannot run pytest: {message['fault']}")
    if "stopped" in message:
        return Finding(status="unresolved", detail=message["stopped"])
    if "problem" in message:
        return Finding(status="unresolved", detail=f"the patch cannot be applied: {message['problem']}")
    return judge_suite(runs, message["results"])
