"""What a working copy was, and how it differs from that, for backends that read all of it."""

import hashlib
import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sandbox.base import Diff, RejectedDiff
from sandbox.diffs import compare

_MAX_ENTRIES, _MAX_DEPTH = 20_000, 64
Kind = Literal["file", "folder", "link", "hard link", "special file"]


@dataclass
class Snapshot:
    """The state that a diff compares with: digest by file, target by link; `size` in bytes."""

    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    size: int = 0

    def add(self, files: Mapping[str, bytes]) -> None:
        """Counts `files` (relative paths) as known."""
        self.files |= {posixpath.normpath(path): digest(content) for path, content in files.items()}

    def copy(self) -> "Snapshot":
        """One that can change on its own."""
        return Snapshot(dict(self.files), dict(self.links), self.size)


@dataclass(frozen=True)
class Entry:
    """One thing in a working copy. `read` gives a file's content until the next entry is asked for."""

    path: str
    kind: Kind
    target: str = ""  # of a link
    size: int = 0  # bytes, of a file
    read: Callable[[], bytes] = bytes


def digest(content: bytes) -> bytes:
    """What stands for a file's content in a snapshot."""
    return hashlib.sha256(content).digest()


def changes(entries: Iterable[Entry], known: Snapshot, limit: int) -> Diff:
    """How a tree differs from `known`; at most `limit` bytes of changed content."""
    reading = _Reading(known, limit)
    try:
        for entry in entries:
            if problem := reading.problem(entry):
                return RejectedDiff(reason=problem)
            reading.take(entry)
    except OSError as error:
        return RejectedDiff(reason=f"the working copy cannot be read: {error}")
    return reading.result()


class _Reading:
    """What was found so far."""

    def __init__(self, known: Snapshot, limit: int) -> None:
        self._known, self._limit, self._left = known, limit, limit
        self._seen = 0
        self._found: dict[str, bytes] = {}
        self._changed: dict[str, bytes] = {}
        self._links: set[str] = set()

    def problem(self, entry: Entry) -> str:
        """Why a tree with this entry cannot be a patch, or ""."""
        self._seen += 1
        if self._seen - len(self._known.files) > _MAX_ENTRIES or entry.path.count("/") > _MAX_DEPTH:
            return "too many files or too deep"
        try:
            entry.path.encode()
        except UnicodeEncodeError:
            return f"{entry.path!r} cannot be read: its name is not UTF-8"
        if entry.kind in ("hard link", "special file"):
            return f"{entry.path} is a {entry.kind}"
        if entry.kind == "link" and self._known.links.get(entry.path) != entry.target:
            return f"{entry.path} is a symbolic link"
        if entry.kind == "file" and entry.size > self._left + self._known.size:
            return f"{entry.path}: more than {self._limit} bytes were changed"
        return ""

    def take(self, entry: Entry) -> None:
        """Counts an entry. Raises `OSError` if its content is too much or cannot be read."""
        if entry.kind == "link":
            self._links.add(entry.path)
        if entry.kind != "file":
            return
        content = entry.read()
        self._found[entry.path] = digest(content)
        if self._found[entry.path] != self._known.files.get(entry.path):
            self._changed[entry.path] = content
            self._left -= len(content)
        if self._left < 0:
            raise OSError(f"more than {self._limit} bytes were changed")

    def result(self) -> Diff:
        """The difference, once all was counted. A link that is gone counts as a deleted file."""
        before = self._known.files | dict.fromkeys(self._known.links, b"")
        differing = compare(before, self._found | dict.fromkeys(self._links, b"")).files
        return Diff(
            files={path: None if new is None else self._changed[path] for path, new in differing.items()}
        )
