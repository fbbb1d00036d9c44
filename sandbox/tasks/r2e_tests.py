"""From the benchmark's names of tests to pytest's node ids."""

import ast
from collections.abc import Mapping, Sequence


def node_ids(files: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Node ids of `names` (class and function joined by dots, without the file), by looking into `files`.

    Empty if one of the names cannot be told, because no file or more than one defines it: a list with
    gaps would let a patch pass that breaks what is missing.
    """
    defined = {path: _defined(code) for path, code in files.items()}
    found = []
    for name in names:
        base, bracket, arguments = name.partition("[")
        homes = [path for path, known in defined.items() if base in known] or list(files)
        if len(homes) != 1:
            return []
        found.append(f"{homes[0]}::{base.replace('.', '::')}{bracket}{arguments}")
    return found


def _defined(code: str) -> set[str]:
    """`test_x` and `Class.test_x` of a test file."""
    try:
        body = ast.parse(code).body
    except SyntaxError:  # for an older Python: its names cannot be told
        return set()
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{each.name}" for each in inner}
    return names
