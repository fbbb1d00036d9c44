"""An ordered set of tasks, with the hidden tests kept apart from what agents may see."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from sandbox.tasks.schema import HiddenTests, SuiteTests, TaskSpec

# Fields that came after the first digests were recorded: at their defaults they count as absent.
_LATER = {"image", "base_commit", "language", "concealed", "covered_folders", "covered_files"}


class TaskSet[Hidden: HiddenTests | SuiteTests]:
    """Tasks in cursor order, and their hidden tests by instance id."""

    def __init__(self, specs: Iterable[TaskSpec], hidden: Iterable[Hidden]) -> None:
        """Raises `ValueError` unless ids are unique and every task has exactly one hidden test."""
        self.specs: Sequence[TaskSpec] = tuple(specs)
        tests = tuple(hidden)
        self._hidden: Mapping[str, Hidden] = {each.instance_id: each for each in tests}
        ids = [spec.instance_id for spec in self.specs]
        if len(set(ids)) != len(ids) or sorted(ids) != sorted(each.instance_id for each in tests):
            raise ValueError(
                f"expected one hidden test for each of {len(ids)} unique instance ids, got "
                f"{len(tests)} tests for {len(set(ids))} unique ids: give both lists the same ids"
            )

    def __len__(self) -> int:
        return len(self.specs)

    def hidden(self, instance_id: str) -> Hidden:
        """The hidden tests of one task, for the grader only. Raises `KeyError` for an unknown id."""
        if instance_id not in self._hidden:
            raise KeyError(f"expected an instance id of this set of {len(self)} tasks, got {instance_id!r}")
        return self._hidden[instance_id]

    def take(self, count: int) -> "TaskSet[Hidden]":
        """The first `count` tasks. Raises `ValueError` if there are fewer."""
        if not 0 <= count <= len(self):
            raise ValueError(f"expected a count of 0 to {len(self)}, got {count}: generate more tasks")
        specs = self.specs[:count]
        return TaskSet(specs, [self._hidden[spec.instance_id] for spec in specs])

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the whole content in order, hidden tests included."""
        rows = [(spec, self._hidden[spec.instance_id]) for spec in self.specs]
        return hashlib.sha256(_canonical(rows).encode()).hexdigest()


def _is_later(each: Field[Any], value: Any) -> bool:
    return each.name in _LATER and getattr(value, each.name) == each.default


def _canonical(value: Any) -> str:
    """A text equal for equal values: unlike `repr`, it does not depend on hash seeds or on places.

    Built images lie in folders that are named by their content.
    """
    if is_dataclass(value):
        named = {each.name: getattr(value, each.name) for each in fields(value) if not _is_later(each, value)}
        return type(value).__name__ + _canonical(named)
    if isinstance(value, Path):
        return f"path({value.name!r})"
    if isinstance(value, Mapping):
        items = sorted((_canonical(key), _canonical(each)) for key, each in value.items())
        return "{" + ",".join(f"{key}:{each}" for key, each in items) + "}"
    if isinstance(value, Set):
        return "set(" + ",".join(sorted(map(_canonical, value))) + ")"
    if isinstance(value, list | tuple):
        return type(value).__name__ + "(" + ",".join(map(_canonical, value)) + ")"
    return repr(value)
