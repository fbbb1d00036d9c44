"""A Python source with byte positions: where its functions' nodes lie, and single edits of it."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

_NEWLINE = re.compile(rb"\r\n|\r|\n")
_COMMENT = re.compile(rb"#[^\r\n]*")
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", re.MULTILINE)
_UNSEEN = {"annotation", "returns", "decorator_list", "type_params", "bases"}


class UnsupportedSourceError(ValueError):
    """The file cannot be edited by byte position: it does not parse, or it is not plain UTF-8."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change: the bytes from `start` to `end` become `replacement`.

    `function` is the qualified name of what holds it, `lines` the first and last line (from 1) of which
    one runs whenever the edit matters; both serve the choice of sites and tests, never an agent.
    """

    operator: str
    start: int
    end: int
    replacement: str
    function: str
    lines: tuple[int, int]

    def apply(self, source: bytes) -> bytes:
        """The changed source. Raises `ValueError` if the span is not inside `source`."""
        if not 0 <= self.start <= self.end <= len(source):
            raise ValueError(f"expected a span within {len(source)} bytes, got {self.start}:{self.end}")
        return source[: self.start] + self.replacement.encode() + source[self.end :]


@dataclass(frozen=True)
class Spot:
    """A node inside a function: in which function and class, and the statements around it.

    `block` is the list of statements that holds `node` if it is a statement, else empty; `lines` are
    those of the innermost statement, without the body of a compound one.
    """

    node: ast.AST
    function: str
    owner: ast.ClassDef | None
    lines: tuple[int, int]
    block: Sequence[ast.stmt] = ()


class Module:
    """Raises `UnsupportedSourceError` unless `text` is UTF-8 Python without a byte order mark."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        try:
            text.decode()
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise UnsupportedSourceError(f"expected UTF-8 Python source: {error}") from error
        cookie = _COOKIE.search(b"\n".join(_NEWLINE.split(text, 2)[:2]))
        if text.startswith(b"\xef\xbb\xbf") or (cookie and cookie[1].lower() not in (b"utf-8", b"utf8")):
            raise UnsupportedSourceError("expected plain UTF-8 without byte order mark or another encoding")
        self._starts = [0, *(found.end() for found in _NEWLINE.finditer(text))]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Byte offsets of a node that has a position."""
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, end

    def between(self, left: ast.AST, right: ast.AST) -> tuple[int, bytes]:
        """Offset and bytes of what separates two operands; comments are blanked."""
        start, end = self.span(left)[1], self.span(right)[0]
        return start, _COMMENT.sub(lambda found: b" " * len(found[0]), self.text[start:end])

    def lines_of(self, node: ast.AST) -> tuple[int, int] | None:
        """Span of the whole lines of a statement, or None if something else stands on them."""
        start, end = self.span(node)
        first = self._starts[node.lineno - 1]  # type: ignore[attr-defined]
        rest = _NEWLINE.search(self.text, end)
        last = rest.end() if rest else len(self.text)
        after = self.text[end:last].strip()
        if self.text[first:start].strip() or (after and not after.startswith(b"#")):
            return None
        return first, last

    @cached_property
    def spots(self) -> Sequence[Spot]:
        """Every node inside a function body, in source order of their visit."""
        return tuple(_spots(self.tree, _Scope()))


@dataclass(frozen=True)
class _Scope:
    name: str = ""
    owner: ast.ClassDef | None = None
    lines: tuple[int, int] = (0, 0)
    inside: bool = False  # a function


def _spots(node: ast.AST, scope: _Scope) -> Iterator[Spot]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _declares_only(node):
        return
    scope = _entered(node, scope)
    for field, value in ast.iter_fields(node):
        if field in _UNSEEN or isinstance(value, ast.JoinedStr):
            continue
        block = value if _is_block(value) else ()
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                if scope.inside:
                    yield Spot(child, scope.name, scope.owner, _lines(child, scope), block)
                yield from _spots(child, scope)


def _entered(node: ast.AST, scope: _Scope) -> _Scope:
    if isinstance(node, ast.ClassDef):
        return replace(scope, name=_join(scope.name, node.name), owner=node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        body = node.body[0].lineno, node.body[-1].end_lineno or node.lineno
        return replace(scope, name=_join(scope.name, node.name), lines=body, inside=True)
    return replace(scope, lines=_lines(node, scope))


def _lines(node: ast.AST, scope: _Scope) -> tuple[int, int]:
    if not isinstance(node, ast.stmt):
        return scope.lines
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return node.lineno, max(last, node.lineno)


def _declares_only(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    named = [getattr(each, "attr", getattr(each, "id", "")) for each in node.decorator_list]
    return "overload" in named or "abstractmethod" in named


def _is_block(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, ast.stmt) for each in value)


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
