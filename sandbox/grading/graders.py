"""One grader for every kind of task: the kind of its hidden tests says who runs them."""

import asyncio

from sandbox.base import Diff
from sandbox.grading.grader import Grader
from sandbox.grading.suite import SuiteGrader
from sandbox.grading.verdict import Verdict
from sandbox.tasks.schema import Hidden, HiddenTests, TaskSpec


class Graders:
    """Expressions go to `expressions`, pytest suites to `suites`; both are owned and closed here."""

    def __init__(self, *, expressions: Grader, suites: SuiteGrader) -> None:
        self._expressions, self._suites = expressions, suites

    @property
    def hits(self) -> int:
        """Gradings that a cache answered."""
        return self._expressions.hits + self._suites.hits

    @property
    def misses(self) -> int:
        """Gradings that ran."""
        return self._expressions.misses + self._suites.misses

    async def start(self) -> None:
        """Starts what is kept running. Raises `SandboxError`."""
        await self._expressions.start()

    async def close(self) -> None:
        """Ends the gradings that still run."""
        await asyncio.gather(self._expressions.close(), self._suites.close())

    async def grade(self, task: TaskSpec, hidden: Hidden, diff: Diff) -> Verdict:
        """Whether `diff` resolves `task`."""
        if isinstance(hidden, HiddenTests):
            return await self._expressions.grade(task, hidden, diff)
        return await self._suites.grade(task, hidden, diff)
