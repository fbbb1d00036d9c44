"""From bugs to tasks: names, hidden cases, and the demonstrator's knowledge."""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.tasks.generated.families import Bug
from sandbox.tasks.schema import Case, HiddenTests, TaskSpec

PATH = "app.py"
VARIABLES = ("a", "b", "n", "x", "y", "z")


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What a demonstrator knows about a task, and neither the agent nor the task may tell.

    Replacing `wrong`, which occurs exactly once in the file `path`, by `right` is the fix.
    `candidates` (right included) are the edits that the family knows; `habit` is its stock edit.
    """

    instance_id: str
    path: str
    source: str  # the file with the bug
    wrong: str
    right: str
    habit: str
    candidates: Sequence[str]

    @property
    def fixed(self) -> str:
        return self.source.replace(self.wrong, self.right)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A task, its hidden tests and its repair, which live in separate objects on purpose."""

    spec: TaskSpec
    hidden: HiddenTests
    repair: Repair


def outputs(source: str, expressions: Sequence[str]) -> list[Any]:
    """Values of `expressions` after `source`; a raised exception counts as the value of its type.

    Only for code of this package's own making: nothing is isolated.
    """
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return [_value(expression, namespace) for expression in expressions]


def _value(expression: str, namespace: dict[str, Any]) -> Any:
    try:
        return eval(expression, namespace)
    except (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError) as error:
        return type(error)


def same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Equal in value and type, element by element."""
    return [(type(each), each) for each in left] == [(type(each), each) for each in right]


def sources(bug: Bug, edit: str) -> str:
    """Placeholder source of the function `F` whose faulty line reads `edit`."""
    lines = list(bug.lines)
    indent = lines[bug.index][: -len(bug.right)]
    lines[bug.index] = indent + edit
    body = "".join(f"    {line}\n" for line in lines)
    return f"def F({', '.join(bug.parameters)}):\n{body}"


def detectable(bug: Bug) -> bool:
    """Whether the hidden cases tell the wrong line from the right one."""
    calls = [f"F({each})" for each in bug.inputs]
    return not same(outputs(sources(bug, bug.wrong), calls), outputs(sources(bug, bug.right), calls))


def instantiate(bug: Bug, function: str, rng: random.Random) -> Instance:
    """The task of `bug` for a function name and variables drawn from `rng`."""
    names = dict(zip("AB", rng.sample(VARIABLES, 2), strict=True)) | {"F": function}
    source = _rename(sources(bug, bug.wrong), names)
    wrong, right = _rename(bug.wrong, names), _rename(bug.right, names)
    signature = f"{function}({', '.join(names[each] for each in bug.parameters)})"
    issue = f"{signature} must return {_rename(bug.phrase, names)}."
    identity = hashlib.sha256(f"{issue}\n{source}".encode()).hexdigest()[:12]
    instance_id = f"{bug.family}-{identity}"
    candidates = tuple(_rename(each, names) for each in bug.candidates)
    repair = Repair(
        instance_id=instance_id,
        path=PATH,
        source=source,
        wrong=wrong,
        right=right,
        habit=candidates[0],
        candidates=candidates,
    )
    return Instance(
        spec=_spec(instance_id, issue, source, bug),
        hidden=_hidden(instance_id, repair.fixed, [f"{function}({each})" for each in bug.inputs]),
        repair=repair,
    )


def _spec(instance_id: str, issue: str, source: str, bug: Bug) -> TaskSpec:
    return TaskSpec(
        instance_id=instance_id,
        problem_statement=issue,
        files={PATH: source},
        tags={"family": bug.family},
    )


def _hidden(instance_id: str, fixed: str, expressions: Sequence[str]) -> HiddenTests:
    values = outputs(fixed, expressions)
    cases = tuple(
        Case(expression=each, expected=value) for each, value in zip(expressions, values, strict=True)
    )
    return HiddenTests(instance_id=instance_id, module=PATH, cases=cases, reference={PATH: fixed})


def _rename(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\b[ABF]\b", lambda match: names[match[0]], text)
