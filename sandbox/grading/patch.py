"""What of an agent's diff crosses into the grader."""

import hashlib
from collections.abc import Mapping

from sandbox.base import Diff, RejectedDiff
from sandbox.tasks.schema import TaskSpec

_MAX_FILE, _MAX_TOTAL, _MAX_FILES = 256 << 10, 1 << 20, 1000  # bytes, bytes, files


class BadPatchError(ValueError):
    """The diff cannot be applied: the patch fails."""


class SuspiciousPatchError(ValueError):
    """The diff has what no honest patch has: links, or paths that leave the working directory."""


def apply(task: TaskSpec, diff: Diff) -> dict[str, str]:
    """The task's files with the diff applied.

    Changes of files that the task does not have are left out unless they are Python sources.
    Raises `BadPatchError` or `SuspiciousPatchError`.
    """
    if isinstance(diff, RejectedDiff):
        raise SuspiciousPatchError(diff.reason)
    files = dict(task.files)
    for path, content in diff.files.items():
        check_path(path)
        if content is None:
            files.pop(path, None)
        elif path in task.files or path.endswith(".py"):
            files[path] = _text(path, content)
    _check_total(files)
    return files


def digest(diff: Diff) -> str:
    """Hash of a diff's content; equal diffs have equal digests."""
    hasher = hashlib.sha256()
    for path in sorted(diff.files):
        content = diff.files[path]
        for part in (
            path.encode(errors="surrogateescape"),
            b"deleted" if content is None else b"file",
            content or b"",
        ):
            hasher.update(len(part).to_bytes(8) + part)
    return hasher.hexdigest()


def check_path(path: str) -> None:
    parts = path.split("/")
    if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise SuspiciousPatchError(f"expected a path inside the working directory, got {path!r}")


def _text(path: str, content: bytes) -> str:
    if len(content) > _MAX_FILE:
        raise BadPatchError(f"{path}: expected at most {_MAX_FILE} bytes, got {len(content)}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadPatchError(f"{path}: expected UTF-8 text, {error}") from error


def _check_total(files: Mapping[str, str]) -> None:
    total = sum(map(len, files.values()))
    if len(files) > _MAX_FILES or total > _MAX_TOTAL:
        raise BadPatchError(
            f"expected at most {_MAX_FILES} files of {_MAX_TOTAL} characters, got {len(files)} of {total}"
        )
    folders = {path[:i] for path in files for i, letter in enumerate(path) if letter == "/"}
    if clash := folders & files.keys():
        raise BadPatchError(f"{min(clash)} is both a file and a folder")
