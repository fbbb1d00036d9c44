"""How a working copy differs from what it was, as a diff taken by the trusted side."""

from collections.abc import Iterable, Mapping

from sandbox.base import Diff

_IGNORED = {"__pycache__", ".pytest_cache"}


def compare(before: Mapping[str, bytes], after: Mapping[str, bytes], deleted: Iterable[str] = ()) -> Diff:
    """New, changed and deleted files (path relative to the working directory), without caches.

    `before`: the files put there; `after`: those that differ from the image's tree, and all of
    `before` that are left; `deleted`: files of the image's tree that are gone.
    """
    changed: dict[str, bytes | None] = {
        path: content
        for path, content in after.items()
        if before.get(path) != content and not _IGNORED & set(path.split("/"))
    }
    gone = {path for path in deleted if not _IGNORED & set(path.split("/"))} | set(before)
    return Diff(files=changed | {path: None for path in sorted(gone) if path not in after})
