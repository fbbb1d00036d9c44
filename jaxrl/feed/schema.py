"""Every metric of a run, declared once: unit, kind, population, meaning, formula.

A series is a metric's name, with values for its labels if it has any:
`train/loss`, `rollouts/outcome{outcome=resolved}`. Rows of a run carry only declared series.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

VERSION = 1
"""Of the rows' layout. A reader of version n reads rows of version n and older."""

Kind = Literal["gauge", "counter", "ratio"]
"""gauge: the value itself; counter: total of the attempt so far; ratio: [numerator, denominator]."""

Population = Literal["", "sampled", "trained", "held_out"]
"""Which rollouts a number is about: all that were sampled, those that reached the loss, evaluation's."""

EventKind = Literal[
    "attempt_start", "step", "weights_published", "eval", "checkpoint", "notice", "alert", "stop"
]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)

_SERIES = re.compile(r"(?P<name>[a-z0-9_/]+)(?:\{(?P<labels>[^{}]*)\})?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9_.+-]+")


class UndeclaredMetricError(KeyError):
    """A series that the registry does not know: a mistake in the program that writes it."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What a number means, for every reader: terminal, dashboard, notebook."""

    name: str
    unit: str
    kind: Kind
    meaning: str
    formula: str = ""
    population: Population = ""
    labels: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The part of the name before the first slash."""
        return self.name.partition("/")[0]


def series(name: str, **labels: object) -> str:
    """Name of a series of a labelled metric, labels in the order given.

    Raises `ValueError` for a label value that is not made of letters, digits and `_.+-`.
    """
    for label, value in labels.items():
        if not _LABEL_VALUE.fullmatch(str(value)):
            raise ValueError(f"label {label}: expected letters, digits and _.+-, got {value!r}")
    inner = ",".join(f"{label}={value}" for label, value in labels.items())
    return f"{name}{{{inner}}}" if inner else name


class Registry:
    """The declared metrics, by name."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Raises `ValueError` if two metrics have the same name."""
        self._metrics: dict[str, Metric] = {}
        for metric in metrics:
            if metric.name in self._metrics:
                raise ValueError(f"metric {metric.name} is declared twice; give one of them another name")
            self._metrics[metric.name] = metric

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics.values())

    def resolve(self, name: str) -> Metric:
        """The metric that a series belongs to.

        Raises `UndeclaredMetricError` for an unknown name, or labels other than the declared ones.
        """
        match = _SERIES.fullmatch(name)
        metric = self._metrics.get(match["name"]) if match else None
        if match is None or metric is None:
            raise UndeclaredMetricError(f"metric {name!r} is not declared; add it to jaxrl/feed/metrics.py")
        given = tuple(part.partition("=")[0] for part in (match["labels"] or "").split(",") if part)
        if given != metric.labels:
            raise UndeclaredMetricError(f"metric {name!r}: expected labels {metric.labels}, got {given}")
        return metric

    def describe(self) -> list[Mapping[str, Any]]:
        """All declarations as plain data, for `run.json`."""
        return [{**asdict(metric), "group": metric.group} for metric in self]
