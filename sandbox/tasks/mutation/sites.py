"""All edits that the operators can make in a file, and a fair order to try them in."""

import ast
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from sandbox.tasks.mutation import operators, statements
from sandbox.tasks.mutation.module import Edit, Module
from sandbox.tasks.mutation.operators import Operator

OPERATORS: Mapping[str, Operator] = {
    "comparison": operators.comparison,
    "boolean": operators.boolean,
    "negation": operators.negation,
    "arithmetic": operators.arithmetic,
    "constant": operators.constant,
    "default": operators.default,
    "attribute": operators.attribute,
    "method": operators.method,
    "arguments": operators.arguments,
    "guard": statements.guard,
    "update": statements.update,
    "loop": statements.loop,
}


def edits(source: bytes) -> list[Edit]:
    """Every edit of functions in `source` that the operators offer, in source order.

    Not each of them is another program: see `is_mutation`. Raises `UnsupportedSourceError`.
    """
    module = Module(source)
    found = {}
    for spot in module.spots:
        for name, operator in OPERATORS.items():
            for start, end, replacement in operator(module, spot):
                edit = Edit(
                    operator=name,
                    start=start,
                    end=end,
                    replacement=replacement,
                    function=spot.function,
                    lines=spot.lines,
                )
                found.setdefault((start, end, replacement), edit)
    return sorted(found.values(), key=_place)


def in_turn(candidates: Iterable[Edit], *, seed: int, per_function: int = 2) -> Sequence[Edit]:
    """At most `per_function` edits a function, shuffled by `seed`, operators taking turns.

    The rarest operators come first within a turn, so that common ones do not crowd them out.
    """
    shuffled = sorted(candidates, key=_place)
    random.Random(seed).shuffle(shuffled)
    totals = Counter(edit.operator for edit in shuffled)
    turns: Counter[str] = Counter()
    ranked = []
    for edit in shuffled:
        ranked.append((turns[edit.operator], totals[edit.operator], edit.operator, edit))
        turns[edit.operator] += 1
    taken: Counter[str] = Counter()
    chosen = []
    for *_, edit in sorted(ranked, key=lambda item: item[:3]):
        if taken[edit.function] < per_function:
            taken[edit.function] += 1
            chosen.append(edit)
    return chosen


def is_mutation(source: bytes, edit: Edit) -> bool:
    """Whether the edited source is valid and another program than `source`."""
    try:
        return ast.dump(ast.parse(edit.apply(source))) != ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return False


def _place(edit: Edit) -> tuple[int, int, str]:
    return edit.start, edit.end, edit.replacement
