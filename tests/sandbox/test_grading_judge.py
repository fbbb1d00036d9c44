"""What the trusted side makes of records, patches and findings. Nothing here runs."""

import ast
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import pytest
from grading_project import shop_suite
from hypothesis import given
from hypothesis import strategies as st

from sandbox.base import Diff, RejectedDiff
from sandbox.grading import suite_driver
from sandbox.grading.patch import BadPatchError, SuspiciousPatchError
from sandbox.grading.suite_drive import authentic
from sandbox.grading.suite_driver import MARK
from sandbox.grading.suite_judge import judge_suite
from sandbox.grading.suite_patch import select, without_new_tests
from sandbox.grading.suite_plan import Run

PHASES = ("setup", "call", "teardown")
FIRST = Run(
    path="t.py", nonce="n1", content=None, passing=frozenset({"a", "b"}), failing=frozenset({"canary"})
)
HALF = Run(path="t.py", nonce="n2", content=None, passing=frozenset({"b"}), failing=frozenset({"a"}))
OTHER = Run(path="t.py", nonce="n3", content=None, passing=frozenset({"a"}), failing=frozenset({"b"}))
RUNS = [FIRST, HALF, OTHER]


def record(run: Run, name: str, phase: str, outcome: str) -> list[str]:
    return [run.nonce, name, phase, outcome]


def honest(run: Run) -> list[list[str]]:
    """Records of a run on code that works."""
    outcomes = {**dict.fromkeys(run.passing, "passed"), **dict.fromkeys(run.failing, "failed")}
    return [
        record(run, name, phase, outcome if phase == "call" else "passed")
        for name, outcome in outcomes.items()
        for phase in PHASES
    ]


def result(records: list[Any], **changes: Any) -> dict[str, Any]:
    text = "".join(json.dumps(each) + "\n" for each in records)
    usual = {"records": text, "ended": "ended", "status": 1, "intact": True, "clean": True, "log": "said"}
    return {**usual, **changes}


def verdict(*records: list[Any], **changes: Any) -> tuple[str, str]:
    results = [result(each, **changes) for each in records]
    finding = judge_suite(RUNS, results)
    return finding.status, finding.detail


def test_the_honest_pattern_resolves() -> None:
    assert verdict(*map(honest, RUNS)) == ("resolved", "2 tests passed")


@given(st.data())
def test_nothing_but_the_honest_pattern_resolves(data: st.DataObject) -> None:
    """One outcome changed, one record lost or one said twice: never resolved."""
    records = [honest(run) for run in RUNS]
    at = data.draw(st.integers(0, 2))
    line = data.draw(st.integers(0, len(records[at]) - 1))
    how = data.draw(st.sampled_from(["turned", "lost", "twice", "skipped", "xfail", "part"]))
    old = records[at][line]
    if how == "twice":
        records[at].insert(line, old)
    elif how == "lost":
        del records[at][line]
    elif how == "part":
        records[at].append([*old[:2], "part", "failed"])
        if old[1] in RUNS[at].failing:
            return  # a failed part of what must fail is no news
    else:
        other = {"turned": "failed" if old[3] == "passed" else "passed"}.get(how, how)
        records[at][line] = [*old[:3], other]
    assert verdict(*records)[0] in ("unresolved", "tampering")


@given(st.permutations(honest(FIRST)))
def test_the_order_of_records_is_free(records: list[list[str]]) -> None:
    assert verdict(records, honest(HALF), honest(OTHER))[0] == "resolved"


@pytest.mark.parametrize(
    ("changes", "status", "detail"),
    [
        ({"ended": "timeout"}, "unresolved", "timed out"),
        ({"ended": "flood"}, "unresolved", "too much output"),
        ({"ended": "killed"}, "unresolved", "killed"),
        ({"status": 0}, "unresolved", "status 0"),
        ({"status": -9}, "unresolved", "status -9"),
        ({"clean": False}, "unresolved", "could not be ended"),
        ({"intact": False}, "tampering", "rewritten"),
    ],
)
def test_how_a_run_ended_counts(changes: Mapping[str, Any], status: str, detail: str) -> None:
    found = verdict(*map(honest, RUNS), **changes)
    assert found[0] == status and detail in found[1]


