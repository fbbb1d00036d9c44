"""Reads a run directory, finished, live or broken off, without locks.

A killed run goes on from its last checkpoint, so steps after it are done again. The lineage says which
rows still count: when an attempt resumed from step s, rows of earlier attempts with step > s are
abandoned; when it started from scratch, all of them are.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.feed.jsonl import read_rows
from jaxrl.feed.metrics import METRICS
from jaxrl.feed.schema import Registry, UndeclaredMetricError
from jaxrl.feed.writer import step_name

Row = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One start of the program on a run."""

    number: int
    resumed_from: int | None  # step of the checkpoint; None: from scratch
    started: float  # seconds since the epoch


@dataclass(frozen=True)
class Lineage:
    """The attempts of a run, oldest first."""

    attempts: tuple[Attempt, ...]

    def limit(self, attempt: int) -> float:
        """Last step that counts of what `attempt` wrote; -1 if none does, infinity if all do."""
        later = [other for other in self.attempts if other.number > attempt]
        return min(
            (-1 if other.resumed_from is None else other.resumed_from for other in later),
            default=float("inf"),
        )

    def alive(self, row: Mapping[str, Any]) -> bool:
        """Whether a row still counts. Rows without a step belong to the run and always do."""
        return "step" not in row or row["step"] <= self.limit(row["attempt"])


def lineage(run: Path) -> Lineage:
    """The attempts, from the events of a run directory."""
    return Lineage(
        tuple(
            Attempt(row["attempt"], row["resumed_from"], row["t"])
            for row in read_rows(run / "events.jsonl").rows
            if row["event"] == "attempt_start"
        )
    )


def read_run(run: Path) -> Row:
    """Content of `run.json`. Raises `FileNotFoundError` if `run` is no run directory."""
    return json.loads((run / "run.json").read_text())


def read_events(run: Path, kind: str | None = None) -> list[Row]:
    """Events that still count, in the order written; of one kind if given."""
    rows = read_rows(run / "events.jsonl").rows
    return [row for row in _alive(run, rows) if kind in (None, row["event"])]


def read_metrics(run: Path) -> list[Row]:
    """Rows of all producers that still count, by step, then attempt, then time."""
    files = sorted((run / "metrics").glob("*.jsonl"))
    rows = _alive(run, [row for file in files for row in read_rows(file).rows])
    return sorted(rows, key=lambda row: (row["step"], row["attempt"], row["t"]))


def read_series(run: Path, name: str, *, registry: Registry = METRICS) -> list[tuple[int, float | None]]:
    """(step, value) of one series; the last row of a step wins.

    A ratio is divided (None for 0 of 0), a counter becomes its growth since the row before it of the
    same attempt; None where the number was not finite.
    """
    kind = registry.resolve(name).kind
    rows = [row for row in read_metrics(run) if name in row["m"]]
    if kind == "counter":
        return _growth(rows, name)
    values = {row["step"]: row["m"][name] for row in rows}
    return [(step, _quotient(value) if kind == "ratio" else value) for step, value in values.items()]


def read_rollouts(run: Path, step: int) -> list[Row]:
    """Rows of a step's rollouts that still count."""
    return _alive(run, read_rows(run / "rollouts" / f"{step_name(step)}.jsonl").rows)


def read_transcript(run: Path, row: Mapping[str, Any]) -> str | None:
    """Transcript of a rollout's row; None if the disk was full when it was written."""
    if row["text"] is None:
        return None
    offset, length = row["text"]
    with (run / "rollouts" / f"{step_name(row['step'])}.text").open("rb") as file:
        file.seek(offset)
        return file.read(length).decode("utf-8", "replace")


def undeclared(run: Path, *, registry: Registry = METRICS) -> set[str]:
    """Series in a run that `registry` does not know: written by another version of jaxrl."""
    return {name for row in read_metrics(run) for name in row["m"] if not _declared(name, registry)}


def _declared(name: str, registry: Registry) -> bool:
    try:
        registry.resolve(name)
    except UndeclaredMetricError:
        return False
    return True


def _alive(run: Path, rows: Iterable[Row]) -> list[Row]:
    line = lineage(run)
    return [row for row in rows if line.alive(row)]


def _quotient(pair: tuple[float | None, float | None]) -> float | None:
    numerator, denominator = pair
    return None if numerator is None or not denominator else numerator / denominator


def _growth(rows: Iterable[Row], name: str) -> list[tuple[int, float | None]]:
    last: dict[int, float] = {}
    growth: dict[int, float | None] = {}
    for row in sorted(rows, key=lambda row: (row["attempt"], row["step"], row["t"])):
        attempt, step, total = row["attempt"], row["step"], row["m"][name]
        if total is None:
            growth.setdefault(step, None)
            continue
        growth[step] = (growth.get(step) or 0) + total - last.get(attempt, 0)
        last[attempt] = total
    return sorted(growth.items())
