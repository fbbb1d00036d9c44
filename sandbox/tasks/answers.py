"""Takes the right answers out of statements of hidden tests.

What an issue quotes a patch could carry, and so tell a test from its falsified twin (`grading/falsify.py`).
Whatever such a twin may have otherwise becomes `...` here: what an assertion compares with, members,
exceptions. What a test puts in may stay, and what came out of the broken code.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_RAISES = re.compile(r"(raises|warns|assertRaises(Regexp?)?|assertWarns(Regex)?)$")
_COMPARING = ("equal", "equals", "in", "regex", "dict", "list", "set")
_PARTS = {"startswith", "endswith"}
_MAKERS = {
    *("list", "range", "dict", "set", "tuple", "str", "int", "float", "frozenset", "bytes", "sorted"),
    *("date", "datetime", "timedelta", "deque"),
}


@dataclass
class Told:
    """A statement without its answers, the names that stood for some, and their texts.

    `answer`: which side of the last comparison (0 or 1) was one, if exactly one was.
    """

    statement: str
    names: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    answer: int | None = None


def without_answers(statement: str, arguments: Iterable[str]) -> Told | None:
    """None if it cannot be read. `arguments`: names of a parametrised test's arguments."""
    try:
        module = ast.parse(statement)
    except (SyntaxError, ValueError, RecursionError):
        return None
    hider = _Hider(module, set(arguments))
    told = hider.told
    told.statement = ast.unparse(hider.visit(module))
    told.answer = hider.answer
    return told


def wrong_value(told: Told, message: str) -> tuple[str, str] | None:
    """What the broken code gave, as text, and the type of what is right; None where that cannot be told."""
    if told.answer is None:
        return None
    line = message.removeprefix("AssertionError: ").partition("\n")[0]
    sides = next(_sides(re.sub(r"^(assert |[\w ]+ differ: )", "", line)), None)
    if sides is None:
        return None
    right, wrong = sides[told.answer], sides[1 - told.answer]
    return ast.unparse(wrong), _kind(right)


def _sides(text: str) -> Iterator[tuple[ast.expr, ast.expr]]:
    for match in re.finditer(r" (==|!=|in) ", text):
        try:
            left, right = (
                ast.parse(part, mode="eval").body for part in (text[: match.start()], text[match.end() :])
            )
        except (SyntaxError, ValueError):
            continue
        yield left, right


def _kind(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=value):
            return type(value).__name__
        case ast.List() | ast.Tuple() | ast.Dict() | ast.Set():
            return type(node).__name__.lower()
    return ""


class _Hider(ast.NodeTransformer):
    """Replaces answers; `answer` is that of the last assertion that was visited."""

    def __init__(self, module: ast.Module, arguments: set[str]) -> None:
        self.told, self.answer = Told(""), None
        self._arguments = arguments
        self._compared = {
            side.id for sides in _comparisons(module) for side in sides if isinstance(side, ast.Name)
        }
        given = [node for node in ast.walk(module) if isinstance(node, ast.Assign) and _is_answer(node.value)]
        self._given = {name for node in given for target in node.targets for name in _names(target)}

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.test, node.msg = self._truth(node.test), None
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        bound = {name for target in node.targets for name in _names(target)}
        if bound & self._compared and _is_answer(node.value):
            node.value = self._hidden(node.value)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if _names(node.target) & self._compared and _is_answer(node.iter):
            node.iter = self._hidden(node.iter)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _called(node)
        if _RAISES.search(name):
            node.args[:1] = [self._hidden(each) for each in node.args[:1]]
            node.keywords = [each for each in node.keywords if each.arg not in ("match", "msg")]
            self.answer = None
        elif name == "assertTrue" and node.args:
            node.args = [self._truth(node.args[0])]
        elif _compares(name):
            node.args = self._pair(node.args[:2])
        elif name.startswith("assert"):
            self.answer = None
            self.generic_visit(node)
        else:
            self.generic_visit(node)
        return node

    def _truth(self, test: ast.expr) -> ast.expr:
        self.answer = None
        match test:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.In()], comparators=[right]):
                test.left, test.comparators[0] = self._pair([left, right])
            case ast.BoolOp(values=values):
                test.values = [self._truth(each) for each in values]
                self.answer = None
            case ast.UnaryOp(operand=operand):
                test.operand = self._truth(operand)
                self.answer = None
            case ast.Call() if _called(test) in _PARTS:
                test.args = [self._hidden(each) if _is_answer(each) else each for each in test.args]
            case _:
                return self.visit(test)
        return test

    def _pair(self, sides: Sequence[ast.expr]) -> list[ast.expr]:
        known = [self._known(side) for side in sides]
        if len(known) == 2 and all(known) and not isinstance(sides[0], ast.Name):
            known[0] = False  # one of them was put in
        self.answer = known.index(True) if len(sides) == 2 and sum(known) == 1 else None
        found: list[ast.expr] = []
        for side, answer in zip(sides, known, strict=True):
            if isinstance(side, ast.Name) and side.id in self._arguments:
                self.told.names.add(side.id)
            hide = answer and not isinstance(side, ast.Name)
            found.append(self._hidden(side) if hide else self._emptied(side))
        return found

    def _known(self, side: ast.expr) -> bool:
        if isinstance(side, ast.Name):
            return side.id in self._arguments or side.id in self._given
        return _is_answer(side)

    def _emptied(self, side: ast.expr) -> ast.expr:
        """Of a display that holds calls, only the values that are written out."""
        match side:
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                self._empty(items)
                return side
            case ast.Dict(values=values):
                self._empty(values)
                return side
        return self.visit(side)

    def _empty(self, items: list[ast.expr]) -> None:
        items[:] = [self._hidden(each) if _is_answer(each) else self._emptied(each) for each in items]

    def _hidden(self, node: ast.expr) -> ast.expr:
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and len(str(each.value)) > 2:
                self.told.texts.add(str(each.value))
            if isinstance(each, ast.Name) and each.id in self._arguments:
                self.told.names.add(each.id)
        return ast.Constant(value=...)


def _comparisons(module: ast.Module) -> Iterator[Sequence[ast.expr]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.In):
            yield [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and _compares(_called(node)):
            yield node.args


def _compares(name: str) -> bool:
    """assertEqual, assertDictEqual, assertIn, assert_equal and the like."""
    return name.startswith("assert") and "not" not in name.lower() and name.lower().endswith(_COMPARING)


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _names(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _is_answer(node: ast.expr) -> bool:
    """Whether a value is written out: of constants, names and what makes plain values of them."""
    if isinstance(node, ast.Name):
        return False
    return all(_plain(each) for each in ast.walk(node))


def _plain(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Constant()) | ast.Call(func=ast.Attribute(value=ast.Constant())):
            return True  # "\n".join(...)
        case ast.Call():
            name = _called(node)
            return name in _MAKERS or name[:1].isupper()
        case ast.Attribute() | ast.Subscript() | ast.Await() | ast.Lambda() | ast.NamedExpr():
            return False
    return True
