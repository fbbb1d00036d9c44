"""Makes one assertion false wherever it was true: another literal, another exception, or its opposite."""

import ast
import builtins
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
}
_FLIPPED = _OPPOSITES | {there: here for here, there in _OPPOSITES.items()}
_PAIRS = (
    ("assertEqual", "assertNotEqual"),
    ("assertTrue", "assertFalse"),
    ("assertIs", "assertIsNot"),
    ("assertIsNone", "assertIsNotNone"),
    ("assertIn", "assertNotIn"),
    ("assertIsInstance", "assertNotIsInstance"),
    ("assertGreater", "assertLessEqual"),
    ("assertLess", "assertGreaterEqual"),
    ("assertRegex", "assertNotRegex"),
    ("assertAlmostEqual", "assertNotAlmostEqual"),
)
_METHODS = dict(_PAIRS) | {there: here for here, there in _PAIRS}
_EQUALITIES = {
    *("assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertDictEqual"),
    *("assertSetEqual", "assertSequenceEqual", "assertCountEqual", "assertMultiLineEqual"),
}
_RAISES = {"raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp"}
_SWALLOWS = {*_RAISES, "suppress", "subTest", "subtests", "test", "skip"}
_COMMON = ("KeyError", "IndexError", "AttributeError", "TypeError", "ValueError", "NotImplementedError")
_RARE = ("ZeroDivisionError", "RecursionError", "BufferError")  # no base of anybody's own exceptions
_PARTS = {"startswith", "endswith"}
# Another value of v's type, of which it takes the number n; an object where the type is not a known one.
_OTHER = (
    "(v + n if v + n != v else type(v)(n)) if type(v) in (bool, int, float, complex) else "
    "v + type(v)([n % 251]) if type(v) in (list, tuple, bytes) else "
    "v + '%d' % n if type(v) is str else v ^ {n} if type(v) in (set, frozenset) else "
    "dict(v, n=n) if type(v) is dict and v.get('n') != n else object()"
)
# A value like v that h does not hold; where h claims to hold them all, the first.
_STRANGER = "([o for o in s if o not in h] + s)[0]"


@dataclass(frozen=True)
class Edit:
    """A piece of source, from `start` to `end` (line from 1, byte in it from 0), and its replacement."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def falsify(statement: ast.stmt, random: Random) -> Edit | None:
    """How to make a last statement fail that passes, or None where that is not certain."""
    match statement:
        case ast.Assert(test=test):
            return _condition(test, random)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"))) as call):
            return _method(call, random)
        case ast.With(items=[item]) | ast.AsyncWith(items=[item]):
            return _context(item.context_expr, statement.body[-1], random)
    return None


def other(node: ast.expr, random: Random) -> ast.expr | None:
    """A literal unlike `node`, or None if that is not one that can be changed."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Constant():
            changed.value = _other_value(changed.value, random)
            return None if changed.value is None else changed
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            inner = other(changed.operand, random)
            return None if inner is None else ast.UnaryOp(changed.op, inner)
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return changed if _change_one(items, random) else None
        case ast.Dict(values=values):
            return changed if _change_one(values, random) else None
    return None


def _other_value(value: object, random: Random) -> bool | complex | str | bytes | None:
    match value:
        case bool():
            return not value
        case int() | float() | complex():
            return value + random.randint(1, 9)
        case str():
            return _other_text(value, random)
        case bytes():
            return _other_text(value.decode("latin-1"), random).encode("latin-1")
    return None


def _other_text(text: str, random: Random) -> str:
    """A letter or digit is replaced by another one, not only by its other case."""
    places = [i for i, letter in enumerate(text) if letter.isascii() and letter.isalnum()]
    if not places:
        return text + random.choice("abcdefgh")
    at = random.choice(places)
    letters = "0123456789" if text[at].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    new = random.choice([each for each in letters if each != text[at].lower()])
    return text[:at] + (new.upper() if text[at].isupper() else new) + text[at + 1 :]


def _change_one(items: list[ast.expr], random: Random) -> bool:
    for index in random.sample(range(len(items)), len(items)):
        changed = other(items[index], random)
        if changed is not None:
            items[index] = changed
            return True
    return False


def _edit(node: ast.expr, text: str) -> Edit:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return Edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)


def _condition(test: ast.expr, random: Random) -> Edit | None:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]) if edit := _changed(
            [left, right], random
        ):
            return edit
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return _other_result(random.choice([left, right]), random)
        case ast.Compare(left=left, ops=[ast.In()], comparators=[right]):
            return _edit(test, _stranger(left, right, random, "o in h"))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _FLIPPED:
            return _edit(test, f"({ast.unparse(ast.Compare(left, [_FLIPPED[type(op)]()], [right]))})")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _edit(test, f"({ast.unparse(operand)})")
        case ast.Constant():
            return None
    return _part(test, random) or _edit(test, f"(not ({ast.unparse(test)}))")


