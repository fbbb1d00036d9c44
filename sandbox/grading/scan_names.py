"""What the names of one Python file stand for, as far as its imports and plain assignments tell."""

import ast
import builtins
from collections.abc import Set

LONGEST = 1000  # characters of a text that may be a name; longer ones are prose or data


class Names:
    """Resolves aliases: after `import os as o; leave = o._exit`, `leave` is os._exit."""

    def __init__(self, tree: ast.Module) -> None:
        self._meanings: dict[str, str] = {}
        defined = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        self._defined = defined | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._learn(node)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                meaning = self.dotted(node.value)
                if meaning is not None:
                    self._meanings.setdefault(node.targets[0].id, meaning)

    def imported(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        """Full names of what an import statement brings in; none for relative imports."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if node.level or node.module is None:
            return []
        return [f"{node.module}.{alias.name}" for alias in node.names]

    def dotted(self, node: ast.expr) -> str | None:
        """The full name that an expression stands for, or None."""
        match node:
            case ast.Name(id=name) if name in self._meanings:
                return self._meanings[name]
            case ast.Name(id=name) if hasattr(builtins, name) and name not in self._defined:
                return name
            case ast.Attribute(value=value, attr=attr):
                owner = self.dotted(value)
                return None if owner is None else f"{owner}.{attr}"
            case ast.Call(func=func, args=[target, *_]) if self.dotted(func) in (
                "importlib.import_module",
                "__import__",
            ):
                return constant_text(target)
            case ast.Subscript(value=value, slice=key) if self.dotted(value) == "sys.modules":
                return constant_text(key)
            case ast.Call(func=func, args=[owner, member, *_]) if self.dotted(func) == "getattr":
                first, second = self.dotted(owner), constant_text(member)
                return None if first is None or second is None else f"{first}.{second}"
        return None

    def foreign(self, node: ast.expr, modules: Set[str]) -> bool:
        """Whether `node` is one of `modules`, or part of it."""
        name = self.dotted(node)
        return (
            name is not None and (name.split(".")[0] in modules) and name.split(".")[0] not in self._defined
        )

    def _learn(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                shown = alias.asname or alias.name.split(".")[0]
                self._meanings[shown] = alias.name if alias.asname else shown
        else:
            for alias, name in zip(node.names, self.imported(node), strict=False):
                self._meanings[alias.asname or alias.name] = name


def constant_text(node: ast.expr) -> str | None:
    """The string that an expression of constants makes: literals, `+`, f-strings and `join`."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.BinOp(op=ast.Add()):
            return _joined("", _summands(node))
        case ast.JoinedStr(values=values):
            return _joined("", values)
        case ast.FormattedValue(value=value, format_spec=None):
            return constant_text(value)
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(glue)), attr="join"),
            args=[ast.List(elts=parts) | ast.Tuple(elts=parts)],
        ):
            return _joined(glue, parts)
    return None


def constant_texts(node: ast.expr) -> list[str]:
    """What `constant_text` gives, and of a sum the constant parts beside each other, in pieces if long."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        text = constant_text(node)
        return [] if text is None else [text]
    texts = [""]
    for part in map(constant_text, _summands(node)):
        if part is None or len(texts[-1]) + len(part) >= LONGEST:
            texts.append("")
        texts[-1] += part or ""
    return list(filter(None, texts))


def sums_within(node: ast.AST) -> list[ast.expr]:
    """The sums that a sum begins with: a + b in a + b + c."""
    found: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        node = node.left
        found += [node] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else []
    return found


def _summands(node: ast.expr) -> list[ast.expr]:
    """The parts of a + b + c, without recursion: a long text may have thousands."""
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts.append(node.right)
        node = node.left
    return [node, *reversed(parts)]


def _joined(glue: str, parts: list[ast.expr]) -> str | None:
    texts = [constant_text(part) for part in parts]
    return None if None in texts else glue.join(text for text in texts if text is not None)
