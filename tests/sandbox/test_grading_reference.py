"""Reference mode: the benchmark's reading of pytest's summary, faults included, beside the strict verdict."""

import dataclasses
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from attacks.outside import LIE
from grading_project import BROKEN, FAILING, FIXED, PASSING, Bench, bench, shop_suite
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.base import Diff
from sandbox.grading.reference import git_patch, same_results, statuses
from sandbox.grading.reference_grader import ReferenceGrader, compare

EXPECTED = {".".join(each.split("::")[1:]): "PASSED" for each in (*FAILING, *PASSING)}
HIDDEN = dataclasses.replace(shop_suite(), expected=EXPECTED)
RULE = "=" * 20


def log(*lines: str) -> str:
    return "\n".join(["collected", f"{RULE} short test summary info {RULE}", *lines])


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["PASSED t/a.py::test_x"], {"test_x": "PASSED"}),
        (["FAILED t/a.py::C::test_y - assert 1 == 2"], {"C.test_y": "FAILED"}),
        (["ERROR t/a.py::test_x - RuntimeError"], {"test_x": "ERROR"}),
        (["\x1b[32mPASSED\x1b[0m t/a.py::\x1b[1mtest_x\x1b[0m"], {"test_x": "PASSED"}),
        (["PASSED t/a.py::test_x[a - b]"], {"test_x[a": "PASSED"}),
        (["SKIPPED [1] t/a.py:3: later", "XFAIL t/a.py::test_x", "== 1 passed in 0.1s =="], {}),
        # Its faults:
        (["FAILED t/a.py::test_x - assert 'PASSED'"], {"test_x": "PASSED"}),
        (["PASSED t/a.py::test_x", "FAILED t/b.py::test_x"], {"test_x": "FAILED"}),
        (["PASSED"], {"": "PASSED"}),
        (["PASSED t/a.py::test_x", "short test summary info", "FAILED t/a.py::test_x"], {"test_x": "PASSED"}),
    ],
)
def test_statuses_as_the_benchmark_reads_them(lines: list[str], found: Mapping[str, str]) -> None:
    assert statuses(log(*lines)) == found


def test_no_summary_is_no_result() -> None:
    assert statuses("PASSED t/a.py::test_x\n") == {}
    assert same_results({}, {"test_x": "PASSED"}) == (False, "expected 1 entries, got 0")


def test_every_entry_counts_and_expected_failures_may_fail() -> None:
    expected = {"a": "PASSED", "b - reason": "FAILED", "\x1b[31mc\x1b[0m": "ERROR"}
    assert same_results({"a": "PASSED", "b": "FAILED", "c": "ERROR"}, expected)[0]
    assert not same_results({"a": "PASSED", "b": "PASSED", "c": "ERROR"}, expected)[0]
    assert not same_results({"a": "PASSED", "b": "FAILED", "d": "ERROR"}, expected)[0]
    assert not same_results({"a": "PASSED", "b": "FAILED"}, expected)[0]


TEXT = st.lists(st.sampled_from(["a\n", "b\n", "\n", " c\n", "a \n", "é\n", "x\r\n", "\f\n"]), max_size=12)
CONTENT = st.none() | st.tuples(TEXT, st.sampled_from(["", "end"])).map(
    lambda it: ("".join(it[0]) + it[1]).encode()
)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["m.py", "p/q.py", "n o.txt"]), st.tuples(CONTENT, CONTENT), min_size=1)
)
def test_git_applies_what_we_write(files: dict[str, tuple[bytes | None, bytes | None]]) -> None:
    before = {path: old for path, (old, _) in files.items() if old is not None}
    after = {path: new for path, (_, new) in files.items() if before.get(path) != new}
    if not after:
        return
    with tempfile.TemporaryDirectory() as folder:
        for path, content in before.items():
            (Path(folder) / path).parent.mkdir(exist_ok=True)
            (Path(folder) / path).write_bytes(content)
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        subprocess.run(command, cwd=folder, input=git_patch(before, after), check=True, capture_output=True)
        kept = {**before, **after}
        found = {path: (Path(folder) / path) for path in kept}
        assert {path: at.read_bytes() if at.exists() else None for path, at in found.items()} == kept


def test_binary_files_are_left_out() -> None:
    assert git_patch({"a": b"x\n"}, {"a": b"\0", "b": b"\0\1", "c": b"c\n"}).count(b"diff --git") == 1


@pytest.fixture(scope="module")
def shop() -> Iterator[Bench]:
    with bench() as made:
        yield made


# name → (patch, strict verdict, reference verdict)
CASES = {
    "a fix": ({"shop/sums.py": FIXED}, "resolved", "resolved"),
    "no fix": ({"shop/sums.py": BROKEN + "# same\n"}, "unresolved", "unresolved"),
    "a failure that says PASSED": (
        {"shop/sums.py": BROKEN.replace("return sum(prices[1:])", "raise AssertionError('PASSED')")},
        "unresolved",
        "resolved",
    ),
    "reports turned by a conftest": ({"conftest.py": LIE, "notes.txt": "x\n"}, "unresolved", "resolved"),
    "a summary printed first": (
        {
            "shop/sums.py": BROKEN
            + "print('short test summary info')\n"
            + "".join(f"print('PASSED x::{name}')\n" for name in EXPECTED)
            + "print('short test summary info')\n"
            + "raise RuntimeError\n"
        },
        "unresolved",
        "resolved",
    ),
    "a test of its own in the hidden file": (
        {"tests/test_sums.py": "x = 1\n", "shop/sums.py": FIXED},
        "resolved",
        "unresolved",
    ),
}


@pytest.mark.sandbox
@pytest.mark.parametrize("name", CASES)
def test_both_modes_and_where_they_disagree(shop: Bench, name: str) -> None:
    changes, strict, reference = CASES[name]
    diff = Diff(files={path: text.encode() for path, text in changes.items()})
    both = (shop.grader, ReferenceGrader(shop.provider), shop.task(), HIDDEN, diff)
    found = shop.runner.run(compare(*both))
    assert (found.strict.status, found.reference.status) == (strict, reference), str(found)
    assert found.agree == (strict == reference)
    assert ("DISAGREE" in str(found)) == (strict != reference) and str(found).startswith("shop: ")


@pytest.mark.sandbox
def test_reference_mode_needs_expected_statuses(shop: Bench) -> None:
    grader = ReferenceGrader(shop.provider)
    with pytest.raises(ValueError, match="expected"):
        shop.runner.run(grader.grade(shop.task(), shop_suite(), Diff(files={"a": b"b"})))
    assert shop.runner.run(grader.grade(shop.task(), HIDDEN, Diff())).status == "unresolved"
