"""A known fix as the tool calls of an agent that makes it. Pure."""

import base64
import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from jaxrl.rollout.calls import Call, render_call
from sandbox.agent_tools.text_file import NotTextError, TextFile

type Turn = Sequence[Call]
type Files = Mapping[str, bytes | None]  # by path in the working directory; None: there is no such file

_AROUND = 5  # lines shown on both sides of a change


def fix_turns(before: Files, after: Files, *, harness: str, workdir: str) -> list[Turn]:
    """What an agent does that turns the files `before` into those `after` and finishes.

    Args:
      before: what the agent finds at each path of `after`.
      harness: whose tools are called, `compact` or `openhands`.

    Raises `ValueError` if the tools of `compact` cannot carry the change.
    """
    changed = [path for path in after if before[path] != after[path]]
    if harness == "compact":
        turns = [turn for path in changed for turn in _compact(path, before[path], after[path])]
        return [*turns, (Call(name="finish"),)]
    look = _bash("git status --short | head && git log --oneline | head -3")
    turns = [turn for path in changed for turn in _openhands(f"{workdir}/{path}", before[path], after[path])]
    return [(look,), *turns, (Call(name="finish", arguments={"message": "The known fix is in place."}),)]


def replacements(before: str, after: str) -> Iterator[tuple[str, str]]:
    """(old, new) pairs that make `after` of `before` one after the other.

    Each `old` occurs exactly once when its turn comes; the last change comes first. `before` is not empty.
    """
    lines, new_lines = _lines(before), _lines(after)
    matcher = difflib.SequenceMatcher(None, lines, new_lines, autojunk=False)
    hunks = [(i, j, new_lines[k:m]) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]
    for start, stop, new in reversed(hunks):
        yield _unique(lines, start, stop, new)
        lines[start:stop] = new


def _unique(lines: Sequence[str], start: int, stop: int, new: Sequence[str]) -> tuple[str, str]:
    """The change of lines start:stop with as many lines around as make the old text unique."""
    text = "".join(lines)
    for margin in range(len(lines) + 1):
        low, high = max(0, start - margin), min(len(lines), stop + margin)
        old = "".join(lines[low:high])
        changed = "".join([*lines[low:start], *new, *lines[stop:high]])
        if old.endswith("\n") and changed.endswith("\n"):
            old, changed = old[:-1], changed[:-1]
        if old.strip() and text.find(old) == text.rfind(old):  # overlapping ones count, too
            return old, changed
    raise ValueError("expected a text with something in it to replace; it is blank")


def _compact(path: str, before: bytes | None, after: bytes | None) -> Iterator[Turn]:
    if before is None or after is None:
        raise ValueError(f"{path}: expected a change within a file: compact can neither make nor remove one")
    yield (Call(name="view", arguments={"path": path}),)
    for old, new in replacements(before.decode(), after.decode()):
        yield (Call(name="str_replace", arguments={"path": path, "old_str": old, "new_str": new}),)


def _openhands(path: str, before: bytes | None, after: bytes | None) -> list[Turn]:
    """By the editor; what it cannot carry (no text, mixed line ends, our own markup) by the shell."""
    if after is None:
        return [(_bash(f"rm -- {shlex.quote(path)}"),)]
    try:
        edits = _edited(path, before, after)
        _ = [render_call(call.name, call.arguments).encode() for call in edits]
    except (NotTextError, ValueError):
        return [(_written(path, after),)]
    if before is None:
        return [edits]
    first, last = _changed_lines(before, after)
    shown = f"[{max(1, first - _AROUND)}, {last + _AROUND}]"
    return [(_editor("view", path, view_range=shown),), edits]


def _edited(path: str, before: bytes | None, after: bytes) -> Turn:
    """Raises `NotTextError` or `ValueError` where the editor would not give exactly `after`."""
    new = TextFile.parse(after)
    if before is None:
        if new.crlf:
            raise ValueError(f"{path}: expected a new file without CR")
        return (_editor("create", path, file_text=new.text),)
    old = TextFile.parse(before)
    if old.crlf != new.crlf:
        raise ValueError(f"{path}: expected line ends that stay")
    pairs = [*replacements(old.text, new.text)]
    return [_editor("str_replace", path, old_str=was, new_str=now) for was, now in pairs]


def _changed_lines(before: bytes, after: bytes) -> tuple[int, int]:
    """First and last line of `before`, counted from 1, that a change touches."""
    old, new = (_lines(TextFile.parse(each).text) for each in (before, after))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    spans = [(i, j) for tag, i, j, _, _ in matcher.get_opcodes() if tag != "equal"]
    return min(spans[0][0] + 1, len(old)), max(spans[-1][1], 1)


def _written(path: str, content: bytes) -> Call:
    """Lines of 76 characters: a terminal takes no endless ones."""
    folder, encoded = shlex.quote(path.rpartition("/")[0]), base64.encodebytes(content).decode()
    return _bash(f"mkdir -p {folder} && base64 -d > {shlex.quote(path)} <<'THE_END'\n{encoded}THE_END")


def _editor(command: str, path: str, **arguments: str) -> Call:
    return Call(name="str_replace_editor", arguments={"command": command, "path": path, **arguments})


def _bash(command: str) -> Call:
    return Call(name="execute_bash", arguments={"command": command})


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)
