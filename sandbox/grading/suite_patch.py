"""What of an agent's diff crosses into the grader of a project's suite.

Three kinds of path never cross, whoever wrote them: tests and what configures the test runner (the hidden
tests and the image's own configuration count), version control, and installed or compiled files. They are
left out rather than punished: an honest agent writes its own tests, commits, and builds. What no honest
patch has (paths that leave the tree, start-up hooks of the interpreter) is an attack.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from sandbox.base import Diff, RejectedDiff
from sandbox.grading.patch import BadPatchError, SuspiciousPatchError, check_path
from sandbox.grading.suite_plan import by_file
from sandbox.tasks.schema import SuiteTests

MAX_FILE, MAX_TOTAL, MAX_FILES = 2 << 20, 16 << 20, 2000  # bytes, bytes, files
_RUNNER_FILES = {
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "noxfile.py", ".coveragerc"),
}
_FOREIGN_FOLDERS = {
    *(
        ".git",
        ".hg",
        ".svn",
        "site-packages",
        "dist-packages",
        "__pycache__",
        ".pytest_cache",
        ".tox",
        ".nox",
    ),
    *(".venv", "venv", "node_modules", ".eggs", ".mypy_cache", ".ruff_cache", ".hypothesis"),
}
_FOREIGN_SUFFIXES = {
    *(".pyc", ".pyo", ".so", ".pyd", ".dll", ".dylib", ".o", ".a", ".obj", ".exe", ".egg", ".whl", ".class"),
}
_START_UP = {"sitecustomize.py", "usercustomize.py", "pyvenv.cfg"}
_PACKAGE_RECORD = re.compile(r"\.(dist-info|egg-info|egg-link)$")
_TEST_FOLDER = re.compile(r"(r2e|unit|functional|integration)?_?tests?(suite)?", re.IGNORECASE)
_TEST_NAME = re.compile(r"(test_.*|.*_test|tests?)\.py")
_NATIVE = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The part of a diff that is applied (content, or None for a deletion), and the paths that are not."""

    files: Mapping[str, bytes | None]
    left_out: tuple[str, ...]


def select(hidden: SuiteTests, diff: Diff) -> Patch:
    """Raises `BadPatchError` (too large) or `SuspiciousPatchError` (no honest patch has it)."""
    if isinstance(diff, RejectedDiff):
        raise SuspiciousPatchError(diff.reason)
    for path in diff.files:
        check_path(path)
        _check_hook(path)
    guarded = _guarded(hidden)
    kept = {path: data for path, data in diff.files.items() if not _left_out(path, data, guarded)}
    _check_size(kept)
    return Patch(files=kept, left_out=tuple(sorted(diff.files.keys() - kept.keys())))


def without_new_tests(patch: Patch, existing: Collection[str]) -> Patch:
    """Leaves out new test files elsewhere: an agent's own. Those that exist may be sources."""
    new = {path for path in patch.files if path not in existing and _TEST_NAME.fullmatch(path.split("/")[-1])}
    return leave_out(patch, new)


def leave_out(patch: Patch, paths: Collection[str]) -> Patch:
    """The patch without some of its files."""
    files = {path: data for path, data in patch.files.items() if path not in paths}
    return Patch(files=files, left_out=tuple(sorted({*patch.left_out, *paths})))


def _check_hook(path: str) -> None:
    parts = path.split("/")
    if set(parts) & _FOREIGN_FOLDERS:
        return  # left out anyway
    if parts[-1] in _START_UP or parts[-1].endswith(".pth"):
        raise SuspiciousPatchError(f"{path} would run at the start of every interpreter")


def _guarded(hidden: SuiteTests) -> tuple[str, ...]:
    """Files and folders (with a final slash) whose content is the hidden tests' or the image's alone."""
    tests = {*hidden.files, *by_file([*hidden.fail_to_pass, *hidden.pass_to_pass])}
    folders = set()
    for path in tests:
        parents = PurePosixPath(path).parents
        # A `testing` inside a package is part of what is tested, as a rule.
        folders |= {
            f"{each}/" for each in parents if _TEST_FOLDER.fullmatch(each.name) or str(each) == "testing"
        }
    return tuple(sorted(folders | tests))


def _left_out(path: str, content: bytes | None, guarded: tuple[str, ...]) -> bool:
    parts = path.split("/")
    name, suffix = parts[-1], PurePosixPath(path).suffix
    return (
        path.startswith(guarded)
        or name in _RUNNER_FILES
        or not _FOREIGN_FOLDERS.isdisjoint(parts)
        or any(_PACKAGE_RECORD.search(part) for part in parts)
        or suffix in _FOREIGN_SUFFIXES
        or (content is not None and content.startswith(_NATIVE))
    )


def _check_size(files: Mapping[str, bytes | None]) -> None:
    sizes = {path: len(content or b"") for path, content in files.items()}
    largest = max(sizes, key=lambda path: sizes[path], default="")
    if sizes and sizes[largest] > MAX_FILE:
        raise BadPatchError(f"{largest}: expected at most {MAX_FILE} bytes, got {sizes[largest]}")
    if len(files) > MAX_FILES or sum(sizes.values()) > MAX_TOTAL:
        got = f"{len(files)} of {sum(sizes.values())}"
        raise BadPatchError(f"expected at most {MAX_FILES} files of {MAX_TOTAL} bytes, got {got}")
