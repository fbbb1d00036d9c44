"""What a terminal's output looks like to a reader: lines after carriage returns and escapes.

Colours and other attributes vanish; what was overwritten is gone; a cleared screen stays readable,
as it does in a terminal's history. Pure: no clock, no I/O.
"""

import codecs
import re
from collections import deque

HISTORY_LINES = 10_000
_HISTORY_CHARS = 4_000_000  # all kept lines together
_LINE_CHARS = 40_000  # one line; longer ones keep their two ends
_ESCAPE = re.compile(
    r"\x1b(?:"
    r"\[([0-9;:<=>?]*)[ -/]*([@-~])"  # CSI: parameters, final character
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC up to their end
    r"|[ -/]+[0-~]"  # character sets
    r"|[0-OQ-WYZ\\`-~])"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:<=>?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,4096}\x1b?|[ -/]*)\Z")
_PLAIN = re.compile(r"(?:[^\x00-\x08\x0a-\x1f\x7f-\x9f]+|\r?\n)+")  # whole lines and parts of lines
_MAX_COLUMN = 10_000  # a cursor is moved no further than this


class Screen:
    """Collects output; `text` is what is to be read of it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lines: deque[str] = deque()
        self._kept = 0  # characters in `_lines`
        self._line, self._column = "", 0
        self._held = ""  # an escape sequence that is not whole yet

    def feed(self, data: bytes) -> None:
        """Takes more output; sequences and characters may be split anywhere."""
        text = self._held + self._decoder.decode(data)
        self._held = ""
        if (cut := _unfinished(text)) >= 0:
            text, self._held = text[:cut], text[cut:]
        position = 0
        while position < len(text):
            position = self._step(text, position)

    def text(self) -> str:
        """The last `HISTORY_LINES` lines, without blanks at their ends."""
        return "\n".join(line.rstrip(" ") for line in (*self._lines, self._line))

    def clear(self) -> None:
        """Forgets every line; a half-received sequence is kept."""
        self._lines.clear()
        self._kept, self._line, self._column = 0, "", 0

    def _step(self, text: str, position: int) -> int:
        """Handles what stands at `position`; returns the position behind it."""
        if plain := _PLAIN.match(text, position):
            self._put_lines(plain[0].replace("\r\n", "\n").split("\n"))
            return plain.end()
        if text[position] == "\x1b" and (escape := _ESCAPE.match(text, position)):
            self._control(escape[1] or "", escape[2] or "")
            return escape.end()
        self._character(text[position])
        return position + 1

    def _character(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(self._column - 1, 0)

    def _put(self, text: str) -> None:
        line, column = self._line, self._column
        if column < len(line):
            self._line = line[:column] + text + line[column + len(text) :]
        else:
            self._line = line + " " * (column - len(line)) + text
        self._column = column + len(text)
        if len(self._line) > 2 * _LINE_CHARS:
            self._line = self._line[: _LINE_CHARS // 2] + self._line[-_LINE_CHARS // 2 :]
            self._column = len(self._line)

    def _put_lines(self, lines: list[str]) -> None:
        """Writes the first where the cursor is, and each other on a line of its own."""
        self._put(lines[0])
        if len(lines) == 1:
            return
        whole = [self._line, *lines[1:-1]][-HISTORY_LINES:]
        self._lines.extend(whole)
        self._kept += sum(map(len, whole))
        self._line, self._column = "", 0
        self._put(lines[-1])
        while len(self._lines) >= HISTORY_LINES or self._kept > _HISTORY_CHARS:
            self._kept -= len(self._lines.popleft())

    def _control(self, parameters: str, final: str) -> None:
        """Moves within the line and erasing in it; every other sequence shows nothing."""
        first = parameters.split(";")[0]
        count = min(int(first), _MAX_COLUMN) if first.isdecimal() else 0
        if final == "K":
            self._erase(count)
        elif final == "C":
            self._column = min(self._column + max(count, 1), _MAX_COLUMN)
        elif final == "D":
            self._column = max(self._column - max(count, 1), 0)
        elif final == "G":
            self._column = max(count, 1) - 1
        elif final == "P":
            self._line = self._line[: self._column] + self._line[self._column + max(count, 1) :]

    def _erase(self, how: int) -> None:
        if how == 0:
            self._line = self._line[: self._column]
        elif how == 1:
            self._line = " " * min(self._column + 1, len(self._line)) + self._line[self._column + 1 :]
        else:
            self._line = ""


def _unfinished(text: str) -> int:
    """Where a sequence begins that `text` does not end, -1 if none does: at one of the last two escapes."""
    last = text.rfind("\x1b")
    for start in (text.rfind("\x1b", 0, max(last, 0)), last):
        if start >= 0 and _UNFINISHED.match(text, start):
            return start
    return -1
