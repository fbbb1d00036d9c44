"""Issue texts: what a hidden test compares with is not in them, what came out is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from sandbox.grading.falsify import other
from sandbox.tasks.answers import without_answers
from sandbox.tasks.build import Definitions
from sandbox.tasks.issue import write_issue
from sandbox.tasks.probe.client import Reason

COMMITTED = Path(__file__).resolve().parents[2] / "configs" / "tasks"


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("assert f(1) == 'abc'", "assert f(1) == ..."),
        ("assert 'abc' == f(1)", "assert ... == f(1)"),
        ("assert f(1) == '\\n'.join(['a', 'b'])", "assert f(1) == ..."),
        ("assert f(1) == list(range(3)) + [x]", "assert f(1) == ..."),
        ("assert f(1) == [g(2), 'abc']", "assert f(1) == [g(2), ...]"),
        ("assert f(1) == {'k': g(2), 'l': -3}", "assert f(1) == {'k': g(2), 'l': ...}"),
        ("assert f(1) == Data(text='abc')", "assert f(1) == ..."),
        ("assert Version('1.0') == Version('1')", "assert Version('1.0') == ..."),
        ("assert f(1) == 3, 'not 3'", "assert f(1) == ..."),
        ("want = 'abc'\nassert f(1) == want", "want = ...\nassert f(1) == want"),
        ("s = 'abc'\nassert f(g(s)) == s", "s = ...\nassert f(g(s)) == s"),
        ("for x, y in [(1, 2)]:\n    assert f(x) == y", "for x, y in ...:\n    assert f(x) == y"),
        ("assert 'abc' in f(1) and f(2) == 3", "assert ... in f(1) and f(2) == ..."),
        ("assert f(1).startswith('abc')", "assert f(1).startswith(...)"),
        ("self.assertEqual(f('x'), 'abc')", "self.assertEqual(f('x'), ...)"),
        ("self.assertIn('abc', f(1))", "self.assertIn(..., f(1))"),
        ("self.assertTrue(f(1) == 3)", "self.assertTrue(f(1) == ...)"),
        ("with pytest.raises(KeyError, match='abc'):\n    f(1)", "with pytest.raises(...):\n    f(1)"),
        ("self.assertRaises(ValueError, f, 'x')", "self.assertRaises(..., f, 'x')"),
        ("x = f('in')  # 'abc'\nassert x is None", "x = f('in')\nassert x is None"),
        ("assert f(1) < 3", "assert f(1) < 3"),
    ],
)
def test_answers_are_left_out(statement: str, wanted: str) -> None:
    told = without_answers(statement, ())
    assert told is not None and told.statement == wanted
    again = without_answers(told.statement, ())
    assert again is not None and again.statement == wanted


def issue(statement: str, message: str, **changes: object) -> str:
    fields = {"type": "AssertionError", "asserted": True, "arguments": {}, **changes}
    reason = Reason(statement=statement, message=message, **fields)  # pyright: ignore[reportArgumentType]
    return write_issue("shop", {"t.py::test_a": reason}, {"f": "Adds up."})


@pytest.mark.parametrize(
    ("statement", "message", "said"),
    [
        ("assert f(1) == 'abc'", "AssertionError: assert 'abd' == 'abc'\n  - abc", "there is `'abd'`"),
        ("assert 'abc' == f(1)", "assert 'abc' == 7", "there is `7` where another value is right (of type"),
        ("self.assertEqual(f(1), 4)", "AssertionError: 5 != 4", "there is `5`"),
        ("self.assertEqual([4], f(1))", "Lists differ: [4] != [5]", "there is `[5]`"),
        ("assert 'abc' in f(1)", "assert 'abc' in 'xyz'", "there is `'xyz'`"),
        ("assert f(1) == g(2)", "assert 'abc' == 'abd'", "does not hold:\n"),
        ("assert f(1) == 'abc'", "assert 'ab...' == 'ab", "does not hold:\n"),
        ("with pytest.raises(KeyError):\n    f(1)", "Failed: DID NOT RAISE <KeyError>", "does not raise"),
    ],
)
def test_what_came_is_told_and_what_is_right_is_not(statement: str, message: str, said: str) -> None:
    text = issue(statement, message)
    assert said in text and "Adds up." in text
    assert "'abc'" not in text and "KeyError" not in text and "[4]" not in text


def test_an_exception_speaks_unless_it_has_an_answer_in_it() -> None:
    statement = "assert f(1) == 'abc'"
    assert "raises `TypeError` (no number)" in issue(statement, "TypeError: no number", type="TypeError")
    assert "raises `ValueError`:" in issue(statement, "ValueError: no abc", type="ValueError")


def test_of_a_parametrised_test_what_went_in_is_told() -> None:
    arguments = {"given": "0", "expected": "'zero'"}
    text = issue("assert f(given) == expected", "assert '0' == 'zero'", arguments=arguments)
    assert "(with `given = 0`) does not hold: there is `'0'`" in text and "zero" not in text


def test_what_cannot_be_read_is_named_only() -> None:
    text = issue("assert f(1, x.g('abc') == 'abc'", "assert False")
    assert "f(...)\nx.g(...)" in text and "abc" not in text


def equalities(block: str) -> Iterator[ast.expr]:
    """Sides of what the assertions of a block compare."""
    try:
        nodes = list(ast.walk(ast.parse(block)))
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            if isinstance(node.test.ops[0], ast.Eq):
                yield from (node.test.left, *node.test.comparators)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.assertEqual":
            yield from node.args[:2]


def test_no_committed_issue_has_a_literal_that_a_falsified_test_changes() -> None:
    recipes = Definitions(COMMITTED).recipes()
    blocks = [block for each in recipes for block in re.findall(r"```python\n(.*?)\n```", each.problem, re.S)]
    sides = [side for block in blocks for side in equalities(block)]
    assert len(blocks) >= len(recipes) and len(sides) > 200
    assert not [ast.unparse(side) for side in sides if other(side, Random(0)) is not None]
