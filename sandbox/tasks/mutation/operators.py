"""Mutation operators on expressions. Each finds the edits it can make at one node of a function.

An operator yields (start, end, replacement) in bytes, so that an edit touches nothing else: comments,
layout and line numbers stay.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeGuard

from sandbox.tasks.mutation.module import Module, Spot

Change = tuple[int, int, str]
Operator = Callable[[Module, Spot], Iterator[Change]]

_COMPARISONS: Mapping[type[ast.cmpop], tuple[bytes, str]] = {
    ast.Lt: (rb"<(?!=)", "<="),
    ast.LtE: (rb"<=", "<"),
    ast.Gt: (rb">(?!=)", ">="),
    ast.GtE: (rb">=", ">"),
    ast.Eq: (rb"==", "!="),
    ast.NotEq: (rb"!=", "=="),
    ast.In: (rb"\bin\b", "not in"),
    ast.NotIn: (rb"\bnot\s+in\b", "in"),
    ast.Is: (rb"\bis\b", "is not"),
    ast.IsNot: (rb"\bis\s+not\b", "is"),
}
_ARITHMETIC: Mapping[type[ast.operator], tuple[bytes, str]] = {
    ast.Add: (rb"\+", "-"),
    ast.Sub: (rb"-", "+"),
    ast.Mult: (rb"\*", "//"),
    ast.FloorDiv: (rb"//", "*"),
    ast.Div: (rb"/", "*"),
    ast.Mod: (rb"%", "//"),
    ast.LShift: (rb"<<", ">>"),
    ast.RShift: (rb">>", "<<"),
    ast.BitAnd: (rb"&", "|"),
    ast.BitOr: (rb"\|", "&"),
}
_PAIRS = (
    ("startswith", "endswith"),
    ("lstrip", "rstrip"),
    ("lower", "upper"),
    ("find", "rfind"),
    ("split", "rsplit"),
    ("partition", "rpartition"),
    ("keys", "values"),
    ("appendleft", "append"),
    ("popleft", "pop"),
    ("extend", "append"),
    ("min", "max"),
    ("any", "all"),
)
_METHODS = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])} | {"append": "extend", "pop": "popleft"}
_ONE_WAY = {"append", "pop"}  # too common to swap: nearly every use would fail at once
_DECIMAL = re.compile(rb"0|[1-9][0-9]*")


def comparison(module: Module, spot: Spot) -> Iterator[Change]:
    """`<` for `<=`, `==` for `!=`, `in` for `not in`, …"""
    if isinstance(spot.node, ast.Compare):
        operands = [spot.node.left, *spot.node.comparators]
        for left, right, op in zip(operands, operands[1:], spot.node.ops, strict=False):
            yield from _between(module, left, right, *_COMPARISONS[type(op)])


def boolean(module: Module, spot: Spot) -> Iterator[Change]:
    """`and` for `or` and the reverse."""
    if isinstance(spot.node, ast.BoolOp):
        pattern, new = (rb"\band\b", "or") if isinstance(spot.node.op, ast.And) else (rb"\bor\b", "and")
        for left, right in zip(spot.node.values, spot.node.values[1:], strict=False):
            yield from _between(module, left, right, pattern, new)


def negation(module: Module, spot: Spot) -> Iterator[Change]:
    """Drops a `not`, or puts one before a simple condition."""
    node = spot.node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        start = module.span(node)[0]
        if found := re.compile(rb"not\b[ \t]*").match(module.text, start):
            yield start, found.end(), ""
    elif _has_simple_condition(node):
        start = module.span(node.test)[0]
        yield start, start, "not "


def arithmetic(module: Module, spot: Spot) -> Iterator[Change]:
    """`+` for `-`, `*` for `//`, … (not on strings)."""
    node = spot.node
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if not (_is_text(node.left) or _is_text(node.right)):
            yield from _between(module, node.left, node.right, *_ARITHMETIC[type(node.op)])
    elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC and not _is_text(node.value):
        pattern, new = _ARITHMETIC[type(node.op)]
        yield from _between(module, node.target, node.value, pattern + b"=", new + "=")


def constant(module: Module, spot: Spot) -> Iterator[Change]:
    """Whole numbers off by one, True for False."""
    if isinstance(spot.node, ast.Constant):
        yield from _off(module, spot.node)


def default(module: Module, spot: Spot) -> Iterator[Change]:
    """Another default value of a nested function's or method's parameter."""
    if isinstance(spot.node, ast.arguments):
        for value in (*spot.node.defaults, *spot.node.kw_defaults):
            if isinstance(value, ast.Constant):
                yield from _off(module, value)


def attribute(module: Module, spot: Spot) -> Iterator[Change]:
    """Reads another attribute of `self` that the class assigns."""
    node = spot.node
    if not (spot.owner and _is_own(node) and isinstance(node.ctx, ast.Load)):
        return
    names = _assigned(spot.owner)
    if node.attr in names and len(names) > 1:
        end = module.span(node)[1]
        other = names[(names.index(node.attr) + 1) % len(names)]
        yield end - len(node.attr.encode()), end, other


def method(module: Module, spot: Spot) -> Iterator[Change]:
    """A call of the sibling: `startswith` for `endswith`, `min` for `max`, …"""
    if not isinstance(spot.node, ast.Call):
        return
    called = spot.node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name in _METHODS and name not in _ONE_WAY:
        end = module.span(called)[1]
        yield end - len(name), end, _METHODS[name]


def arguments(module: Module, spot: Spot) -> Iterator[Change]:
    """The first two arguments of a call in the wrong order."""
    if not isinstance(spot.node, ast.Call) or len(spot.node.args) < 2:
        return
    first, second = spot.node.args[:2]
    if all(isinstance(each, ast.Name | ast.Attribute) for each in (first, second)):
        (start, end), (from_, to) = module.span(first), module.span(second)
        one, two, gap = (module.text[a:b].decode() for a, b in ((start, end), (from_, to), (end, from_)))
        if one != two:
            yield start, to, two + gap + one


def _between(module: Module, left: ast.AST, right: ast.AST, pattern: bytes, new: str) -> Iterator[Change]:
    offset, gap = module.between(left, right)
    if found := re.search(pattern, gap):
        yield offset + found.start(), offset + found.end(), new


def _off(module: Module, node: ast.Constant) -> Iterator[Change]:
    start, end = module.span(node)
    if isinstance(node.value, bool):
        yield start, end, str(not node.value)
    elif isinstance(node.value, int) and _DECIMAL.fullmatch(module.text[start:end]):
        yield start, end, str(node.value + 1)
        if node.value:
            yield start, end, str(node.value - 1)


def _has_simple_condition(node: ast.AST) -> TypeGuard[ast.If | ast.IfExp | ast.While]:
    conditional = isinstance(node, ast.If | ast.IfExp | ast.While)
    return conditional and isinstance(node.test, ast.Name | ast.Attribute | ast.Call)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _is_own(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _assigned(owner: ast.ClassDef) -> list[str]:
    """Names that the class's methods assign to `self`, sorted."""
    return sorted(
        {
            node.attr
            for node in ast.walk(owner)
            if isinstance(node, ast.Attribute) and _is_own(node) and isinstance(node.ctx, ast.Store)
        }
    )
