"""Qwen3.5's tool-call syntax: written for demonstrations, read without ever raising."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NO_CALL = "error: no tool call"
BAD_CALL = "error: malformed tool call"

_NAME = r"[A-Za-z_][\w.-]*"
_FUNCTION = re.compile(rf"\s*<function=({_NAME})>")
_PARAMETER = re.compile(rf"\s*<parameter=({_NAME})>(.*?)</parameter>", re.DOTALL)
_MARKS = ("<parameter=", "</parameter>", OPEN, CLOSE)  # a value with one of them can't be delimited
_END = re.compile(r"\s*</function>\s*")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call. With an `error` it must not run; what was readable of it is kept."""

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """An assistant turn: its calls in order, and the text around them.

    `error` is set when the turn holds no call that can run.
    """

    calls: Sequence[Call] = ()
    content: str = ""
    error: str = ""


def render_call(name: str, arguments: Mapping[str, str]) -> str:
    """The text of one call. Raises `ValueError` for what the syntax can't carry."""
    for each in (name, *arguments):
        if not re.fullmatch(_NAME, each):
            raise ValueError(f"expected names like {_NAME}, got {each!r}")
    for key, value in arguments.items():
        if any(mark in value for mark in _MARKS):
            raise ValueError(f"expected a value without call markup for {key!r}, got {value!r}")
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"{OPEN}\n<function={name}>\n{body}</function>\n{CLOSE}"


def parse_calls(text: str) -> Parsed:
    """Reads an assistant turn. Never raises; whatever isn't well formed becomes an `error`."""
    head, *rest = text.split(OPEN)
    calls, content = [], [head]
    for block in rest:
        inside, mark, after = block.partition(CLOSE)
        calls.append(_parse_block(inside, closed=bool(mark)))
        content.append(after)
    runnable = any(not call.error for call in calls)
    error = "" if runnable else BAD_CALL if calls else NO_CALL
    return Parsed(calls=tuple(calls), content="".join(content).strip(), error=error)


def _parse_block(text: str, *, closed: bool) -> Call:
    start = _FUNCTION.match(text)
    if not start:
        return Call(name="", error=BAD_CALL)
    arguments, position, clear = {}, start.end(), closed
    for match in _parameters(text, position):
        clear &= match[1] not in arguments and "<parameter=" not in match[2]
        arguments[match[1]] = _unwrap(match[2])
        position = match.end()
    well_formed = clear and _END.fullmatch(text, position)
    return Call(name=start[1], arguments=arguments, error="" if well_formed else BAD_CALL)


def _parameters(text: str, position: int) -> Iterator[re.Match[str]]:
    while match := _PARAMETER.match(text, position):
        yield match
        position = match.end()


def _unwrap(value: str) -> str:
    """The one newline on each side belongs to the syntax, all others to the value."""
    return value.removeprefix("\n").removesuffix("\n")
