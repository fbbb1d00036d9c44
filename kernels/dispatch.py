"""The one check behind every op's `implementation=` argument."""

from collections.abc import Callable, Mapping
from typing import Any


def choose(op: str, implementation: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns `table[implementation]`; an unknown name raises ValueError and never becomes another one."""
    if implementation not in table:
        known = ", ".join(repr(name) for name in table)
        raise ValueError(f"{op}: expected implementation to be one of {known}; got {implementation!r}")
    return table[implementation]
