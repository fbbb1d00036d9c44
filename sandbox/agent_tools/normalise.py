"""Tool output without what differs between equal runs: a pure function of the text and its history.

Only forms that are certain are touched, and a line keeps its length where a reader might count on
it: honest text that merely holds a number, a time or a path comes out as it went in.

- times: pytest's and unittest's last line, pytest's slowest durations, bash's `time`, the
  modification times of `ls -l`
- addresses in Python's `<… at 0x…>`: numbered in the order of their first appearance, so that equal
  ones stay equal
- process ids in bash's notices (`[1] 1234`, `line 3: 1234 Killed`): 1
- names that Python's tempfile and mktemp draw: numbered likewise; `restore` puts the real name back
  into what the agent types

Hash order is fixed where it arises: the agent's shell sets PYTHONHASHSEED.
"""

import re

_COUNT = r"\d+ (?:passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?|rerun|subtests passed)"
_SUMMARY = re.compile(
    rf"^(=+ )?((?:{_COUNT}(?:, {_COUNT})*|no tests (?:ran|collected)|\d+ tests? collected)[^\n=]*?"
    r" in )\d+\.\d\ds(?: \(\d+:\d\d:\d\d\))?( =+)?$",
    re.MULTILINE,
)
_UNITTEST = re.compile(r"^(Ran \d+ tests? in )\d+\.\d{3}s$", re.MULTILINE)
_DURATION = re.compile(r"^\d+\.\d\ds( (?:call|setup|teardown) +\S+::)", re.MULTILINE)
_TIME = re.compile(r"^(real|user|sys)\t\d+m\d+\.\d{3}s$", re.MULTILINE)
_LISTING = re.compile(
    r"^([-dlbcps][-rwxsStT]{9}[.+@]? +\d+ +\S+ +\S+ +\d+(?:, +\d+)? )"
    r"[A-Z][a-z]{2} [ \d]\d (?:\d\d:\d\d| \d{4})( )",
    re.MULTILINE,
)
_ADDRESS = re.compile(r"(<[^<>\n]*? at )0x([0-9a-f]{6,16})(?=>)")
_JOB = re.compile(r"^(\[\d+\][+-]?) \d+$", re.MULTILINE)
_DEAD = re.compile(
    r"^(\S+: line \d+: +)\d+( (?:Killed|Terminated|Aborted|Segmentation fault)\b)", re.MULTILINE
)
_SCRATCH = re.compile(r"/tmp/tmp(?:\.([A-Za-z0-9]{10})|([a-z0-9_]{8}))(?![A-Za-z0-9_.-])")
_ALIAS = re.compile(r"/tmp/tmp(?:\.0000(\d{6})|0000(\d{4}))(?![A-Za-z0-9_.-])")


class Normaliser:
    """Normalises the outputs of one episode, which share the numbers of addresses and names."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}  # real → shown
        self._names: dict[str, str] = {}  # real → alias
        self._real: dict[str, str] = {}  # alias → real

    def clean(self, text: str) -> str:
        """`text` as every equal run prints it. Applying it twice changes nothing more."""
        text = _SUMMARY.sub(_summary, text)
        text = _UNITTEST.sub(r"\g<1>0.000s", text)
        text = _DURATION.sub(r"0.00s\1", text)
        text = _TIME.sub("\\1\t0m0.000s", text)
        text = _LISTING.sub(r"\1Jan  1 00:00\2", text)
        text = _ADDRESS.sub(self._address, text)
        text = _JOB.sub(r"\1 1", text)
        text = _DEAD.sub(r"\g<1>1\2", text)
        return _SCRATCH.sub(self._scratch, text)

    def restore(self, command: str) -> str:
        """`command` with the real names of scratch files for those that the agent was shown."""
        return _ALIAS.sub(lambda match: self._real.get(match[0], match[0]), command)

    def _address(self, match: re.Match[str]) -> str:
        shown = match[2]
        if shown not in self._addresses.values():  # else it is one of ours, printed again
            shown = self._addresses.setdefault(match[2], f"7f{len(self._addresses) + 1:010x}")
        return f"{match[1]}0x{shown}"

    def _scratch(self, match: re.Match[str]) -> str:
        real = match[0]
        if real in self._real:  # an alias, printed again
            return real
        if real not in self._names:
            number = len(self._names) + 1
            alias = f"/tmp/tmp.0000{number:06}" if match[1] else f"/tmp/tmp0000{number:04}"
            self._names[real], self._real[alias] = alias, real
        return self._names[real]


def _summary(match: re.Match[str]) -> str:
    """The line with no time in it, filled with `=` to the width it had."""
    plain = f"{match[2]}0.00s"
    if not (match[1] and match[3]):
        return f"{match[1] or ''}{plain}{match[3] or ''}"
    fill = len(match[0]) - len(plain) - 2
    return f"{'=' * (fill // 2)} {plain} {'=' * (fill - fill // 2)}"