def test_all_passed_is_a_contradiction_and_a_lost_run_no_success() -> None:
    forged = [[record(run, name, phase, "passed") for name in run.ids for phase in PHASES] for run in RUNS]
    finding = judge_suite(RUNS, [result(each) for each in forged])
    assert finding.status == "tampering" and finding.contradictions == {"a", "b", "canary"}
    assert verdict(honest(FIRST), honest(HALF))[0] == "unresolved"
    # A falsified test may pass where the true one fails: the code is wrong, nobody lied.
    wrong = [[record(run, n, p, "passed") for n in run.ids if n == "a" for p in PHASES] for run in (HALF,)]
    finding = judge_suite([HALF, OTHER], [result(wrong[0])])
    assert finding.status == "unresolved" and not finding.contradictions


def test_a_test_that_passed_and_failed_leaves_a_doubt() -> None:
    second = honest(HALF)
    for each in second:
        if each[1:3] == ["b", "call"]:
            each[3] = "failed"
    finding = judge_suite(RUNS, [result(each) for each in (honest(FIRST), second, honest(OTHER))])
    assert finding.status == "unresolved" and finding.unsure
    first = [each for each in honest(FIRST) if each[1] != "b"]
    assert not judge_suite(RUNS, [result(first)]).unsure


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x), max_leaves=5)
)
def test_strange_records_are_forged(strange: object) -> None:
    assert verdict([*honest(FIRST), strange])[0] == "tampering"


RECORD = '["n0", "a", "call", "passed"]'  # a nonce of nobody's


@pytest.mark.parametrize("line", ["[" * 100_000, "{", RECORD.replace("n0", "n1") + "x", RECORD])
def test_lines_that_are_no_records(line: str) -> None:
    assert judge_suite(RUNS, [{**result([]), "records": line + "\n"}]).status == "tampering"


def test_only_the_key_makes_an_answer_authentic(capsys: pytest.CaptureFixture[str]) -> None:
    key, other = "ab" * 32, "cd" * 32
    suite_driver.answer(key, {"results": [1]})
    output = f"noise\n{capsys.readouterr().out}more\n"
    assert authentic(output, key) == {"results": [1]}
    assert authentic(output, other) is None
    assert authentic(f"{MARK}e30=:{'0' * 64}\n{MARK}\n{MARK}:\u00e9", key) is None
    assert authentic(output + f"{MARK}e30=:{'0' * 64}\n", key) == {"results": [1]}


LEFT_OUT = [
    *("tests/test_sums.py", "tests/data/x.json", "tests/__init__.py", "conftest.py", "shop/conftest.py"),
    *("pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sub/pyproject.toml", ".git/config"),
    *("vendor/.git/HEAD", ".venv/lib/site-packages/x.py", "build/x.so", "shop/__pycache__/sums.pyc"),
    *("shop.egg-info/entry_points.txt", "x-1.dist-info/RECORD", ".coveragerc"),
]
KEPT = [
    *("shop/sums.py", "shop/test.py", "setup.py", "shop/testing/tool.py", "docs/tests.md", "data/logo.png"),
    *("shop/contest.py", "requirements.txt", "shop/tests_helper.py", "src/venv.py", "attests/x.py"),
]


def test_what_crosses() -> None:
    patch = select(shop_suite(), Diff(files=dict.fromkeys((*LEFT_OUT, *KEPT), b"x")))
    assert set(patch.files) == set(KEPT) and set(patch.left_out) == set(LEFT_OUT)
    assert set(without_new_tests(patch, {"shop/test.py"}).files) == set(KEPT)
    assert set(KEPT) - set(without_new_tests(patch, ()).files) == {"shop/test.py"}


@given(st.lists(st.sampled_from(["a", "b", "..", ".", "", "c.py", "x\0"]), min_size=1, max_size=5))
def test_paths_stay_inside(parts: list[str]) -> None:
    path = "/".join(parts)
    if all(part and part not in (".", "..") and "\0" not in part for part in parts):
        assert path in select(shop_suite(), Diff(files={path: b""})).files
    else:
        with pytest.raises(SuspiciousPatchError):
            select(shop_suite(), Diff(files={path: b""}))


def test_links_and_size() -> None:
    with pytest.raises(SuspiciousPatchError, match="links"):
        select(shop_suite(), RejectedDiff(reason="links"))
    with pytest.raises(BadPatchError, match="at most"):
        select(shop_suite(), Diff(files={f"{n}.bin": bytes(2 << 20) for n in range(9)}))


@pytest.mark.parametrize("name", ["suite_driver", "suite_template"])
def test_what_runs_inside_reads_as_an_old_python(name: str) -> None:
    source = resources.files("sandbox.grading").joinpath(f"{name}.py").read_text()
    ast.parse(source, feature_version=(3, 7))
