"""Mutation operators: single edits, valid, reversible, and where they belong."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.tasks.mutation.module import Edit, Module, UnsupportedSourceError
from sandbox.tasks.mutation.sites import OPERATORS, edits, in_turn, is_mutation

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    path: path.read_bytes() for path in sorted((ROOT / "sandbox").rglob("*.py")) if path.stat().st_size
}
EVERY = [(path, edit) for path, source in SOURCES.items() for edit in edits(source)]


def inside(body: str) -> bytes:
    return f"def f(a, b, c):\n    {body}\n    return a\n".encode()


def results(source: bytes, operator: str) -> set[str]:
    return {edit.apply(source).decode() for edit in edits(source) if edit.operator == operator}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EVERY))
def test_an_edit_is_one_valid_change_that_can_be_undone(choice: tuple[Path, Edit]) -> None:
    path, edit = choice
    source = SOURCES[path]
    mutated = edit.apply(source)
    assert is_mutation(source, edit)
    end = edit.start + len(edit.replacement.encode())
    assert mutated[: edit.start] == source[: edit.start] and mutated[end:] == source[edit.end :]
    undone = mutated[: edit.start] + source[edit.start : edit.end] + mutated[end:]
    assert undone == source
    assert source[edit.start : edit.end] != edit.replacement.encode()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(EVERY))
def test_an_edit_lies_in_the_function_and_on_the_lines_it_names(choice: tuple[Path, Edit]) -> None:
    path, edit = choice
    source = SOURCES[path]
    ends = {
        (node.name, node.lineno, node.end_lineno or 0)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    line = source.count(b"\n", 0, edit.start) + 1
    name = edit.function.rpartition(".")[2]
    assert any(name == each and first <= line <= last for each, first, last in ends)
    assert edit.lines[0] <= edit.lines[1]
    if edit.operator != "default":
        assert edit.lines[0] <= line <= edit.lines[1]


def test_every_operator_finds_sites_in_our_own_sources() -> None:
    counts = Counter(edit.operator for _, edit in EVERY)
    assert set(counts) == set(OPERATORS) and len(OPERATORS) >= 6


def test_module_level_code_annotations_and_docstrings_are_left_alone() -> None:
    source = b'x = 1 + 2\ndef f(a: "1 < 2" = None) -> "3 > 4":\n    """5 < 6"""\n    return f"{a + 1}"\n'
    assert edits(source) == []


@pytest.mark.parametrize(
    ("operator", "body", "expected"),
    [
        ("comparison", "x = a <= b", {"x = a < b"}),
        ("comparison", "x = (a) is  not (b)", {"x = (a) is (b)"}),
        ("comparison", "x = a < b < c", {"x = a <= b < c", "x = a < b <= c"}),
        ("comparison", "x = (a  # < or >\n      not in b)", {"x = (a  # < or >\n      in b)"}),
        ("boolean", "x = a and b and c", {"x = a or b and c", "x = a and b or c"}),
        ("negation", "x = not a", {"x = a"}),
        ("negation", "x = 1 if a.b else 2", {"x = 1 if not a.b else 2"}),
        ("arithmetic", "x = a - b", {"x = a + b"}),
        ("arithmetic", "a <<= b", {"a >>= b"}),
        ("arithmetic", "x = 'é' + a", set()),
        ("arithmetic", "x = ('é', a * b)", {"x = ('é', a // b)"}),
        ("constant", "x = 0", {"x = 1"}),
        ("constant", "x = [7, True]", {"x = [8, True]", "x = [6, True]", "x = [7, False]"}),
        ("constant", "x = 0x10", set()),
        ("method", "x = a.startswith(b)", {"x = a.endswith(b)"}),
        ("method", "x = min(a, b)", {"x = max(a, b)"}),
        ("arguments", "x = f( a,  b.c, 1)", {"x = f( b.c,  a, 1)"}),
        ("arguments", "x = f(a, a)", set()),
        ("guard", "if a: return b", {""}),
        ("guard", "if a:\n        return b\n    else:\n        b = a", set()),
        ("update", "a.b = c", {""}),
        ("update", "a.append(b)", {""}),
        ("update", "a.warning(b)", set()),
        ("update", "a = b", set()),
        ("loop", "for a in b:\n        continue", {"for a in b:\n        break"}),
    ],
)
def test_operators_on_examples(operator: str, body: str, expected: set[str]) -> None:
    whole = {
        inside(text).decode() if text else inside("").decode().replace("    \n", "") for text in expected
    }
    assert results(inside(body), operator) == whole


def test_default_values_and_attributes() -> None:
    source = (
        b"class A:\n    def __init__(self, n=3, *, deep=True):\n        self.n, self.deep = n, deep\n"
        b"    def get(self):\n        return self.n\n"
    )
    assert {edit.replacement for edit in edits(source) if edit.operator == "default"} == {"4", "2", "False"}
    assert b"return self.deep" in {e.apply(source) for e in edits(source) if e.operator == "attribute"}.pop()


def test_the_only_statement_of_a_block_is_never_left_out() -> None:
    source = b"def f(a):\n    if a:\n        a.b = 1\n    return a\n"
    assert results(source, "update") == set()


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_positions_hold_for_every_newline_and_for_wide_letters(newline: str) -> None:
    lines = ["def f(ä):", "    'ü'; ß = 'é' * (ä  +  1)", "    if ä: return 0", "    return ß  # done", ""]
    source = newline.join(lines).encode()
    found = edits(source)
    assert all(is_mutation(source, edit) for edit in found)
    assert {edit.operator for edit in found} >= {"arithmetic", "constant", "negation", "guard"}
    plus = next(edit for edit in found if edit.operator == "arithmetic")
    assert source[plus.start : plus.end] == b"+"


@pytest.mark.parametrize(
    "source", [b"\xef\xbb\xbfx = 1\n", b"# coding: latin-1\nx = 1\n", b"x = (\n", b"\xff\n"]
)
def test_sources_that_cannot_be_edited_by_position_are_refused(source: bytes) -> None:
    with pytest.raises(UnsupportedSourceError, match="expected"):
        Module(source)


def test_edits_outside_the_source_are_refused() -> None:
    edit = Edit(operator="constant", start=3, end=9, replacement="1", function="f", lines=(1, 1))
    with pytest.raises(ValueError, match="within 4 bytes"):
        edit.apply(b"x=1\n")


@given(st.integers(0, 5), st.integers(1, 3))
def test_the_order_is_fair_bounded_and_made_by_the_seed(seed: int, per_function: int) -> None:
    found = edits(SOURCES[ROOT / "sandbox/namespace.py"])
    chosen = in_turn(found, seed=seed, per_function=per_function)
    assert list(chosen) == list(in_turn(list(reversed(found)), seed=seed, per_function=per_function))
    assert max(Counter(edit.function for edit in chosen).values()) <= per_function
    rare = Counter(edit.operator for edit in found)
    first = [edit.operator for edit in chosen[: len(rare)]]
    assert len(set(first)) >= len(rare) // 2
