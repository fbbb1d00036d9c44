"""What a test file needs beside it: conftest files, helper modules, package marks."""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath


def support_files(tree: Path, tests: Iterable[str], *, without: Iterable[str]) -> list[str]:
    """Python files in the folders of `tests`, and conftest files above, but none of `without`. Sorted.

    `without` are the project's test files: what is left is their support.
    """
    found: set[str] = set()
    for folder in {PurePosixPath(path).parent for path in tests}:
        above = [folder, *folder.parents]
        found |= {
            (each / "conftest.py").as_posix() for each in above if (tree / each / "conftest.py").is_file()
        }
        if folder.parts:  # beside tests at the top lie the project's own files
            found |= {path.relative_to(tree).as_posix() for path in (tree / folder).glob("*.py")}
    return sorted(found.difference(without))
