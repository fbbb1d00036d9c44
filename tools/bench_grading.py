"""Prints the CPU time of one grading: of a tiny generated task, and of a small project with a pytest suite.

    python tools/bench_grading.py [--gradings 200] [--suites 10]

CPU time is that of all processes, this one included, per grading beyond the start: the difference of a long
and a short series. The claim: a tiny task takes at most 20 ms. Exit status 1 if it fails.
"""

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from sandbox.base import Diff, Image
from sandbox.grading.grader import Grader
from sandbox.grading.suite import SuiteGrader
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.schema import Case, HiddenTests, SuiteTests, TaskSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sandbox"))

from grading_project import (  # pyright: ignore[reportMissingImports]
    FIXED,
    build_layer,
    shop_suite,
    shop_task,
)

LIMIT = 0.020  # seconds
TASK = TaskSpec(
    instance_id="tiny", problem_statement="", files={"m.py": "def add(a, b):\n    return a - b\n"}
)
HIDDEN = HiddenTests(
    instance_id="tiny",
    module="m.py",
    cases=tuple(Case(expression=f"add({n}, {n})", expected=2 * n) for n in range(8)),
)
Series = Callable[[int], Coroutine[None, None, None]]


async def tiny(count: int) -> None:
    """Grades `count` different fixes one after the other."""
    grader = Grader(graders=1)
    await grader.start()
    for number in range(count):
        source = f"def add(a, b):\n    return a + b  # {number}\n"
        verdict = await grader.grade(TASK, HIDDEN, Diff(files={"m.py": source.encode()}))
        assert verdict.status == "resolved", verdict
    await grader.close()


async def suites(count: int, hidden: SuiteTests, image: Image) -> None:
    """The same for a project of a few files with eight hidden tests."""
    provider = NamespaceProvider()
    grader = SuiteGrader(provider, at_once=1)
    for number in range(count):
        diff = Diff(files={"shop/sums.py": f"{FIXED}# {number}\n".encode()})
        verdict = await grader.grade(shop_task(image), hidden, diff)
        assert verdict.status == "resolved", verdict
    await provider.close()


def used() -> float:
    """CPU seconds of this process and of all that ended below it."""
    ended, own = (resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
    return ended.ru_utime + ended.ru_stime + own.ru_utime + own.ru_stime


def per_grading(series: Series, count: int) -> tuple[float, float]:
    """(CPU, wall) seconds of one grading."""
    spent = []
    for length in (count // 10 + 1, count + count // 10 + 1):
        before, started = used(), time.monotonic()
        asyncio.run(series(length))
        spent.append((used() - before, time.monotonic() - started))
    (short, long) = spent
    return (long[0] - short[0]) / count, (long[1] - short[1]) / count


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gradings", type=int, default=200)
    parser.add_argument("--suites", type=int, default=10)
    options = parser.parse_args()
    cpu, wall = per_grading(tiny, options.gradings)
    print(f"tiny task: {cpu * 1e3:.1f} ms CPU, {wall * 1e3:.1f} ms wall ({options.gradings} gradings)")
    with tempfile.TemporaryDirectory(prefix="bench-grading-") as folder:
        build_layer(Path(folder))
        image = Image(layers={"/opt/env": Path(folder)}, environment={"PYTHONPATH": "/opt/env"})
        suite_cpu, suite_wall = per_grading(lambda n: suites(n, shop_suite(), image), options.suites)
    print(f"suite: {suite_cpu * 1e3:.0f} ms CPU, {suite_wall * 1e3:.0f} ms wall ({options.suites} gradings)")
    if cpu > LIMIT:
        sys.exit(f"expected at most {LIMIT * 1e3:.0f} ms of CPU for a tiny task, got {cpu * 1e3:.1f}")


if __name__ == "__main__":
    main()
