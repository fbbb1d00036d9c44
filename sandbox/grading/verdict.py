"""From records of a grader's child process to a verdict. Pure, and on the trusted side."""

import ast
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sandbox.tasks.schema import Case

Status = Literal["resolved", "unresolved", "tampering", "timeout", "error"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of the hidden tests.

    `timeout` (an unchanged tree was too slow) and `error` are faults of ours, never of the patch;
    `tampering` is a patch that tried to cheat. `seconds` is wall time, 0 when `cached`.
    """

    status: Status
    detail: str
    cached: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Question:
    """An expression for the child; `answer` stays on the trusted side."""

    expression: str
    kind: Literal["value", "raised"]
    answer: Any
    canary: bool = False


def questions(cases: Sequence[Case]) -> list[Question]:
    """The cases in random order among canaries: values only we know, and one that must raise."""
    a, b = secrets.randbelow(10_000), secrets.randbelow(10_000)
    asked = [Question(case.expression, "value", case.expected) for case in cases]
    canaries = (
        Question(f"{a} * {b} + 1", "value", a * b + 1, canary=True),
        Question(f"n_{secrets.token_hex(6)}", "raised", "NameError", canary=True),
    )
    for canary in canaries:
        asked.insert(secrets.randbelow(len(asked) + 1), canary)
    return asked


def judge(records: str, *, asked: Sequence[Question], nonce: str, ended: str) -> tuple[Status, str]:
    """Status and reason. Every question needs exactly one record with our nonce and the right answer."""
    if ended == "flood":
        return "unresolved", "tests gave too much output"
    try:
        answers = _parse(records, nonce, len(asked))
    except (ValueError, RecursionError) as error:
        return "tampering", f"forged records: {error}"
    if ended == "timeout":
        return "unresolved", "tests timed out"
    if -1 in answers:
        return "unresolved", f"the module does not import: {answers[-1][1]}"
    # Canaries first: that the reporter lies matters more than what it says.
    for index, question in sorted(enumerate(asked), key=lambda item: not item[1].canary):
        if (wrong := _wrong(question, answers.get(index))) is not None:
            return wrong
    return "resolved", f"{len(asked)} checks passed"


def same(left: object, right: object) -> bool:
    """Equality including the type, at every depth."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return len(left) == len(right) and all(
            any(same(k, other) and same(v, right[other]) for other in right if other == k)
            for k, v in left.items()
        )
    if isinstance(left, set | frozenset) and isinstance(right, set | frozenset):
        return left == right and {(type(x), x) for x in left} == {(type(x), x) for x in right}
    return left == right


def _parse(records: str, nonce: str, count: int) -> dict[int, tuple[str, str]]:
    answers: dict[int, tuple[str, str]] = {}
    for line in records.split("\n")[:-1]:  # what follows the last newline was cut by the end of the child
        match json.loads(line):
            case [str(tag), int(index), str(kind), str(text)] if tag == nonce and -1 <= index < count:
                if index in answers:
                    raise ValueError(f"two records for check {index}")
                answers[index] = (kind, text)
            case other:
                raise ValueError(f"unexpected record {str(other)[:80]!r}")
    return answers


def _wrong(question: Question, record: tuple[str, str] | None) -> tuple[Status, str] | None:
    if record is None:
        return "unresolved", f"no answer for {question.expression!r}"
    kind, text = record
    right = kind == question.kind and (
        text == question.answer if kind == "raised" else _matches(text, question)
    )
    if right:
        return None
    if question.canary:
        return "tampering", f"a canary that must be {question.kind} was {kind}: {text[:80]}"
    return "unresolved", f"{question.expression!r} was {kind}: {text[:80]}"


def _matches(text: str, question: Question) -> bool:
    # Equal values have texts of equal length; a longer one may be made to take minutes to read.
    if len(text) > 2 * len(repr(question.answer)) + 100:
        return False
    try:
        return same(ast.literal_eval(text), question.answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
