"""Issue texts made from behaviour: what was tried, what came, and what the tried things are for.

Nothing of the cause enters: not the file, the line, the change, nor the names of tests. Nor does what the
tests compare with (`answers.py`).
"""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from sandbox.tasks.answers import Told, without_answers, wrong_value
from sandbox.tasks.probe.client import Reason

Change = tuple[str, bytes | None, bytes | None]  # path, content before and after

_SHOWN = 3  # failures
_TELLING = 20  # characters of a line without white space; shorter ones are in every source
_MAX_STATEMENT, _MAX_MESSAGE, _MAX_VALUE, _MAX_PURPOSES = 800, 400, 200, 4
_THERE = "\n# and there:\n"  # as probe/script.py joins the statements of a test and of its helper
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_VOLATILE = (
    (re.compile(r"0x[0-9a-fA-F]{6,}"), "0x..."),
    (re.compile(r"/tmp/[\w./-]+"), "/tmp/..."),
    (re.compile(r"(?<![\w/])/testbed/[\w./-]+"), "..."),
    (re.compile(r"\bline \d+"), "a line"),
)


def write_issue(name: str, reasons: Mapping[str, Reason], purposes: Mapping[str, str]) -> str:
    """The problem statement. `reasons` by node id; `purposes` has first doc lines by public name."""
    shown = _distinct(reasons)
    parts = [
        f"Something in `{name}` does not behave as it should.",
        "What was tried, and what happened instead of success (`...` is put in place of what is right):",
        *(_failure(number, reason) for number, reason in enumerate(shown, 1)),
    ]
    if len(reasons) > len(shown):
        parts.append(f"In all, {len(reasons)} checks of this kind fail.")
    if about := _about(shown, purposes):
        parts.append("What is involved, as documented:\n\n" + "\n".join(about))
    parts.append(
        "Find the cause in the source and fix it there. What works today must go on working; tests of "
        "this behaviour will be run that are not in the repository."
    )
    return "\n\n".join(parts) + "\n"


def doc_lines(tree: Path, paths: Iterable[str]) -> dict[str, str]:
    """First line of the documentation of every public function and class, by its plain name.

    A name with several meanings is left out.
    """
    found: dict[str, set[str]] = {}
    for path in paths:
        try:
            parsed = ast.parse((tree / path).read_bytes())
        except (SyntaxError, ValueError):
            continue  # no Python source: nothing is documented there
        for node in ast.walk(parsed):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                line = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
                if line and not node.name.startswith("_"):
                    found.setdefault(node.name, set()).add(line)
    return {name: lines.pop() for name, lines in found.items() if len(lines) == 1}


def harmless(reasons: Mapping[str, Reason], changes: Iterable[Change]) -> dict[str, Reason]:
    """Those of `reasons` that have a statement to show and tell nothing of the cause.

    Telling are a changed file's name, and a line of its new text.
    """
    telling = [mark for change in changes for mark in _marks(change)]
    return {
        node: reason
        for node, reason in reasons.items()
        if reason.statement and not any(mark in _squeezed(_failure(1, reason)) for mark in telling)
    }


def _marks(change: Change) -> list[str]:
    """Texts without white space that an issue must not have."""
    path, *versions = change
    old, new = ((data or b"").decode(errors="replace").splitlines() for data in versions)
    lines = (_squeezed(line) for line in {*new}.difference(old))
    name = [] if path.endswith("__init__.py") else [Path(path).name]
    return [path, *name, *(line for line in lines if len(line) >= _TELLING)]


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _distinct(reasons: Mapping[str, Reason]) -> list[Reason]:
    """Failures to show: the shortest first, each statement and each message once."""
    chosen: list[Reason] = []
    seen: set[str] = set()
    for _, reason in sorted(
        reasons.items(), key=lambda item: (len(item[1].statement + item[1].message), item[0])
    ):
        marks = {reason.statement, reason.message}
        if reason.statement and not marks & seen:
            chosen.append(reason)
            seen |= marks
    return chosen[:_SHOWN]


def _failure(number: int, reason: Reason) -> str:
    parts = [_told(part, reason) for part in reason.statement.split(_THERE)]
    statement = _short(_THERE.join(part.statement for part in parts), _MAX_STATEMENT)
    names, texts = ({each for part in parts for each in getattr(part, kind)} for kind in ("names", "texts"))
    given = ", ".join(f"`{name} = {text}`" for name, text in reason.arguments.items() if name not in names)
    where = f" (with {given})" if given else ""
    what = _happened(reason, parts[-1], texts)
    return f"{number}. The last statement{where} {what}:\n\n```python\n{statement}\n```"


def _told(statement: str, reason: Reason) -> Told:
    """Without what is right; of what cannot be read, only the names that are called."""
    told = without_answers(statement.rstrip(), reason.arguments)
    called = dict.fromkeys(re.findall(r"[A-Za-z_][\w.]*(?=\()", statement))
    return told or Told("\n".join(f"{name}(...)" for name in called))


def _happened(reason: Reason, last: Told, texts: Set[str]) -> str:
    """What came of the last statement: a wrong value, none, or an exception with words of its own."""
    message = _COLOUR.sub("", reason.message.strip())
    if "DID NOT RAISE" in message or message.endswith(" not raised"):
        return "does not raise what it should"
    if reason.type not in ("AssertionError", "Failed"):
        words = _short(message.removeprefix(f"{reason.type}: "), _MAX_MESSAGE)
        tells = any(text in words for text in texts)
        return f"raises `{reason.type}`" + ("" if tells or not words else f" ({words})")
    if (value := wrong_value(last, message)) is None:
        return "does not hold"
    wrong, kind = value
    right = f" (of type `{kind}`)" if kind else ""
    given = _short(wrong, _MAX_VALUE)
    return f"does not hold: there is `{given}` where another value is right{right}"


def _short(text: str, limit: int) -> str:
    for pattern, replacement in _VOLATILE:
        text = pattern.sub(replacement, text)
    return text if len(text) <= limit else text[:limit].rstrip() + " ..."


def _about(shown: Sequence[Reason], purposes: Mapping[str, str]) -> list[str]:
    names: dict[str, None] = {}
    for reason in shown:
        for name in re.findall(r"[A-Za-z_]\w*(?=\s*\()", reason.statement):
            if name in purposes:
                names.setdefault(name)
    return [f"- `{name}`: {_short(purposes[name], 200)}" for name in list(names)[:_MAX_PURPOSES]]
