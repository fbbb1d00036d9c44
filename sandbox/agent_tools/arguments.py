"""Arguments of tools: they arrive as texts, and a wrong one is told to the model."""

import json
import math
from collections.abc import Mapping
from typing import Any


class BadArgumentError(Exception):
    """An argument that the tool cannot use; the text is for the model."""


def flag(arguments: Mapping[str, str], name: str) -> bool:
    """A "true" or "false", in any case; absent means false."""
    value = arguments.get(name, "false").strip().lower()
    if value not in ("true", "false"):
        raise BadArgumentError(f"{name}: expected true or false, got {_shown(arguments[name])}")
    return value == "true"


def seconds(arguments: Mapping[str, str], name: str) -> float | None:
    """A positive number of seconds; absent means None."""
    text = arguments.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise BadArgumentError(f"{name}: expected a positive number of seconds, got {_shown(text)}")
    return value


def integer(arguments: Mapping[str, str], name: str) -> int:
    """A whole number. Raises `BadArgumentError` also where it is missing."""
    value = parsed(arguments, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadArgumentError(f"{name}: expected an integer, got {_shown(arguments[name])}")
    return value


def text(arguments: Mapping[str, str], name: str) -> str:
    """The text itself. Raises `BadArgumentError` where it is missing."""
    if name not in arguments:
        raise BadArgumentError(f"missing argument {name}")
    return arguments[name]


def parsed(arguments: Mapping[str, str], name: str) -> Any:
    """A value written as JSON. Raises `BadArgumentError` where it is missing or no JSON."""
    written = text(arguments, name)
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        raise BadArgumentError(f"{name}: expected JSON, got {_shown(written)}") from None


def _shown(value: str) -> str:
    return json.dumps(value if len(value) <= 80 else f"{value[:77]}...")
