"""The benchmark's own way of judging, as it is: names and statuses read from what pytest prints. Pure.

Its faults are part of it: a line that says PASSED anywhere has passed, whatever it begins with; names lose
their file, so that equal ones in two files are one; and whoever prints a summary first is believed.
"""

import difflib
import re
from collections.abc import Mapping

MARKER = "short test summary info"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STATUSES = ("PASSED", "FAILED", "ERROR")


def statuses(log: str) -> dict[str, str]:
    """Status by name: what stands between the first marker and the second, or the end."""
    sections = log.split(MARKER)
    found: dict[str, str] = {}
    for line in sections[1].strip().split("\n") if len(sections) > 1 else []:
        status = next((each for each in _STATUSES if each in line), None)
        if status is not None:
            name = ".".join(line.split("::")[1:])
            # A passed line has no reason behind its name, and is not cut yet.
            found[name if status == "PASSED" else name.split(" - ")[0]] = status
    return _plain(found)


def _plain(results: Mapping[str, str]) -> dict[str, str]:
    """Names without colours and reasons. Where two become one, the last in alphabetical order wins."""
    bare = {_COLOUR.sub("", name): status for name, status in results.items()}
    return {name.split(" - ")[0]: bare[name] for name in sorted(bare)}


def same_results(found: Mapping[str, str], expected: Mapping[str, str]) -> tuple[bool, str]:
    """Whether there are as many entries as expected, each with its status; and what is not so."""
    wanted = _plain(expected)
    if len(found) != len(wanted):
        return False, f"expected {len(wanted)} entries, got {len(found)}"
    for name, status in found.items():
        if name and wanted.get(name) != status:
            return False, f"{name}: expected {wanted.get(name, 'no such entry')}, got {status}"
    return True, f"{len(wanted)} entries as expected"


def git_patch(before: Mapping[str, bytes], after: Mapping[str, bytes | None]) -> bytes:
    """A diff as git writes it, of the text files in `after`; binary files are left out."""
    parts = [
        _file_patch(path, before.get(path), content)
        for path, content in sorted(after.items())
        if content != before.get(path)
        and not any(b"\0" in (data or b"") for data in (content, before.get(path)))
    ]
    return b"".join(parts)


def _file_patch(path: str, old: bytes | None, new: bytes | None) -> bytes:
    name = path.encode(errors="surrogateescape")
    head = b"diff --git a/%s b/%s\n" % (name, name)
    if old is None:
        head += b"new file mode 100644\n"
    if new is None:
        head += b"deleted file mode 100644\n"
    source = b"/dev/null" if old is None else b"a/" + name
    target = b"/dev/null" if new is None else b"b/" + name
    lines = difflib.diff_bytes(
        difflib.unified_diff, _lines(old), _lines(new), source, target, b"", b"", 3, b"\n"
    )
    return head + b"".join(map(_ended, lines))


def _lines(content: bytes | None) -> list[bytes]:
    """Lines as git counts them: only a line feed ends one."""
    return [] if not content else re.findall(rb"[^\n]*\n|[^\n]+$", content)


def _ended(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
