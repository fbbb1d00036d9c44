"""Grades patches: hidden tests run in sandboxes of their own, verdicts are made outside of them."""

import asyncio
import dataclasses
import secrets
import time

from sandbox.base import Diff, SandboxError
from sandbox.grading.cache import Cached
from sandbox.grading.patch import BadPatchError, SuspiciousPatchError, apply, digest
from sandbox.grading.verdict import Question, Verdict, judge, questions
from sandbox.grading.worker import GraderWorker
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.schema import HiddenTests, TaskSpec

_ATTEMPTS = _CHECKS = 2


class Grader(Cached):
    """A few grader sandboxes and a cache of verdicts by (task, diff)."""

    def __init__(self, *, graders: int = 2, provider: NamespaceProvider | None = None) -> None:
        if graders < 1:
            raise ValueError(f"expected at least one grader, got {graders}")
        super().__init__()
        self._owned = provider is None
        self._provider = provider or NamespaceProvider()
        self._workers = [GraderWorker(self._provider) for _ in range(graders)]
        self._idle: asyncio.LifoQueue[GraderWorker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def start(self) -> None:
        """Starts the grader sandboxes. Raises `SandboxError`."""
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def close(self) -> None:
        """Ends the grader sandboxes; gradings that still run are cancelled."""
        await self._cache.cancel()
        await asyncio.gather(*(worker.close() for worker in self._workers))
        if self._owned:
            await self._provider.close()

    async def grade(self, task: TaskSpec, hidden: HiddenTests, diff: Diff) -> Verdict:
        """Whether `diff` resolves `task`. An empty diff is unresolved without running anything."""
        if task.instance_id != hidden.instance_id:
            raise ValueError(f"expected the tests of {task.instance_id}, got those of {hidden.instance_id}")
        if diff.empty:
            return Verdict(status="unresolved", detail="empty patch")
        try:
            files = apply(task, diff)
        except BadPatchError as error:
            return Verdict(status="unresolved", detail=str(error))
        except SuspiciousPatchError as error:
            return Verdict(status="tampering", detail=str(error))
        return await self._cache.get(
            (task.instance_id, digest(diff)), lambda: self._fresh(task, hidden, files)
        )

    async def check_unchanged(self, task: TaskSpec, hidden: HiddenTests) -> Verdict:
        """Runs the tests on the task as it is: a valid task is `unresolved`, a slow one `timeout`."""
        return await self._fresh(task, hidden, dict(task.files))

    async def _fresh(self, task: TaskSpec, hidden: HiddenTests, files: dict[str, str]) -> Verdict:
        started = time.monotonic()
        if hidden.module not in files:
            return Verdict(status="unresolved", detail=f"{hidden.module} was deleted")
        worker = await self._idle.get()
        try:
            verdict = await self._attempts(worker, task, hidden, files)
        finally:
            self._idle.put_nowait(worker)
        return dataclasses.replace(verdict, seconds=time.monotonic() - started)

    async def _attempts(
        self, worker: GraderWorker, task: TaskSpec, hidden: HiddenTests, files: dict[str, str]
    ) -> Verdict:
        reason = ""
        for _ in range(_ATTEMPTS):
            try:
                return await _run(worker, task, hidden, files)
            except (SandboxError, OSError) as error:
                reason = str(error)
        return await self._blame(worker, task, hidden, files, reason)

    async def _blame(
        self, worker: GraderWorker, task: TaskSpec, hidden: HiddenTests, files: dict[str, str], reason: str
    ) -> Verdict:
        """Our fault or the patch's? The patch broke it if fresh graders keep failing on it alone.

        On a drowning machine everything fails now and then: only the second time in a row, each beside an
        unchanged task that works, is an accusation.
        """
        for _ in range(_CHECKS):
            await worker.close()
            try:
                await _run(worker, task, hidden, dict(task.files))
            except (SandboxError, OSError) as error:
                return Verdict(status="error", detail=str(error))
            await worker.close()
            try:
                return await _run(worker, task, hidden, files)
            except (SandboxError, OSError) as error:
                reason = str(error)
        return Verdict(status="tampering", detail=f"the patch ends the grading server: {reason}")


async def _run(worker: GraderWorker, task: TaskSpec, hidden: HiddenTests, files: dict[str, str]) -> Verdict:
    nonce, asked = secrets.token_hex(8), questions(hidden.cases)
    answer = await worker.ask(_request(task, hidden, files, nonce, asked))
    status, detail = judge(answer["records"], asked=asked, nonce=nonce, ended=answer["ended"])
    if answer["ended"] == "timeout" and files == task.files:
        return Verdict(status="timeout", detail="the unchanged task is too slow")
    return Verdict(status=status, detail=detail)


def _request(
    task: TaskSpec, hidden: HiddenTests, files: dict[str, str], nonce: str, asked: list[Question]
) -> dict[str, object]:
    return {
        "nonce": nonce,
        "files": files,
        "module": hidden.module,
        "expressions": [question.expression for question in asked],
        "timeout": task.tests_timeout,
    }
