"""The grader among faults that are nobody's, and what a grading could leave for the next."""

import asyncio
from collections.abc import Collection
from typing import Any, cast

import pytest

from sandbox.base import Diff, SandboxError
from sandbox.grading.grader import Grader
from sandbox.grading.worker import GraderWorker
from sandbox.tasks.schema import Case, HiddenTests, TaskSpec

TASK = TaskSpec(
    instance_id="t",
    problem_statement="add",
    files={"m.py": "def add(a, b):\n    return a - b\n"},
    tests_timeout=5.0,
)
HIDDEN = HiddenTests(instance_id="t", module="m.py", cases=(Case(expression="add(1, 2)", expected=3),))
FIXED = Diff(files={"m.py": b"def add(a, b):\n    return a + b\n"})


class Failing:
    """A worker that loses its sandbox at the given questions, counted from 0."""

    def __init__(self, worker: GraderWorker, lost: Collection[int]) -> None:
        self.worker, self.lost, self.asked = worker, lost, 0

    async def start(self) -> None:
        await self.worker.start()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        if self.asked - 1 in self.lost:
            raise SandboxError("lost")
        return await self.worker.ask(request)

    async def close(self) -> None:
        await self.worker.close()


@pytest.mark.parametrize(
    ("lost", "asked", "status"),
    [
        ({0}, 2, "resolved"),
        ({0, 1}, 4, "resolved"),  # an unchanged task, then the patch again
        ({0, 1, 3}, 6, "resolved"),
        ({0, 1, 2}, 3, "error"),
        ({0, 1, 3, 4}, 5, "error"),
        ({0, 1, 3, 5}, 6, "tampering"),
    ],
)
def test_nobody_is_accused_of_a_fault_that_passes(lost: set[int], asked: int, status: str) -> None:
    async def body() -> tuple[str, int]:
        grader = Grader(graders=1)
        worker = Failing(grader._idle.get_nowait(), lost)
        grader._idle.put_nowait(cast(GraderWorker, worker))
        try:
            return (await grader.grade(TASK, HIDDEN, FIXED)).status, worker.asked
        finally:
            await grader.close()

    assert asyncio.run(body()) == (status, asked)


SHARED_MEMORY = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
made = [libc.shmget(77, 4096, 0o1666), libc.semget(77, 1, 0o1666), libc.msgget(77, 0o1666)]
def add(a, b):
    return a + b if made == [-1, -1, -1] else 0
"""


def test_no_memory_outlives_a_grading() -> None:
    """Segments of System V belong to no process: nothing would end them between two gradings."""

    async def body() -> str:
        grader = Grader(graders=1)
        try:
            return str(await grader.grade(TASK, HIDDEN, Diff(files={"m.py": SHARED_MEMORY.encode()})))
        finally:
            await grader.close()

    assert "status='resolved'" in asyncio.run(body())
