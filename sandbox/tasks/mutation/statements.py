"""Mutation operators on statements: what a hurried programmer leaves out."""

import ast
import re
from collections.abc import Iterator

from sandbox.tasks.mutation.module import Module, Spot
from sandbox.tasks.mutation.operators import Change

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_TALK = re.compile(r"warn|log|debug|info|print|doc")  # leaving these out seldom changes behaviour


def guard(module: Module, spot: Spot) -> Iterator[Change]:
    """Leaves out an early exit: an `if` without `else` whose body ends in return, raise, continue, break."""
    node = spot.node
    if not isinstance(node, ast.If) or node.orelse or not isinstance(node.body[-1], _LEAVES):
        return
    if module.text.startswith(b"if", module.span(node)[0]):  # an `elif` is no statement of its own
        yield from _without(module, spot)


def update(module: Module, spot: Spot) -> Iterator[Change]:
    """Leaves out an assignment to an attribute or item, an update in place, or a call for its effect."""
    node = spot.node
    if isinstance(node, ast.Assign):
        wanted = all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        wanted = not _TALK.search(ast.unparse(node.value.func).lower())
    else:
        wanted = isinstance(node, ast.AugAssign)
    if wanted:
        yield from _without(module, spot)


def loop(module: Module, spot: Spot) -> Iterator[Change]:
    """Ends a loop where it should go on with the next item."""
    if isinstance(spot.node, ast.Continue):
        yield *module.span(spot.node), "break"


def _without(module: Module, spot: Spot) -> Iterator[Change]:
    lines = module.lines_of(spot.node)
    if lines is not None and len(spot.block) > 1:
        yield *lines, ""
