"""Gradings on a machine that has too much to do."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from attacks.inside import ENDINGS, LIARS, REPORTS
from grading_project import BROKEN, FIXED, Bench, bench, shop_suite

from sandbox.base import Diff
from sandbox.grading import suite_driver
from sandbox.grading.suite import SuiteGrader

HIDDEN = shop_suite()
CHEAPEST = BROKEN[BROKEN.index("def cheapest") :]
SOURCES = (
    FIXED,
    BROKEN,
    FIXED.replace("sum(prices)", "sum(prices) + 0"),
    BROKEN.replace("prices[1:]", "prices[:-1]"),
    REPORTS["every report becomes passed"] + BROKEN,
    ENDINGS["os._exit(0) at import"] + BROKEN,
    LIARS["a number equal to everything"] + CHEAPEST,
    "def total(:\n",
)
SPIN = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass\n"


@pytest.fixture(scope="module")
def shop() -> Iterator[Bench]:
    with bench() as made:
        yield made


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.usefixtures("without_scan")
def test_sixty_four_at_once_are_judged_as_one_by_one(shop: Bench) -> None:
    async def verdicts(at_once: int, copies: int) -> list[str]:
        grader = SuiteGrader(shop.provider, at_once=at_once)
        diffs = [
            Diff(files={"shop/sums.py": f"{source}# {copy}\n".encode()})
            for copy in range(copies)
            for source in SOURCES
        ]
        task = shop.task(seconds=30.0)
        return [each.status for each in await asyncio.gather(*(grader.grade(task, HIDDEN, d) for d in diffs))]

    serial = shop.runner.run(verdicts(1, 1))
    assert serial[:4] == ["resolved", "unresolved"] * 2 and "resolved" not in serial[4:]
    assert shop.runner.run(verdicts(64, 8)) == serial * 8


@pytest.fixture
def without_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.grading.suite_trial.screen", lambda patch, originals: (patch, []))


def test_waiting_for_a_processor_costs_no_time() -> None:
    """Two processes share one processor: each waits for about half of the time."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        command = [sys.executable, "-c", SPIN.format(seconds=1.5)]
        spinning = [subprocess.Popen(command) for _ in range(2)]
        time.sleep(1.0)
        clock = suite_driver.Clock(0.5)
        clock.look(spinning[0].pid)
        left = clock.left()
    finally:
        os.sched_setaffinity(0, processors)
        for process in spinning:
            process.wait()
    assert 0.6 < left < 2.0, left  # of 0.5 seconds


def test_an_idle_run_has_no_more_than_its_time() -> None:
    clock = suite_driver.Clock(0.05)
    time.sleep(0.1)
    clock.look(os.getppid())  # its waits, if any, are bounded
    assert clock.left() <= 0.1
    assert suite_driver.waited(2**22 + 1) == 0.0  # nobody has that id
