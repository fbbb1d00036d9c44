"""Static scan of a patch: what its files reach for now that none of them reached for before.

The scan compares sets of findings, not lines: code that was kept, moved between the files of the patch or
edited beside a suspicious line is no news. A module that this Python cannot parse may be one to the
project's own: its text is searched instead, comments and all. Other languages are not read.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sandbox.grading.scan_names import LONGEST, Names, constant_text, constant_texts, sums_within
from sandbox.grading.scan_rules import (
    ATTRIBUTES,
    CLOSED,
    COMPARISONS,
    FOREIGN,
    MEMBERS,
    MODULES,
    NAMES,
    PICKERS,
    STRINGS,
)
from sandbox.grading.scan_text import text_findings


@dataclass(frozen=True, order=True)
class Hit:
    """Something suspicious at a place of a patched file."""

    path: str
    line: int
    what: str
    unread: bool = False  # found in the text of a file that does not parse

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def scan(before: Mapping[str, bytes], after: Mapping[str, bytes | None]) -> list[Hit]:
    """Hits in the files of `after` that nothing in `before` explains, in order."""
    known = {hit.what for path, content in before.items() for hit in findings(path, content)}
    found = {
        hit
        for path, content in after.items()
        if content is not None
        for hit in findings(path, content)
        if hit.what not in known
    }
    if any(hit.unread for hit in found):
        texts = {what for content in before.values() for _, what in text_findings(content)}
        found = {hit for hit in found if not (hit.unread and hit.what in texts)}
    return sorted(found)


def findings(path: str, content: bytes) -> Iterator[Hit]:
    """Everything of the rules in one Python file, whoever wrote it."""
    if not path.endswith(".py"):
        return
    try:
        yield from _found(path, ast.parse(content))
    except (RecursionError, MemoryError):  # another Python may take what is too deep for this one
        yield Hit(path, 0, "nests too deeply to be read")
    except (SyntaxError, ValueError):
        yield from (Hit(path, line, what, unread=True) for line, what in text_findings(content))


def _found(path: str, tree: ast.Module) -> Iterator[Hit]:
    names, quiet = Names(tree), _docstrings(tree)
    for node in ast.walk(tree):
        if id(node) not in quiet:
            for what in _judge(node, names):
                yield Hit(path, getattr(node, "lineno", 0), what)
            quiet.update(map(id, sums_within(node)))


def _judge(node: ast.AST, names: Names) -> Iterator[str]:
    match node:
        case ast.Import() | ast.ImportFrom():
            yield from (f"imports {module}" for name in names.imported(node) for module in _within(name))
            yield from (f"uses {name}" for name in names.imported(node) if name in NAMES)
            stars = (name.removesuffix(".*") for name in names.imported(node) if name.endswith(".*"))
            yield from (f"imports all of {owner}" for owner in stars if owner in CLOSED)
        case ast.Name() | ast.Attribute():
            yield from _reference(node, names)
        case ast.Call():
            yield from _call(node, names)
            yield from _picked(node, names)
        case ast.Constant(value=str()) | ast.BinOp() | ast.JoinedStr():
            yield from _strings(node)
        case ast.ClassDef():
            yield from _class(node)


def _reference(node: ast.Name | ast.Attribute, names: Names) -> Iterator[str]:
    name = names.dotted(node)
    if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
        yield f"uses .{node.attr}"
    if name is None:
        return
    if known := _known(name):
        yield f"uses {known}"
    owner, _, last = name.rpartition(".")
    if last in ("__dict__", "__getattribute__") and owner in CLOSED:
        yield f"looks for a hidden name in {owner}"
    stored = isinstance(node.ctx, ast.Store | ast.Del)
    if stored and isinstance(node, ast.Attribute) and names.foreign(node.value, FOREIGN):
        yield f"replaces {name}"


def _known(name: str) -> str | None:
    """The name of the rules that `name` is, maybe by way of a module that imports it: subprocess.os._exit."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts) - 1))
    return name if name in NAMES else next((end for end in ends if end in NAMES), None)


def _call(node: ast.Call, names: Names) -> Iterator[str]:
    name = names.dotted(node.func)
    if name in ("importlib.import_module", "__import__") and node.args:
        target = constant_text(node.args[0])
        yield from (f"imports {module}" for module in _within(target or ""))
    if name in ("getattr", "setattr", "delattr", "vars") and node.args:
        owner = node.args[0]
        if not names.foreign(owner, FOREIGN):
            return
        member = constant_text(node.args[1]) if len(node.args) > 1 else None
        whole = f"{names.dotted(owner)}.{member}"
        if name in ("setattr", "delattr"):
            yield f"replaces {whole if member else 'a part of ' + str(names.dotted(owner))}"
        elif member is None and names.foreign(owner, CLOSED):
            yield f"looks for a hidden name in {names.dotted(owner)}"
        elif whole in NAMES:
            yield f"uses {whole}"


def _picked(node: ast.Call, names: Names) -> Iterator[str]:
    """attrgetter("kill")(os), methodcaller("kill", ...)(os): what picks a member, and of what."""
    name = names.dotted(node.func)
    if name in PICKERS:
        texts = filter(None, map(constant_text, node.args))
        yield from (f"picks {text}" for text in texts if any(each.endswith(f".{text}") for each in NAMES))
    if isinstance(node.func, ast.Call) and names.dotted(node.func.func) in PICKERS:
        owners = {names.dotted(each) for each in node.args}
        yield from (f"looks for a hidden name in {owner}" for owner in sorted(owners & CLOSED, key=str))


def _strings(node: ast.expr) -> Iterator[str]:
    for text in constant_texts(node):
        if text in MEMBERS:
            yield MEMBERS[text]
        if len(text) < LONGEST:
            yield from (f"names {what}" for what, pattern in STRINGS.items() if pattern.search(text))


def _class(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if each.name == "__class__":
            yield f"defines {each.name}"
        if each.name in COMPARISONS and _constant_answer(each):
            yield f"defines {each.name} with one answer for everything"


def _constant_answer(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return bool(returns) and all(
        isinstance(each.value, ast.Constant) and each.value.value is True for each in returns
    )


def _within(name: str) -> list[str]:
    """The module of the rules that `name` is or lies in."""
    parts = name.split(".")
    return [whole for count in range(len(parts)) if (whole := ".".join(parts[: count + 1])) in MODULES]


def _docstrings(tree: ast.Module) -> set[int]:
    """Identities of strings that are statements: prose that nothing uses."""
    statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(value) for value in statements if isinstance(value, ast.Constant)}
