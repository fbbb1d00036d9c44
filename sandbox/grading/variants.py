"""Tests that must fail, made from hidden tests by falsifying what they assert last.

A canary that looks unlike a test can be told from one. Here the same test, in the same file and under the
same name, runs once as it is and once falsified, in two processes: `assert f(2) == 4` becomes
`assert f(2) == 7`, `pytest.raises(KeyError)` becomes `pytest.raises(IndexError)`, `assertIn` becomes
`assertNotIn`. To tell which of the two it is, the code under test has to know the right answer: what the
task asks for.

Only a test whose last statement is the assertion is falsified, so that no clean-up is skipped, and only
functions without `return`, so that one that passes has reached it: then its falsified form must fail.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from sandbox.grading.falsify import Edit, falsify

_UNSUITABLE = {
    *("given", "example", "settings", "xfail", "expectedFailure", "flaky", "retry", "rerun", "repeat"),
    *("skip", "skipif", "skipIf", "skipUnless", "benchmark"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Unit:
    """One test function: the node ids that run it."""

    function: Function
    ids: tuple[str, ...]


def units(content: bytes, ids: Sequence[str]) -> list[Unit]:
    """The falsifiable test functions that run as `ids`; none where the file cannot be read."""
    try:
        tree = ast.parse(_text(content))
    except (SyntaxError, ValueError, RecursionError):
        return []
    scopes, uses = _scopes(tree), _uses(tree)
    found: dict[int, tuple[Function, list[str]]] = {}
    shared: set[int] = set()
    for each in ids:
        function = _resolve(scopes, each)
        if function is not None:
            found.setdefault(id(function), (function, []))[1].append(each)
        else:
            shared |= {id(function) for function in _perhaps(scopes, each)}
    return [
        Unit(function, tuple(run))
        for function, run in found.values()
        if id(function) not in shared and uses[function.name] == 0 and _suitable(function)
    ]


def falsified(content: bytes, chosen: Sequence[Unit], random: Random) -> bytes:
    """The file with every chosen function falsified; lines keep their numbers."""
    source = _text(content)
    starts, data = _line_starts(source), source.encode()
    edits = [edit for unit in chosen if (edit := falsify(unit.function.body[-1], random)) is not None]
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        begin = starts[edit.start[0] - 1] + edit.start[1]
        end = starts[edit.end[0] - 1] + edit.end[1]
        text = _quoted_like(data[begin:end].decode(), _padded(edit))
        data = data[:begin] + text.encode() + data[end:]
    return data


def _quoted_like(old: str, new: str) -> str:
    """`new` with the quotes of `old`: others would tell which test was changed."""
    swapped = '"' in old and "'" not in old and '"' not in new
    return new.replace("'", '"') if swapped else new


def _padded(edit: Edit) -> str:
    lines = edit.end[0] - edit.start[0] - edit.text.count("\n")
    if edit.text.startswith("*"):  # arguments: already in the call's parentheses
        return edit.text + "\n" * lines
    return f"({edit.text}{chr(10) * lines})" if lines else edit.text


def _text(content: bytes) -> str:
    text = content.decode()
    if "\r" in text.replace("\r\n", "") or text.startswith("\ufeff"):
        raise ValueError("lines end in more than one way")
    return text


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


Scopes = dict[str, tuple[list[str], dict[str, list[Function]]]]


def _scopes(tree: ast.Module) -> Scopes:
    """Class name ("" for the module) → (names of its bases, functions by name)."""
    scopes: Scopes = {"": ([], _functions(tree.body))}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [base.id if isinstance(base, ast.Name) else "?" for base in node.bases]
            scopes[node.name] = (bases, _functions(node.body))
    return scopes


def _functions(body: Sequence[ast.stmt]) -> dict[str, list[Function]]:
    """Functions by name, with those of the same name that lie deeper: which one counts is then unsure."""
    found: dict[str, list[Function]] = {}
    for node in body:
        for each in [node] if isinstance(node, ast.ClassDef) else ast.walk(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(each.name, []).append(each)
    return found


def _resolve(scopes: Scopes, node_id: str) -> Function | None:
    """The function of a node id `path::function` or `path::Class::function`, where that is certain."""
    _, *parts = node_id.split("[")[0].split("::")
    if not 1 <= len(parts) <= 2:
        return None
    scope = parts[0] if len(parts) == 2 else ""
    for _ in range(20):  # along the first bases, as long as they are known
        if scope not in scopes:
            return None
        bases, functions = scopes[scope]
        if candidates := functions.get(parts[-1]):
            return candidates[0] if len(candidates) == 1 else None
        if len(bases) != 1:
            return None
        scope = bases[0]
    return None


def _perhaps(scopes: Scopes, node_id: str) -> list[Function]:
    """Functions that an unsure node id may run: of its class, or of whatever that may inherit from."""
    _, *parts = node_id.split("[")[0].split("::")
    reached, todo = set[str](), parts[:-1] or [""]
    while todo:
        scope = todo.pop()
        if scope in scopes and scope not in reached:
            reached.add(scope)
            todo += scopes[scope][0]
    return [function for scope in reached for function in scopes[scope][1].get(parts[-1], ())]


def _uses(tree: ast.Module) -> Counter[str]:
    """How often each name is mentioned other than by its definition."""
    counted: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                counted[name] += 1
    return counted


def _suitable(function: Function) -> bool:
    decorators = {
        node.id if isinstance(node, ast.Name) else node.attr
        for decorator in function.decorator_list
        for node in ast.walk(decorator)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    returns = any(isinstance(node, ast.Return) for node in _own(function))
    # Written out by this Python, an f-string may be none to the project's older one.
    strange = any(isinstance(node, ast.JoinedStr) for node in ast.walk(function.body[-1]))
    certain = falsify(function.body[-1], Random(0)) is not None
    return certain and not (decorators & _UNSUITABLE or returns or strange)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from _own(child)
