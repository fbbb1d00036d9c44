"""From what the runs of a suite reported to a verdict. Pure, and on the trusted side."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.grading.suite_plan import Run
from sandbox.grading.verdict import Status

_PHASES = ("setup", "call", "teardown")
_OUTCOMES = ("passed", "failed", "skipped", "xfail")
_FAILED = 1  # pytest's exit code of a run in which tests failed
Reports = dict[str, dict[str, str]]  # node id → phase → outcome


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`contradictions`: falsified tests that passed although the same test, as it is, passed too.

    `unsure`: a test passed in one run and failed in another; what falsified tests left may have disturbed it.
    """

    status: Status
    detail: str
    contradictions: frozenset[str] = frozenset()
    unsure: bool = False


def judge_suite(runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> Finding:
    """Resolved only if every expected id passed in all its phases and every falsified one failed."""
    reports: list[Reports] = []
    for run, result in zip(runs, results, strict=False):
        try:
            reports.append(parse(result["records"], run))
        except (ValueError, RecursionError) as error:
            return Finding(status="tampering", detail=f"forged records of {run.path}: {error}")
        if not result["intact"]:
            return Finding(status="tampering", detail=f"hidden tests were rewritten in the run of {run.path}")
    passed = {
        each for run, made in zip(runs, reports, strict=False) for each in run.passing if _passed(made, each)
    }
    if lies := _contradictions(runs, reports, passed):
        return Finding(
            status="tampering",
            detail=f"{min(lies)} must fail and passed",
            contradictions=lies,
        )
    return _verdict(runs, results, reports, passed)


def parse(records: str, run: Run) -> Reports:
    """Outcomes by node id and phase. Raises `ValueError` for what our reporter would not have written."""
    reports: Reports = {each: {} for each in run.ids}
    for line in records.split("\n")[:-1]:  # what follows the last newline was cut by the end of the run
        match json.loads(line):
            case [str(nonce), str(name), "part", str(outcome)] if nonce == run.nonce and name in reports:
                if outcome == "failed":
                    reports[name]["part"] = outcome
            case [str(nonce), str(name), str(phase), str(outcome)] if (
                nonce == run.nonce and name in reports and phase in _PHASES and outcome in _OUTCOMES
            ):
                if phase in reports[name]:
                    raise ValueError(f"{name} has two records of its {phase}")
                reports[name][phase] = outcome
            case strange:
                raise ValueError(f"unexpected record {str(strange)[:200]}")
    return reports


def _passed(reports: Reports, name: str) -> bool:
    return reports[name] == dict.fromkeys(_PHASES, "passed")


def _failed(reports: Reports, name: str) -> bool:
    """Failed where a falsified test fails: in its body, between a set-up and an end without fault."""
    report = reports[name]
    return report.get("call") == "failed" and report.get("setup") == report.get("teardown") == "passed"


def _contradictions(runs: Sequence[Run], reports: Sequence[Reports], passed: set[str]) -> frozenset[str]:
    elsewhere = frozenset().union(*(run.passing for run in runs))
    return frozenset(
        each
        for run, made in zip(runs, reports, strict=False)
        for each in run.failing
        # A canary has no other form: nothing excuses its success.
        if _passed(made, each) and (each in passed or each not in elsewhere)
    )


def _verdict(
    runs: Sequence[Run],
    results: Sequence[dict[str, Any]],
    reports: Sequence[Reports],
    passed: set[str],
) -> Finding:
    for run, result, made in zip(runs, results, reports, strict=False):
        if result["ended"] != "ended":
            return Finding(status="unresolved", detail=_ending(run, result))
        for each in sorted(run.passing):
            if not _passed(made, each):
                detail = f"{each}: {_shown(made[each], result)}"
                return Finding(status="unresolved", detail=detail, unsure=each in passed)
        for each in sorted(run.failing):
            if not _failed(made, each):
                return Finding(status="unresolved", detail=f"{each} must fail: {_shown(made[each], result)}")
        if result["status"] != (_FAILED if run.failing else 0):
            return Finding(status="unresolved", detail=f"{run.path} ended with status {result['status']}")
        if not result["clean"]:
            return Finding(status="unresolved", detail=f"{run.path} left processes that could not be ended")
    if len(results) != len(runs):
        return Finding(status="unresolved", detail=f"expected {len(runs)} runs, got {len(results)}")
    count = len({each for run in runs for each in run.passing})
    return Finding(status="resolved", detail=f"{count} tests passed")


def _ending(run: Run, result: dict[str, Any]) -> str:
    reason = {"timeout": "tests timed out", "flood": "tests gave too much output"}.get(result["ended"])
    return f"{run.path}: {reason or 'the run was killed'}"


def _shown(report: dict[str, str], result: dict[str, Any]) -> str:
    said = " ".join(f"{phase} {outcome}" for phase, outcome in report.items())
    return said or f"no report; {result['log'].strip()[-300:]}"
