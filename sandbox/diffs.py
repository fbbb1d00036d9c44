"""How two file sets differ, as a diff taken by the trusted side."""

from collections.abc import Mapping

from sandbox.base import Diff

_IGNORED = {"__pycache__", ".pytest_cache"}


def compare(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Diff:
    """New, changed and deleted files (path relative to the working directory), without caches."""
    changed: dict[str, bytes | None] = {
        path: content
        for path, content in after.items()
        if before.get(path) != content and not _IGNORED & set(path.split("/"))
    }
    return Diff(files=changed | {path: None for path in before if path not in after})
