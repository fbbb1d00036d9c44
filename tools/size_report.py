"""Prints how long functions and files are, and fails on those that are too long.

Caps: a file has at most 400 lines, a function outside `kernels` at most 100. The aims (median
function 12, p90 45; files 100-300) are shown for the eye, not enforced.
"""

import ast
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("jaxrl", "kernels", "sandbox", "tools", "tests")
FILE_CAP = 400
FUNCTION_CAP = 100


def function_sizes(source: str) -> list[tuple[str, int, int]]:
    """(name, first line, number of lines) of every function of a module, nested ones too."""
    return [
        (node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def distribution(label: str, sizes: list[int]) -> str:
    """One line: count, median, 90th percentile (nearest rank) and maximum."""
    if not sizes:
        return f"{label:12} none"
    p90 = sorted(sizes)[-(-9 * len(sizes) // 10) - 1]
    median = statistics.median_low(sizes)
    return f"{label:12}{len(sizes):6} of median {median:4}, p90 {p90:4}, max {max(sizes):4} lines"


def measure(root: Path) -> tuple[dict[Path, int], list[tuple[Path, str, int, int]]]:
    """Lines of every non-empty Python file, and the functions in them, under `root`'s source folders."""
    files: dict[Path, int] = {}
    functions = []
    for path in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        source = path.read_text()
        if source.strip():
            relative = path.relative_to(root)
            files[relative] = source.count("\n")
            functions += [(relative, *found) for found in function_sizes(source)]
    return files, functions


def too_long(files: dict[Path, int], functions: list[tuple[Path, str, int, int]]) -> list[str]:
    """A complaint for each file and function over its cap."""
    complaints = [
        f"{path}: {size} lines, expected at most {FILE_CAP}; split it by idea"
        for path, size in files.items()
        if size > FILE_CAP
    ]
    return complaints + [
        f"{path}:{line}: {name} has {size} lines, expected at most {FUNCTION_CAP}; name its steps"
        for path, name, line, size in functions
        if size > FUNCTION_CAP and path.parts[0] != "kernels"
    ]


def main() -> None:
    """Reports on this checkout; exit status 1 if anything is too long."""
    files, functions = measure(ROOT)
    print(distribution("files", list(files.values())))
    print(distribution("functions", [size for *_, size in functions]))
    complaints = too_long(files, functions)
    print(*complaints, sep="\n", end="\n" if complaints else "")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