def _changed(sides: Sequence[ast.expr], random: Random) -> Edit | None:
    """One literal side of an equality becomes another one."""
    for side in random.sample(sides, len(sides)):
        if (changed := other(side, random)) is not None:
            # No more than the one constant is written anew: how the rest is written would tell.
            pairs = zip(ast.walk(side), ast.walk(changed), strict=True)
            return next(
                _edit(old, ast.unparse(new))
                for old, new in pairs
                if isinstance(old, ast.Constant) and isinstance(new, ast.Constant) and old.value != new.value
            )
    return None


def _other_result(side: ast.expr, random: Random) -> Edit:
    """Another value of the same type, made when the test runs: what equals everything equals that, too.

    Of either side, by chance: nothing here tells which one is the code's.
    """
    call = f"({ast.unparse(side)}, {random.randint(1, 9)})"
    return _edit(side, f"(lambda v, n: not v if type(v) is bool else {_OTHER}){call}")


def _stranger(member: ast.expr, holder: ast.expr, random: Random, form: str) -> str:
    """`form` of a value o like the member that the holder h has not, unless h claims to have everything."""
    numbers = tuple(random.randrange(10**size) + 1 for size in (1, 2, 4, 9, 15))
    others = f"[(lambda n: {_OTHER})(n) for n in {numbers}]"
    call = f"({ast.unparse(member)}, {ast.unparse(holder)})"
    return f"(lambda v, h: (lambda s: (lambda o: {form})({_STRANGER}))({others})){call}"


def _members(member: ast.expr, holder: ast.expr, random: Random) -> Edit:
    """The two arguments of an assertIn."""
    text = "*" + _stranger(member, holder, random, "(o, h)")
    assert holder.end_lineno is not None and holder.end_col_offset is not None
    return Edit((member.lineno, member.col_offset), (holder.end_lineno, holder.end_col_offset), text)


def _part(test: ast.expr, random: Random) -> Edit | None:
    """x.startswith("abc") asks for another text of the same length."""
    match test:
        case ast.Call(
            func=ast.Attribute(attr=name), args=[ast.Constant(value=str() | bytes() as text) as said]
        ):
            same = name in _PARTS and not test.keywords and any(letter.isalnum() for letter in _latin(text))
            return _changed([said], random) if same else None
    return None


def _latin(text: str | bytes) -> str:
    return "".join(
        letter for letter in (text if isinstance(text, str) else text.decode("latin-1")) if letter.isascii()
    )


def _starred(arguments: Sequence[ast.expr]) -> bool:
    return any(isinstance(each, ast.Starred) for each in arguments)


def _method(call: ast.Call, random: Random) -> Edit | None:
    assert isinstance(call.func, ast.Attribute)
    name = call.func.attr
    if name in _EQUALITIES and (edit := _changed(call.args[:2], random)):
        return edit
    if name == "assertEqual" and len(call.args) > 1 and not _starred(call.args):
        return _other_result(random.choice(call.args[:2]), random)
    if name == "assertIn" and len(call.args) > 1 and not _starred(call.args):
        return _members(call.args[0], call.args[1], random)
    if name == "assertTrue" and len(call.args) == 1 and (edit := _part(call.args[0], random)):
        return edit
    if name in _METHODS:
        return _edit(call.func, f"self.{_METHODS[name]}")
    if name in _RAISES:
        return _other_exception(call, random)
    return None


def _context(context: ast.expr, last: ast.stmt, random: Random) -> Edit | None:
    if not isinstance(context, ast.Call):
        return falsify(last, random) if isinstance(context, ast.Name | ast.Attribute) else None
    name = context.func.attr if isinstance(context.func, ast.Attribute) else ast.unparse(context.func)
    if name in _RAISES:
        return _other_exception(context, random)
    return None if name in _SWALLOWS else falsify(last, random)


def _other_exception(call: ast.Call, random: Random) -> Edit | None:
    if not call.args:
        return None
    expected = call.args[0]
    known = getattr(builtins, expected.id, None) if isinstance(expected, ast.Name) else None
    if not isinstance(known, type) or not issubclass(known, BaseException):
        return _edit(expected, random.choice(_RARE))
    unrelated = [name for name in (*_COMMON, *_RARE) if not _related(getattr(builtins, name), known)]
    return _edit(expected, random.choice(unrelated)) if unrelated else None


def _related(left: type, right: type) -> bool:
    return issubclass(left, right) or issubclass(right, left)
