"""Reference mode: the benchmark's grading, beside the strict one, and where the two disagree."""

import asyncio
import dataclasses
import shlex
import time
from dataclasses import dataclass

from sandbox.base import Diff, Limits, RejectedDiff, Sandbox, SandboxError, SandboxProvider
from sandbox.grading.reference import git_patch, same_results, statuses
from sandbox.grading.suite import LIMITS, SuiteGrader
from sandbox.grading.suite_plan import by_file
from sandbox.grading.suite_trial import originals_of
from sandbox.grading.verdict import Status, Verdict
from sandbox.tasks.schema import SuiteTests, TaskSpec

_BENCHMARK_TESTS = "r2e_tests"
_GRACE = 120.0  # seconds beside the tests' own, as the benchmark gives
_PATCH = "/tmp/reference.patch"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both verdicts on one diff of one task."""

    instance_id: str
    strict: Verdict
    reference: Verdict

    @property
    def agree(self) -> bool:
        """Whether both give the same reward."""
        return (self.strict.status == "resolved") == (self.reference.status == "resolved")

    def __str__(self) -> str:
        said = "agree" if self.agree else "DISAGREE"
        strict, reference = self.strict, self.reference
        return f"{self.instance_id}: {said}; strict {strict.status} ({strict.detail}), " + (
            f"reference {reference.status} ({reference.detail})"
        )


class ReferenceGrader:
    """Verdicts as the benchmark gives them: `git apply`, `pytest -rA`, and its reading of the summary.

    It can be fooled, and is there to be compared with. Needs git in the image.
    """

    def __init__(self, provider: SandboxProvider, *, at_once: int = 2, limits: Limits = LIMITS) -> None:
        self._provider, self._limits = provider, limits
        self._room = asyncio.Semaphore(at_once)

    async def grade(self, task: TaskSpec, hidden: SuiteTests, diff: Diff) -> Verdict:
        """Whether the benchmark would call `diff` a fix. Raises `ValueError` without expected statuses."""
        if not hidden.expected:
            raise ValueError(f"{hidden.instance_id}: reference mode needs `expected` statuses, got none")
        if diff.empty or isinstance(diff, RejectedDiff):
            return Verdict(status="unresolved", detail="no patch")
        async with self._room:
            started = time.monotonic()
            status, detail = await self._graded(task, hidden, diff)
            return Verdict(status=status, detail=detail, seconds=time.monotonic() - started)

    async def _graded(self, task: TaskSpec, hidden: SuiteTests, diff: Diff) -> tuple[Status, str]:
        files = {path: text.encode() for path, text in task.files.items()}
        limits = dataclasses.replace(self._limits, wall=task.tests_timeout + 2 * _GRACE)
        try:
            sandbox = await self._provider.create(files, limits, image=task.image)
            try:
                return await _run(sandbox, task, hidden, diff)
            finally:
                await sandbox.destroy()
        except (SandboxError, OSError) as error:
            return "error", str(error)


async def compare(
    strict: SuiteGrader, reference: ReferenceGrader, task: TaskSpec, hidden: SuiteTests, diff: Diff
) -> Comparison:
    """Grades `diff` both ways."""
    verdicts = await asyncio.gather(strict.grade(task, hidden, diff), reference.grade(task, hidden, diff))
    return Comparison(instance_id=task.instance_id, strict=verdicts[0], reference=verdicts[1])


async def _run(sandbox: Sandbox, task: TaskSpec, hidden: SuiteTests, diff: Diff) -> tuple[Status, str]:
    before = await originals_of(sandbox, diff.files)
    for path, content in hidden.files.items():
        await sandbox.write(path, content)
    await sandbox.write(_PATCH, git_patch(before, diff.files))
    applied = await sandbox.exec(await _apply_command(sandbox, diff), _GRACE)
    if applied.exit_code == 127:
        raise SandboxError("reference mode needs git in the image: install it there")
    if applied.exit_code != 0:
        return "unresolved", f"the patch does not apply: {applied.output.strip()[-300:]}"
    result = await sandbox.exec(_test_command(task, hidden), task.tests_timeout)
    if result.timed_out:
        return "timeout", "tests timed out"
    resolved, detail = same_results(statuses(result.output), hidden.expected)
    return ("resolved" if resolved else "unresolved"), detail


async def _apply_command(sandbox: Sandbox, diff: Diff) -> str:
    """Files that are there but that version control does not know are no part of the patch."""
    listed = await sandbox.exec("git ls-files --others -z 2>/dev/null | tr '\\0' '\\n'", _GRACE)
    untracked = sorted(set(listed.output.split("\n")) & diff.files.keys())
    excluded = [f"--exclude={path}" for path in untracked]
    return shlex.join(["git", "apply", "--whitespace=fix", *excluded, _PATCH])


def _test_command(task: TaskSpec, hidden: SuiteTests) -> str:
    ids = [*hidden.fail_to_pass, *hidden.pass_to_pass]
    benchmark = any(path.startswith(f"{_BENCHMARK_TESTS}/") for path in hidden.files)
    targets = [_BENCHMARK_TESTS] if benchmark else sorted(by_file(ids))
    # The project's own environment counts, unless the image itself says where packages are.
    unset = [name for name in ("PYTHONPATH", "PYTHONHOME") if name not in task.image.environment]
    cleared = [part for name in unset for part in ("-u", name)]
    python = task.image.python or "python3"
    return shlex.join(["env", *cleared, python, "-W", "ignore", "-m", "pytest", "-rA", *targets])
