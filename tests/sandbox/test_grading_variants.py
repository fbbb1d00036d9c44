"""Falsified tests: whatever passed as it was fails, and nothing else of a file changes."""

import ast
import contextlib
import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.grading.falsify import falsify, other
from sandbox.grading.suite_plan import Run, by_file, plan
from sandbox.grading.variants import falsified, units
from sandbox.tasks.schema import SuiteTests

HOLDS = [
    "assert 2 + 2 == 4",
    "assert 4 == 2 + 2",
    "assert 'ab'.upper() == 'AB'",
    "assert b'a' + b'b' == b'ab'",
    "assert [1] + [2, 3] == [1, 2, 3]",
    "assert dict(a=1) == {'a': 1}",
    "assert set('ab') == {'a', 'b'}",
    "assert -abs(3) == -3",
    "assert sorted('ba') == sorted('ab')",
    "assert 1 < 2",
    "assert 2 >= 2",
    "assert 'a' in 'abc'",
    "assert 'x' not in 'abc'",
    "assert True in [True, False]",
    "assert 3 in range(10**6)",
    "assert 'b' in iter('abc')",
    "assert None in (None, 1)",
    "assert b'a' in b'abc'",
    "assert 97 in b'abc'",
    "assert (\n        'a'\n        in {'a': 1}\n    )",
    "assert 'abc'.startswith('ab')",
    "assert b'abc'.endswith(b'bc')",
    "assert None is None",
    "assert len is not None",
    "assert not []",
    "assert [0]",
    "assert 1 < 2 < 3",
    "assert 1 == 1 and 2 == 2",
    "assert (\n        2 +\n        2\n    ) == 4, 'four'",
    "assert (2 + 2\n        == 4)",
    "self.assertEqual(2 + 2, 4)",
    "self.assertEqual('a' 'b', 'ab')",
    "self.assertNotEqual(1, 2)",
    "self.assertTrue(1 < 2)",
    "self.assertIn(1, [1])",
    "self.assertIn(\n        (1, 2),\n        [(1, 2), (1, 2, 3)],\n        'why'\n    )",
    "self.assertTrue('abc'.startswith('ab'))",
    "self.assertIsNone(None)",
    "self.assertIsInstance(1, int)",
    "self.assertGreater(2, 1)",
    "self.assertLessEqual(2, 2)",
    "self.assertRegex('abc', 'b')",
    "self.assertAlmostEqual(1.0, 1.0)",
    "self.assertDictEqual(dict(a=1), {'a': 1})",
    "with pytest.raises(ZeroDivisionError):\n        1 / 0",
    "with pytest.raises(LookupError, match='x'):\n        raise KeyError('x')",
    "with self.assertRaises(Own):\n        raise Own",
    "self.assertRaises(ValueError, int, 'x')",
    "with contextlib.nullcontext() as it:\n        assert it is None",
    "with contextlib.nullcontext(1) as it:\n        x = 1\n        self.assertEqual(it, 1)",
]
UNCERTAIN = [
    "pass",
    "x = 1",
    "for x in []:\n        assert x",
    "if False:\n        assert 1 == 1",
    "with contextlib.suppress(AssertionError):\n        assert 1 == 1",
    "with self.subTest():\n        assert 1 == 1",
    "with pytest.raises():\n        pass",
    "with pytest.raises(BaseException):\n        raise KeyError",
    "assert True",
    "assert f'{1}' == str(1)",
    "print(1)",
    "try:\n        assert 1\n    finally:\n        pass",
]


def body(statement: str) -> str:
    head = "def test_it(self=None):\n    y = 0  # kept: é\n"
    return f"{head}    {statement}\n\n\ndef test_after():\n    assert 1\n"


def run(source: str) -> bool:
    """Whether `test_it` passes."""
    import unittest

    names = {"pytest": pytest, "contextlib": contextlib, "Own": type("Own", (ArithmeticError,), {})}
    exec(compile(source, "test", "exec"), names)
    try:
        names["test_it"](unittest.TestCase())
    except Exception:  # noqa: BLE001 (whatever a test raises is its failure)
        return False
    return True


