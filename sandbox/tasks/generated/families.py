"""The eight bug families of the generated set, up to renaming.

Code is written with placeholders: `A` and `B` stand for the parameters. A `Bug` is one function
with one wrong line; (wrong, right) is what the splits keep apart.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

Inputs = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One broken function, up to renaming.

    `lines` is the right body; `wrong` replaces `lines[index]`, both without indentation when used
    as an edit. `candidates` are the edits that the family knows for `wrong`, in its stock order.
    """

    family: str
    parameters: Sequence[str]
    lines: Sequence[str]
    index: int
    wrong: str
    candidates: Sequence[str]
    phrase: str  # "must return ..."
    inputs: Inputs  # argument lists of the hidden cases, as source

    @property
    def right(self) -> str:
        return self.lines[self.index].strip()

    @property
    def pair(self) -> tuple[str, str]:
        return self.wrong, self.right


BINARY = {
    "A + B": "A plus B",
    "A - B": "A minus B",
    "A * B": "A times B",
    "A // B": "A divided by B, rounded down",
    "A % B": "the rest of A divided by B",
}
COMPARE = {
    "A < B": "whether A is less than B",
    "A <= B": "whether A is at most B",
    "A > B": "whether A is more than B",
    "A >= B": "whether A is at least B",
    "A == B": "whether A equals B",
    "A != B": "whether A differs from B",
}
EXTREMES = {"min(A, B)": "the smaller of A and B", "max(A, B)": "the larger of A and B"}
REDUCE = {
    "sum(A)": "the total of A",
    "len(A)": "how many items A has",
    "max(A)": "the largest item of A",
    "min(A)": "the smallest item of A",
    "sorted(A)": "the items of A in order",
    "tuple(A)": "the items of A as a tuple",
    "set(A)": "the items of A as a set",
    "list(A)": "a copy of A",
}
INDEX = {
    "A[0]": "the first item of A",
    "A[-1]": "the last item of A",
    "A[1]": "the second item of A",
    "A[2]": "the third item of A",
    "A[-2]": "the second to last item of A",
    "A[1:]": "all but the first item of A",
    "A[:-1]": "all but the last item of A",
    "A[:2]": "the first two items of A",
    "A[-2:]": "the last two items of A",
}
STRING = {
    "A.lower()": "A in lower case",
    "A.upper()": "A in upper case",
    "A.strip()": "A without spaces around it",
    "A.title()": "A with each word capitalized",
    "A.capitalize()": "A with its first letter capitalized",
    "A.swapcase()": "A with its case swapped",
    "A.lstrip()": "A without spaces on the left",
    "A.rstrip()": "A without spaces on the right",
}
NUMBERS = ("17, 5", "5, 17", "-7, 4", "9, 9", "12, 3", "4, -6")
LISTS = ("[3, 1, 3]", "[2, 5, 1, 2]", "[7, 4, 9, 4, 8]", "[6, 0, 0]", "[1, 8, 5]", "[9, 2, 7, 3]")
TEXTS = ("'  red Fox '", "'Big cat'", "' oNe two'", "'LOUD noise  '", "'abc'", "'  mixed Up Case'")


def _returns(expressions: Iterable[str]) -> list[str]:
    return [f"return {each}" for each in expressions]


def _single(
    family: str,
    right: str,
    *,
    wrongs: Iterable[str],
    stock: Iterable[str],
    phrase: str,
    inputs: Inputs,
) -> Iterator[Bug]:
    """Bugs of a function that is one `return`; losing the `return` is one of them."""
    parameters = ("A", "B") if "B" in right else ("A",)
    for wrong in dict.fromkeys([*_returns(wrongs), right]):
        if wrong != f"return {right}":
            yield Bug(
                family=family,
                parameters=parameters,
                lines=(f"return {right}",),
                index=0,
                wrong=wrong,
                candidates=tuple(each for each in _returns(stock) if each != wrong),
                phrase=phrase,
                inputs=inputs,
            )


def _swapped(expression: str) -> str:
    return expression.translate(str.maketrans("AB", "BA"))


def _doubled(expression: str) -> list[str]:
    return [expression.replace("B", "A"), expression.replace("A", "B")]


