"""What the suite grader does with findings that may be nobody's fault."""

import asyncio
import dataclasses
from typing import cast

import pytest
from grading_project import FIXED, shop_suite, shop_task

from sandbox.base import Diff, Image, SandboxError, SandboxProvider
from sandbox.grading.suite import SuiteGrader
from sandbox.grading.suite_judge import Finding
from sandbox.grading.suite_trial import Trial

GOOD = Finding(status="resolved", detail="")
BAD = Finding(status="unresolved", detail="")
UNSURE = Finding(status="unresolved", detail="", unsure=True)
LIE = Finding(status="tampering", detail="", contradictions=frozenset({"x"}))
LIES = Finding(status="tampering", detail="", contradictions=frozenset({"x", "y"}))
HIDDEN = shop_suite()


@pytest.mark.parametrize(
    ("found", "asked", "status"),
    [
        ([GOOD], "p", "resolved"),
        ([BAD], "p", "unresolved"),
        ([UNSURE, GOOD], "pp", "resolved"),
        ([UNSURE, UNSURE], "pp", "unresolved"),
        ([LIE, GOOD], "pr", "tampering"),  # the known fix contradicts nothing
        ([LIES, LIE], "pr", "tampering"),  # one of two is excused
        ([LIE, LIES, GOOD], "prp", "resolved"),  # all are: without them the patch is fine
        ([UNSURE, LIE, LIE, BAD], "pprp", "unresolved"),
        ([SandboxError("lost")], "p", "error"),
    ],
)
def test_who_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, found: list[Finding | SandboxError], asked: str, status: str
) -> None:
    """`asked`: p for a run of the patch, r for one of the known fix."""
    left, runs = list(found), []

    async def run(self, patch, stages, *, ours: bool = False) -> Finding:
        runs.append("r" if ours else "p")
        answer = left.pop(0)
        if isinstance(answer, SandboxError):
            raise answer
        return answer

    monkeypatch.setattr(Trial, "run", run)
    grader = SuiteGrader(cast(SandboxProvider, None))
    diff = Diff(files={"shop/sums.py": FIXED.encode()})
    verdict = asyncio.run(grader.grade(shop_task(Image()), HIDDEN, diff))
    assert (verdict.status, "".join(runs), left) == (status, asked, [])


def test_without_a_known_fix_nothing_excuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self, patch, stages, *, ours: bool = False) -> Finding:
        assert not ours
        return LIE

    monkeypatch.setattr(Trial, "run", run)
    hidden = dataclasses.replace(HIDDEN, reference={})
    grader = SuiteGrader(cast(SandboxProvider, None))
    diff = Diff(files={"shop/sums.py": FIXED.encode()})
    assert asyncio.run(grader.grade(shop_task(Image()), hidden, diff)).status == "tampering"
