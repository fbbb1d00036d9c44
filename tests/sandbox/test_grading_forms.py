"""Falsified assertions look like true ones, and ask for values of the same kind."""

import ast
import unittest
from random import Random
from typing import Any

import pytest

from sandbox.grading.falsify import falsify
from sandbox.grading.variants import falsified, units


def test_a_falsified_literal_is_written_as_the_true_one() -> None:
    text = b'def test_a():\n    assert f("x") == {"k": [1, "abc"],  "l": b"d"}  # "as is"\n'
    (unit,) = units(text, ["t.py::test_a"])
    for seed in range(30):
        changed = falsified(text, [unit], Random(seed))
        same = sum(old == new for old, new in zip(text, changed, strict=True))
        assert len(text) - same == 1 and b"'" not in changed, changed


VALUES = [
    True,
    3,
    -2,
    1.5,
    1e300,
    float("inf"),
    2j,
    "",
    "a",
    b"x",
    [],
    [1],
    (),
    {1},
    frozenset(),
    {},
    {"n": 3},
]


@pytest.mark.parametrize("value", [*VALUES, None, int, ...], ids=repr)
def test_a_result_is_compared_with_another_of_its_type(value: object) -> None:
    class Anything:
        def __eq__(self, other: object) -> bool:
            return True

    (statement,) = ast.parse("assert got == f(x)").body
    for seed in range(20):
        edit = falsify(statement, Random(seed))
        assert edit is not None
        other_value = eval(edit.text, {"f": lambda x: value, "x": 0, "got": value})
        assert other_value != value and Anything() == other_value
        assert type(other_value) in (type(value), object)
        assert (type(other_value) is object) == (value in (None, int, ...)) or value == {"n": 3}


class Agreeing(str):
    """Says yes to whatever is asked."""

    def __contains__(self, other: object) -> bool:
        return True

    def startswith(self, *given: object) -> bool:
        return True


@pytest.mark.parametrize(
    "statement",
    [
        "assert 'abc' in got",
        "assert 3 in got",
        "assert None in got",
        "self.assertIn('abc', got)",
        "assert got.startswith('abc')",
        "self.assertTrue(got.startswith('abc'))",
    ],
)
def test_what_agrees_with_everything_passes_what_must_fail(statement: str) -> None:
    text = f"def test_a(self, got):\n    {statement}\n".encode()
    (unit,) = units(text, ["t.py::test_a"])
    for seed in range(10):
        names: dict[str, Any] = {}
        exec(falsified(text, [unit], Random(seed)), names)
        names["test_a"](unittest.TestCase(), Agreeing())
        with pytest.raises((AssertionError, TypeError)):
            names["test_a"](unittest.TestCase(), "abc 3 None")
