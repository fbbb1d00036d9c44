"""Edits of a text, and how parts of it are shown: pure functions. A line ends at "\\n" only."""

import re

CONTEXT = 4  # lines shown around an edit
MAX_SHOWN = 16_000  # characters of a file or a listing in one reply
_CLIPPED = "<response clipped>[the limit of a reply is {limit} characters; {hint}]"


class EditError(Exception):
    """An edit that cannot be made; the text is for the model."""


def line_count(text: str) -> int:
    """Lines of `text`; an empty text has none."""
    return text.count("\n") + (not text.endswith("\n") and text != "")


def numbered(text: str, start: int = 1) -> str:
    """Each line after its number, counted from `start`."""
    return "".join(f"{number:6}\t{line}\n" for number, line in enumerate(_lines(text), start))


def excerpt(text: str, first: int, last: int) -> str:
    """Lines `first` to `last` (from 1, both included)."""
    return "".join(_kept(text)[first - 1 : last])


def clip(text: str, hint: str) -> str:
    """The first `MAX_SHOWN` characters of `text`, with a note where something is missing."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + _CLIPPED.format(limit=MAX_SHOWN, hint=hint)


def replace(text: str, old: str, new: str) -> tuple[str, int]:
    """(`text` with `new` for the only `old`, the line it began at).

    An `old` that does not occur is tried once more without blanks at its ends. Raises `EditError`.
    """
    if old == new:
        raise EditError("old_str and new_str are equal: nothing would change")
    if not old:
        raise EditError("old_str is empty: expected the text to replace")
    found = _occurrences(text, old)
    if not found and (stripped := old.strip()):
        old = stripped
        found = _occurrences(text, old)
    if not found:
        raise EditError("old_str does not occur in the file exactly as given: nothing was changed")
    lines = [text.count("\n", 0, start) + 1 for start in found]
    if len(found) > 1:
        numbers = ", ".join(map(str, sorted(set(lines))))
        raise EditError(
            f"old_str occurs {len(found)} times, in lines {numbers}: make it unique; nothing was changed"
        )
    (start,) = found
    return text[:start] + new + text[start + len(old) :], lines[0]


def insert(text: str, after: int, new: str) -> str:
    """`text` with `new` as lines of its own after line `after`; 0 is before the first.

    Raises `EditError` for a line that `text` does not have.
    """
    count = line_count(text)
    if not 0 <= after <= count:
        raise EditError(f"insert_line: expected 0 to {count}, the lines of the file, got {after}")
    lines = _kept(text)
    if after == count and text and not text.endswith("\n"):
        lines[-1] += "\n"
    return "".join([*lines[:after], f"{new}\n", *lines[after:]])


def _occurrences(text: str, old: str) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(old), text)]


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _kept(text: str) -> list[str]:
    """The lines with their ends."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
