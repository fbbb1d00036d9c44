"""Falsified assertions look like true ones, and ask for values of the same kind."""

import ast
from random import Random

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
