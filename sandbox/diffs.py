"""Diffs as taken by the trusted side: which are refused, and how two file sets differ."""

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.base import Diff

_IGNORED = {"__pycache__", ".pytest_cache"}


@dataclass(frozen=True, kw_only=True)
class RejectedDiff(Diff):
    """A working copy that cannot be a patch: it holds links, special or unreadable files, or too much.

    `files` is empty; graders answer "tampering" with `reason`.
    """

    reason: str

    @property
    def empty(self) -> bool:
        """Never: something was changed."""
        return False


def compare(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Diff:
    """New, changed and deleted files (path relative to the working directory), without caches."""
    changed: dict[str, bytes | None] = {
        path: content
        for path, content in after.items()
        if before.get(path) != content and not _IGNORED & set(path.split("/"))
    }
    return Diff(files=changed | {path: None for path in before if path not in after})
