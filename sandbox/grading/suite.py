"""Grades patches of project tasks: the hidden pytest suite runs in fresh sandboxes."""

import asyncio
import dataclasses
import time

from sandbox.base import Diff, Limits, SandboxError, SandboxProvider
from sandbox.grading.cache import Cached
from sandbox.grading.patch import BadPatchError, SuspiciousPatchError, digest
from sandbox.grading.suite_judge import Finding
from sandbox.grading.suite_patch import Patch, select
from sandbox.grading.suite_plan import plan
from sandbox.grading.suite_trial import Trial
from sandbox.grading.verdict import Verdict
from sandbox.tasks.schema import SuiteTests, TaskSpec

LIMITS = Limits(memory=2 << 30, pids=256, disk=256 << 20, output=32 << 20)


class SuiteGrader(Cached):
    """Verdicts on project tasks, with a cache by (task, diff).

    At most `at_once` gradings run at a time, so that one does not take another's time; the others wait.
    Belongs to the event loop of its first use; the provider stays the caller's.
    """

    def __init__(self, provider: SandboxProvider, *, at_once: int = 2, limits: Limits = LIMITS) -> None:
        if at_once < 1:
            raise ValueError(f"expected at_once of 1 or more, got {at_once}")
        self._provider, self._limits = provider, limits
        self._room = asyncio.Semaphore(at_once)
        super().__init__()
        self._trials: dict[str, Trial] = {}
        self._unfit: dict[str, set[str]] = {}  # node ids whose falsified form passes with the known fix

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
                finding = await self._fair(self._trial(task, hidden), patch)
            except (SandboxError, OSError) as error:
                finding = Finding(status="error", detail=str(error))
            return Verdict(status=finding.status, detail=finding.detail, seconds=time.monotonic() - started)

    async def _fair(self, trial: Trial, patch: Patch) -> Finding:
        """No accusation by a falsified test that passes with the known fix, too; a second try if unsure."""
        await trial.complete()
        unfit = self._unfit.setdefault(trial.task.instance_id, set())
        stages = plan(trial.hidden, unfit=unfit)
        finding = await trial.run(patch, stages)
        if finding.unsure:
            stages = plan(trial.hidden, unfit=unfit)
            finding = await trial.run(patch, stages)
        if not finding.contradictions or not trial.hidden.reference:
            return finding
        known = select(trial.hidden, Diff(files=trial.hidden.reference))
        excused = (await trial.run(known, stages, ours=True)).contradictions
        unfit |= excused
        if not finding.contradictions <= excused:
            return finding
        return await trial.run(patch, plan(trial.hidden, unfit=unfit))

    def _trial(self, task: TaskSpec, hidden: SuiteTests) -> Trial:
        trial = self._trials.get(task.instance_id)
        if trial is None or not trial.of(task, hidden):
            trial = self._trials[task.instance_id] = Trial(self._provider, self._limits, task, hidden)
        return trial


def _check(task: TaskSpec, hidden: SuiteTests) -> None:
    if task.instance_id != hidden.instance_id:
        raise ValueError(f"expected the tests of {task.instance_id}, got those of {hidden.instance_id}")
