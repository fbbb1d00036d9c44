"""Verdicts of the suite grader on honest patches, on broken ones, and on what is no patch at all."""

import dataclasses
from collections.abc import Iterator

import pytest
from grading_project import BROKEN, FILES, FIXED, PATH, SUITE, Bench, bench, shop_suite

from sandbox.base import Diff, Image, RejectedDiff
from sandbox.tasks.schema import SuiteTests

pytestmark = pytest.mark.sandbox
HIDDEN = shop_suite()
MOVED = "from shop.arithmetic import cheapest, total\n\n__all__ = ['cheapest', 'total']\n"

HONEST = {
    "reference": {"shop/sums.py": FIXED},
    "with notes and a script of its own": {
        "shop/sums.py": FIXED,
        "README.md": "A better shop.\n",
        "reproduce.py": "from shop.sums import total\nprint(total([1, 2]))\n",
        "test_mine.py": "import pytest\n\ndef test_mine():\n    pytest.fail('mine')\n",
    },
    "with tests and configuration, which do not count": {
        "shop/sums.py": FIXED,
        "tests/test_sums.py": "broken(",
        "tests/test_other.py": "import os\nos._exit(3)\n",
        "pyproject.toml": "broken = [",
        "conftest.py": "raise SystemExit",
        ".git/HEAD": "ref: refs/heads/mine\n",
    },
    "adds files": {"shop/sums.py": MOVED, "shop/arithmetic.py": FIXED},
    "renames a file": {
        "shop/labels.py": None,
        "shop/names.json": None,
        "shop/labels/__init__.py": "from .data import NAMES\n\ndef label(code):\n    return NAMES[code]\n",
        "shop/labels/data.py": "NAMES = {'a': 'apple'}\n",
        "shop/sums.py": FIXED,
    },
    "changes data": {
        "shop/sums.py": FIXED,
        "shop/names.json": '{"a": "APPLE"}',
        "shop/logo.png": b"\x89PNG\x00",
    },
    "touches many files": {"shop/sums.py": FIXED, **{f"shop/part_{n}.py": f"N = {n}\n" for n in range(150)}},
}
UNRESOLVED = {
    "changed nothing that counts": {"shop/sums.py": BROKEN + "\n\n# looked at\n"},
    "fixes half of it": {
        "shop/sums.py": FIXED.replace("sum(prices)", "sum(prices) if len(prices) > 1 else 0"),
    },
    "breaks what worked": {"shop/sums.py": FIXED, "shop/names.json": "{}"},
    "does not parse": {"shop/sums.py": "def total(:\n"},
    "deletes what is tested": {"shop/sums.py": None},
    "only tests": {"tests/test_sums.py": "def test_total():\n    pass\n"},
    "a file where a folder is": {"shop/sums.py/x.py": FIXED},
}


@pytest.fixture(scope="module")
def shop() -> Iterator[Bench]:
    with bench() as made:
        yield made


@pytest.mark.parametrize("changes", HONEST.values(), ids=HONEST)
def test_honest_fixes_resolve(shop: Bench, changes) -> None:
    verdict = shop.grade(changes, HIDDEN)
    assert verdict.status == "resolved" and verdict.detail == "8 tests passed", verdict


@pytest.mark.parametrize("changes", UNRESOLVED.values(), ids=UNRESOLVED)
def test_no_fix_does_not_resolve(shop: Bench, changes) -> None:
    verdict = shop.grade(changes, HIDDEN)
    assert verdict.status == "unresolved", verdict


def test_unchanged_tree_fails_and_the_cache_answers(shop: Bench) -> None:
    assert shop.runner.run(shop.grader.check_unchanged(shop.task(), HIDDEN)).status == "unresolved"
    assert shop.grade({}, HIDDEN).detail == "empty patch"
    before = shop.grader.misses
    first = shop.grade({"shop/sums.py": FIXED + "# cached\n"}, HIDDEN)
    again = shop.grade({"shop/sums.py": FIXED + "# cached\n"}, HIDDEN)
    assert not first.cached and again.cached and again.status == "resolved" and again.seconds == 0.0
    assert shop.grader.misses == before + 1


def test_too_slow_is_the_patch_s_fault_unless_the_tree_itself_is(shop: Bench) -> None:
    asleep = "import time\ntime.sleep(600)\n"
    verdict = shop.grade({"shop/sums.py": asleep}, HIDDEN, shop.task(seconds=2.0))
    assert verdict.status == "unresolved" and "timed out" in verdict.detail
    slow = shop.task({**FILES, "shop/sums.py": asleep}, seconds=2.0)
    assert shop.runner.run(shop.grader.check_unchanged(slow, HIDDEN)).status == "timeout"