@pytest.mark.parametrize("statement", HOLDS)
@pytest.mark.parametrize("seed", range(5))
def test_what_holds_is_made_to_fail(statement: str, seed: int) -> None:
    source = body(statement)
    (unit,) = units(source.encode(), ["a.py::test_it"])
    changed = falsified(source.encode(), [unit], Random(seed)).decode()
    assert run(source) and not run(changed), changed
    lines, after = source.split("\n"), changed.split("\n")
    assert len(lines) == len(after) and lines[:2] == after[:2] and lines[-4:] == after[-4:]


@pytest.mark.parametrize("statement", UNCERTAIN)
def test_what_may_not_fail_is_left_alone(statement: str) -> None:
    assert units(body(statement).encode(), ["a.py::test_it"]) == []


LITERALS = st.recursive(
    st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(-1e6, 1e6)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


@given(LITERALS, st.integers())
def test_another_literal_is_unequal(value: object, seed: int) -> None:
    node = ast.parse(repr(value), mode="eval").body
    changed = other(node, Random(seed))
    assert changed is not None
    assert ast.literal_eval(ast.unparse(changed)) != value


def test_text_changes_by_more_than_its_case() -> None:
    for seed in range(200):
        changed = other(ast.Constant("Accept: x/1"), Random(seed))
        assert isinstance(changed, ast.Constant) and isinstance(changed.value, str)
        assert changed.value.lower() != "accept: x/1" and len(changed.value) == len("Accept: x/1")


FILE = b"""
import unittest

import pytest
from elsewhere import Base


def test_plain():
    assert 1 == 1


@pytest.mark.parametrize("n", [1, 2])
def test_many(n):
    assert n == n


def test_early(n=0):
    if n:
        return
    assert n == 0


@given(n=1)
def test_drawn(n):
    assert n == 1


def test_twice():
    assert 1 == 1


def test_twice():
    assert 2 == 2


def test_aliased():
    assert 1 == 1


test_alias = test_aliased


class First(unittest.TestCase):
    def test_own(self):
        self.assertEqual(1, 1)

    def test_shared(self):
        self.assertTrue(True)


class Second(First):
    def test_own(self):
        self.assertEqual(2, 2)


class Mixed(Mixin, Second):
    pass


class Lonely:
    def test_mixed_in(self):
        assert 1 == 1


class Heir(Mixin, Lonely):
    pass


class Third(Base):
    def test_mine(self):
        assert 1 == 1


async def test_async():
    assert 1 == 1
"""


def test_units_are_functions_whose_ids_are_certain() -> None:
    ids = [
        *("test_plain", "test_many[1]", "test_many[2]", "test_early", "test_drawn", "test_twice"),
        *("test_aliased", "test_alias", "First::test_own", "First::test_shared", "Second::test_own"),
        *(
            "Second::test_shared",
            "Third::test_mine",
            "Third::test_of_base",
            "Lonely::test_mixed_in",
            "Heir::test_mixed_in",
            "test_async",
            "test_unknown",
        ),
    ]
    found = {
        tuple(each.removeprefix("a.py::") for each in unit.ids)
        for unit in units(FILE, [f"a.py::{each}" for each in ids])
    }
    assert found == {
        ("test_plain",),
        ("test_many[1]", "test_many[2]"),
        ("First::test_own",),
        ("First::test_shared", "Second::test_shared"),
        ("Second::test_own",),
        ("Third::test_mine",),
        ("test_async",),
    }


def test_files_that_cannot_be_read_have_no_units() -> None:
    for content in (b"def test_a(:\n", b"\xff\xfe", b"def test_a():\n    assert 1 == 1\rx = 1\n"):
        assert units(content, ["a.py::test_a"]) == []


def suite(wanted: int, others: int) -> SuiteTests:
    names = [f"test_{n}" for n in range(wanted + others)]
    text = "".join(f"def {name}():\n    assert {n} + 1 == {n + 1}\n\n\n" for n, name in enumerate(names))
    ids = [f"t/test_a.py::{name}" for name in names]
    return SuiteTests(
        instance_id="x",
        files={"t/test_a.py": text.encode()},
        fail_to_pass=tuple(ids[:wanted]),
        pass_to_pass=(*ids[wanted:], "t/test_b.py::test_z"),
    )


@given(st.integers(1, 12), st.integers(0, 20))
def test_a_plan_asks_every_wanted_test_both_ways(wanted: int, others: int) -> None:
    hidden = suite(wanted, others)
    stages = plan(hidden)
    assert [len(stage) for stage in stages] == [2] * len(stages)
    assert len(stages) == {1: 5, 2: 5, 3: 4, 4: 3, 5: 3}.get(wanted, 2)  # few tests: more challenges
    for challenge in stages[1:]:
        _check_challenge(hidden, [*stages[0], *challenge])


def _check_challenge(hidden: SuiteTests, runs: list[Run]) -> None:
    expected = {*hidden.fail_to_pass, *hidden.pass_to_pass}
    assert [run.path for run in runs] == ["t/test_a.py", "t/test_b.py", "t/test_a.py", "t/test_a.py"]
    assert runs[0].passing | runs[1].passing == expected
    failing = [run.failing & expected for run in runs]
    assert not failing[0] and not failing[1]
    assert set(hidden.fail_to_pass) <= failing[2] | failing[3] == runs[2].passing | runs[3].passing
    assert not failing[2] & failing[3] and abs(len(failing[2]) - len(failing[3])) <= 1
    for run in (runs[0], *runs[2:]):
        assert len(run.failing - expected) == 2 and not run.passing & run.failing
        names = {"__name__": "x"}
        exec(compile(run.content or b"", "x", "exec"), names)
        outcomes = {each: _passes(names[each.partition("::")[2]]) for each in run.ids}
        assert outcomes == {**dict.fromkeys(run.passing, True), **dict.fromkeys(run.failing, False)}


def _passes(test) -> bool:
    try:
        test()
    except AssertionError:
        return False
    return True


def test_what_cannot_be_falsified_is_challenged_as_it_is() -> None:
    text = b"def test_a():\n    for n in (1, 2):\n        assert n\n\n\ndef test_b():\n    assert 1 == 1\n"
    ids = ("t.py::test_a", "t.py::test_b")
    hidden = SuiteTests(instance_id="x", files={"t.py": text}, fail_to_pass=ids, pass_to_pass=())
    for run in plan(hidden)[1]:
        assert ids[0] in run.passing and ids[1] in run.passing | run.failing
    only = SuiteTests(instance_id="x", files={"t.py": text}, fail_to_pass=ids[:1], pass_to_pass=())
    assert plan(only)[1] == []  # nothing would be secret


def test_plans_differ_and_leave_out_what_is_unfit() -> None:
    hidden = suite(6, 6)
    assert len({tuple(sorted(plan(hidden)[1][0].failing)) for _ in range(20)}) > 15
    unfit = hidden.fail_to_pass[0]
    for run in itertools.chain.from_iterable(plan(hidden, unfit={unfit})[1] for _ in range(20)):
        assert unfit not in run.failing


@pytest.mark.parametrize("bad", ["test_a.py", "::test_a", ""])
def test_node_ids_name_a_file(bad: str) -> None:
    with pytest.raises(ValueError, match="expected node ids"):
        by_file([bad])


def test_falsify_keeps_messages_and_calls() -> None:
    statement = ast.parse("assert f(1, x=[2]) == 3, message()").body[0]
    edit = falsify(statement, Random(0))
    assert edit is not None and edit.text != "3" and (edit.start, edit.end) == ((1, 22), (1, 23))