def _binop() -> Iterator[Bug]:
    stock = [*BINARY, "B - A", "B // A", "B % A"]
    for right, phrase in BINARY.items():
        swapped = [_swapped(right)] if _swapped(right) in stock else []
        wrongs = [*BINARY, *swapped, *_doubled(right)]
        yield from _single("binop", right, wrongs=wrongs, stock=stock, phrase=phrase, inputs=NUMBERS)


def _any_other(family: str, phrases: Mapping[str, str], *, inputs: Inputs) -> Iterator[Bug]:
    for right, phrase in phrases.items():
        yield from _single(family, right, wrongs=phrases, stock=phrases, phrase=phrase, inputs=inputs)


def _minmax() -> Iterator[Bug]:
    others = ["A", "B", "A + B", "A - B"]
    stock = [*others, "B - A", *EXTREMES, "A * B"]
    for right, phrase in EXTREMES.items():
        wrongs = [*EXTREMES, *_doubled(right), *others]
        yield from _single("minmax", right, wrongs=wrongs, stock=stock, phrase=phrase, inputs=NUMBERS)


def _const() -> Iterator[Bug]:
    inputs = ("41", "7", "-13", "0", "20", "68")
    for (binary, phrase), constant in product(BINARY.items(), range(2, 10)):
        right = binary.replace("B", str(constant))
        near = [binary.replace("B", str(each)) for each in _neighbours(constant)]
        operators = [each.replace("B", str(constant)) for each in BINARY]
        for wrong in [*operators, *near]:
            yield from _const_bug(wrong, right, phrase.replace("B", str(constant)), inputs)


def _const_bug(wrong: str, right: str, phrase: str, inputs: Inputs) -> Iterator[Bug]:
    """The stock edits start from what the line says: any operator, or the constant off by one."""
    operator, constant = wrong[1:-1], int(wrong[-1])
    stock = [each.replace("B", str(constant)) for each in BINARY]
    stock += [f"A{operator}{each}" for each in _neighbours(constant)]
    bugs = _single("const", right, wrongs=[wrong], stock=stock, phrase=phrase, inputs=inputs)
    lost = wrong == right
    yield from (bug for bug in bugs if lost == (bug.wrong == right))


def _neighbours(constant: int) -> list[int]:
    return [each for each in (constant - 1, constant + 1) if 2 <= each <= 9]


def _loop() -> Iterator[Bug]:
    starts = ["t = 0", "t = 1", "t = 2", "t = 3", "t = A"]
    ranges = [f"for i in range({each}, {stop}):" for stop in ("A + 1", "A") for each in range(4)]
    steps = ["t += i", "t *= i", "t -= i", "t = i"]
    ends = ["return i", "return A", "return t", "return t + 1"]
    for (word, zero, step), first in product([("sum", 0, steps[0]), ("product", 1, steps[1])], (1, 2, 3)):
        lines = (starts[zero], ranges[first], f"    {step}", "return t")
        phrase = f"the {word} of the numbers from {first} to A"
        for index, stock in enumerate([starts, ranges, steps, ends]):
            yield from _loop_bugs(lines, index, stock, phrase)


def _loop_bugs(lines: Sequence[str], index: int, stock: Sequence[str], phrase: str) -> Iterator[Bug]:
    right = lines[index].strip()
    for wrong in stock:
        if wrong != right:
            yield Bug(
                family="loop",
                parameters=("A",),
                lines=lines,
                index=index,
                wrong=wrong,
                candidates=tuple(each for each in stock if each != wrong),
                phrase=phrase,
                inputs=("3", "4", "5", "6", "7", "9"),
            )


FAMILIES = ("binop", "cmp", "const", "minmax", "reduce", "index", "str", "loop")


@cache
def bugs(family: str) -> tuple[Bug, ...]:
    """All bugs of a family in a fixed order, equivalent ones included.

    Raises `ValueError` for an unknown family.
    """
    makers = {
        "binop": _binop,
        "cmp": lambda: _any_other("cmp", COMPARE, inputs=NUMBERS),
        "const": _const,
        "minmax": _minmax,
        "reduce": lambda: _any_other("reduce", REDUCE, inputs=LISTS),
        "index": lambda: _any_other("index", INDEX, inputs=LISTS),
        "str": lambda: _any_other("str", STRING, inputs=TEXTS),
        "loop": _loop,
    }
    if family not in makers:
        raise ValueError(f"expected a family of {FAMILIES}, got {family!r}")
    return tuple(makers[family]())