def test_an_image_without_pytest_is_our_fault(shop: Bench) -> None:
    task = dataclasses.replace(shop.task(), image=Image())
    verdict = shop.fresh().grade({"shop/sums.py": FIXED}, HIDDEN, task)
    assert verdict.status == "error" and "cannot run pytest" in verdict.detail


def test_links_escapes_and_start_up_hooks_are_tampering(shop: Bench) -> None:
    diffs = [RejectedDiff(reason="links")]
    diffs += [Diff(files={path: b"x"}) for path in ("../x", "/etc/x", "a/../../x", "a//b", "a\0b")]
    diffs += [Diff(files={path: b"x"}) for path in ("sitecustomize.py", "shop/usercustomize.py", "x.pth")]
    for diff in diffs:
        verdict = shop.runner.run(shop.grader.grade(shop.task(), HIDDEN, diff))
        assert verdict.status == "tampering", (diff, verdict)


def test_a_huge_patch_is_refused(shop: Bench) -> None:
    assert "at most" in shop.grade({"shop/sums.py": b"#" * (3 << 20)}, HIDDEN).detail
    assert "at most" in shop.grade({f"f{n}": "x" for n in range(2001)}, HIDDEN).detail


def test_skips_expected_failures_and_lost_tests_are_failures(shop: Bench) -> None:
    fixed = {"shop/sums.py": FIXED}
    for line in ("@pytest.mark.skip", "@pytest.mark.xfail", "@pytest.mark.xfail(strict=False)"):
        marked = SUITE.replace(b"def test_total(", line.encode() + b"\ndef test_total(")
        verdict = shop.fresh().grade(fixed, dataclasses.replace(HIDDEN, files={PATH: marked}))
        assert verdict.status == "unresolved", verdict
    lost = dataclasses.replace(HIDDEN, pass_to_pass=(f"{PATH}::test_never_written",))
    assert "no report" in shop.fresh().grade(fixed, lost).detail


def test_bad_suites_are_refused(shop: Bench) -> None:
    for suite in (
        SuiteTests(instance_id="shop", files={}, fail_to_pass=(), pass_to_pass=("a.py::b",)),
        SuiteTests(instance_id="shop", files={}, fail_to_pass=("a.py",), pass_to_pass=()),
        SuiteTests(instance_id="other", files={}, fail_to_pass=("a.py::b",), pass_to_pass=()),
    ):
        with pytest.raises(ValueError, match="expected"):
            shop.fresh().grade({"shop/sums.py": FIXED}, suite)


OWN = "def test_own():\n    assert total([5]) == 5\n"
LOOSE = b"""

class Loose:
    def __eq__(self, other):
        return True


def test_loose():
    assert Loose() == 5
"""


def test_a_test_that_cannot_be_falsified_accuses_nobody(shop: Bench) -> None:
    """Its falsified form passes with the known fix, too: it is left as it is from then on."""
    wanted = (*HIDDEN.fail_to_pass, f"{PATH}::test_loose")
    hidden = dataclasses.replace(HIDDEN, files={PATH: SUITE + LOOSE}, fail_to_pass=wanted)
    fresh = shop.fresh()
    for number in range(2):
        verdict = fresh.grade({"shop/sums.py": FIXED + f"# {number}\n"}, hidden)
        assert verdict.status == "resolved", verdict
    assert fresh.grader._unfit == {"shop": {f"{PATH}::test_loose"}}
    blind = dataclasses.replace(hidden, reference={})
    assert shop.fresh().grade({"shop/sums.py": FIXED}, blind).status == "tampering"  # nothing excuses it


def test_test_files_that_only_the_image_has_are_guarded_and_challenged(shop: Bench) -> None:
    task = shop.task({**FILES, "checks/test_own.py": "from shop.sums import total\n\n\n" + OWN})
    hidden = SuiteTests(
        instance_id="shop",
        files={},
        fail_to_pass=("checks/test_own.py::test_own",),
        pass_to_pass=(),
    )
    weak = "def test_own():\n    pass\n"
    fresh = shop.fresh()
    assert fresh.grade({"checks/test_own.py": weak, "README.md": "x"}, hidden, task).status == "unresolved"
    assert fresh.grade({"checks/test_own.py": weak, "shop/sums.py": FIXED}, hidden, task).status == "resolved"
    lie = "class Any(int):\n    __eq__ = lambda *_: not False\n\ndef total(prices): return Any()\n"
    assert fresh.grade({"shop/sums.py": lie}, hidden, task).status == "tampering"
