"""Grades patches of project tasks: the hidden pytest suite runs in a fresh sandbox per grading."""

import asyncio
import base64
import dataclasses
import hashlib
import hmac
import json
import secrets
import shlex
import time
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from sandbox.base import Diff, Limits, Sandbox, SandboxError, SandboxProvider
from sandbox.grading.cache import VerdictCache
from sandbox.grading.patch import BadPatchError, SuspiciousPatchError, digest
from sandbox.grading.suite_driver import MARK
from sandbox.grading.suite_judge import Finding, judge_suite
from sandbox.grading.suite_patch import Patch, select, without_new_tests
from sandbox.grading.suite_plan import Run, plan
from sandbox.grading.verdict import Verdict
from sandbox.tasks.schema import SuiteTests, TaskSpec

LIMITS = Limits(memory=2 << 30, pids=256, disk=256 << 20, output=32 << 20)
_ATTEMPTS = 2
_GRACE = 60.0  # seconds beside the tests' own: start of the interpreter, files, the end of what was left
_SETTINGS = "PYTHONHASHSEED=0 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONDONTWRITEBYTECODE=1"


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
                finding = await self._attempts(task, hidden, patch)
            except (SandboxError, OSError) as error:
                finding = Finding(status="error", detail=str(error))
            return Verdict(status=finding.status, detail=finding.detail, seconds=time.monotonic() - started)

    async def _attempts(self, task: TaskSpec, hidden: SuiteTests, patch: Patch) -> Finding:
        """A fault of the sandbox is tried again before anybody hears of it."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._once(task, hidden, patch)
            except (SandboxError, OSError):
                continue
        return await self._once(task, hidden, patch)

    async def _once(self, task: TaskSpec, hidden: SuiteTests, patch: Patch) -> Finding:
        runs = plan(hidden)
        files = {path: text.encode() for path, text in task.files.items()}
        limits = dataclasses.replace(self._limits, wall=task.tests_timeout + 2 * _GRACE)
        sandbox = await self._provider.create(files, limits, image=task.image)
        try:
            originals = await _originals(sandbox, patch)
            patch = without_new_tests(patch, originals)
            message = await _drive(sandbox, task, _job(task, hidden, patch, runs))
        finally:
            await sandbox.destroy()
        return _finding(message, runs)


def _check(task: TaskSpec, hidden: SuiteTests) -> None:
    if task.instance_id != hidden.instance_id:
        raise ValueError(f"expected the tests of {task.instance_id}, got those of {hidden.instance_id}")


async def _originals(sandbox: Sandbox, patch: Patch) -> dict[str, bytes]:
    """What the untouched tree has at the paths of the patch."""
    found: dict[str, bytes] = {}
    for path in patch.files:
        try:
            found[path] = await sandbox.read(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
    return found


def _job(task: TaskSpec, hidden: SuiteTests, patch: Patch, runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "key": secrets.token_hex(32),
        "workdir": task.image.workdir,
        "timeout": task.tests_timeout,
        "patch": _encoded(patch.files),
        "hidden": _encoded(hidden.files),
        "runs": [
            {
                "path": run.path,
                "nonce": run.nonce,
                "ids": run.ids,
                "files": {} if run.content is None else _encoded({run.path: run.content}),
            }
            for run in runs
        ],
    }


def _encoded(files: Mapping[str, bytes | None]) -> dict[str, str | None]:
    return {path: None if data is None else base64.b64encode(data).decode() for path, data in files.items()}


async def _drive(sandbox: Sandbox, task: TaskSpec, job: dict[str, Any]) -> dict[str, Any]:
    """The driver's answer; an empty one if it was kept from answering."""
    path = f"/tmp/{secrets.token_hex(8)}"
    await sandbox.write(path, json.dumps(job).encode())
    folder = resources.files("sandbox.grading")
    driver, template = (folder.joinpath(f"suite_{name}.py").read_text() for name in ("driver", "template"))
    program = shlex.join([task.image.python or "python3", "-s", "-B", "-c", driver, path, template])
    command = f"(cd / && {_SETTINGS} exec {program})"
    result = await sandbox.exec(command, task.tests_timeout + _GRACE)
    if result.timed_out:
        return {"stopped": "tests timed out"}
    message = authentic(result.output, job["key"])
    if message is None:
        return {"stopped": "out of memory" if result.oom else f"the grader was ended: {result.output[-300:]}"}
    return message


def authentic(output: str, key: str) -> dict[str, Any] | None:
    """The message in `output` that holds our key's signature."""
    for line in reversed(output.splitlines()):
        data, _, sign = line.removeprefix(MARK).partition(":")
        real = hmac.new(bytes.fromhex(key), data.encode(), hashlib.sha256).hexdigest()
        if line.startswith(MARK) and hmac.compare_digest(sign.encode(), real.encode()):
            return json.loads(zlib.decompress(base64.b64decode(data)))
    return None


def _finding(message: dict[str, Any], runs: Sequence[Run]) -> Finding:
    """Raises `SandboxError` for a fault of the image."""
    if "fault" in message:
        raise SandboxError(f"the image cannot run pytest: {message['fault']}")
    if "stopped" in message:
        return Finding(status="unresolved", detail=message["stopped"])
    if "problem" in message:
        return Finding(status="unresolved", detail=f"the patch cannot be applied: {message['problem']}")
    return judge_suite(runs, message["results"])
