"""Writes a run directory. One `RunWriter` in the controller; every file has one writer.

    run.json                     identity, settings, versions, declared metrics (replaced atomically)
    events.jsonl                 what happened, in order
    metrics/<producer>.jsonl     {"v": 1, "t": ..., "attempt": 2, "step": 17, "m": {series: value}}
    rollouts/step_000017.jsonl   a row per rollout, with the place of its transcript in step_000017.text

Opening raises if the directory can't be written; after that the disk never stops training: rows that
can't be written are counted in `lost`. Undeclared metrics and values that JSON can't hold are mistakes
of the program and raise.

Step n is the work that leads to n optimizer steps; step 0 is what precedes training.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl.feed.jsonl import Appender, JsonlWriter, encode, read_rows
from jaxrl.feed.metrics import METRICS
from jaxrl.feed.schema import EVENT_KINDS, VERSION, EventKind, Registry

Value = float | int | tuple[float, float]
"""Of a metric in a row; a ratio is (numerator, denominator)."""


def step_name(step: int) -> str:
    """Stem of the files that hold a step's rollouts."""
    return f"step_{step:06d}"


def next_attempt(run: Path) -> int:
    """1 for a new run, one more than the last attempt for one that goes on."""
    rows = read_rows(run / "events.jsonl").rows
    return 1 + max((row["attempt"] for row in rows if row["event"] == "attempt_start"), default=0)


class RunWriter:
    """The feed of one attempt of a run. Methods may be called from any thread."""

    def __init__(
        self,
        run: Path,
        *,
        config: Mapping[str, Any],
        versions: Mapping[str, str],
        resumed_from: int | None = None,
        producer: str = "trainer",
        registry: Registry = METRICS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Starts an attempt: `resumed_from` is the checkpoint's step, None for a start from scratch.

        Raises `OSError` if the directory can't be written.
        """
        self.attempt = next_attempt(run)
        self._run, self._registry, self._clock = run, registry, clock
        self._lock = threading.Lock()
        self._events = JsonlWriter(run / "events.jsonl")
        self._metrics = JsonlWriter(run / "metrics" / f"{producer}.jsonl")
        self._rollouts = _RolloutFiles(run / "rollouts")
        started = {"resumed_from": resumed_from, "config": config, "versions": versions}
        _replace_run_file(run, {**self._stamp(None), **started, "metrics": registry.describe()})
        if not self._events.write({**self._stamp(None), "event": "attempt_start", **started}):
            raise OSError(
                f"{run}/events.jsonl: expected to write the start of the attempt; is the disk full?"
            )

    @property
    def lost(self) -> int:
        """Rows of this attempt that could not be written."""
        return self._events.lost + self._metrics.lost + self._rollouts.lost

    def metrics(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends a row of metrics.

        Raises `UndeclaredMetricError` for an unknown series, `TypeError` for a ratio that is not a pair
        or a pair that is no ratio.
        """
        for name, value in values.items():
            kind = self._registry.resolve(name).kind
            if (kind == "ratio") != isinstance(value, tuple | list):
                raise TypeError(
                    f"metric {name} is a {kind}: got {value!r}; a ratio is (numerator, denominator)"
                )
        with self._lock:
            self._metrics.write({**self._stamp(step), "m": values})

    def event(self, kind: EventKind, step: int | None = None, **fields: Any) -> None:
        """Appends an event. Raises `ValueError` for an unknown kind."""
        if kind not in EVENT_KINDS:
            raise ValueError(f"event {kind!r}: expected one of {', '.join(EVENT_KINDS)}")
        with self._lock:
            self._events.write({**self._stamp(step), "event": kind, **fields})

    def rollout(self, step: int, row: Mapping[str, Any], transcript: str) -> None:
        """Appends a rollout of `step`: `row` (task, sample, outcome, reward, ...) and its transcript."""
        with self._lock:
            self._rollouts.write(step, {**self._stamp(step), **row}, transcript)

    def close(self) -> None:
        """Closes every file."""
        with self._lock:
            self._events.close()
            self._metrics.close()
            self._rollouts.close()

    def _stamp(self, step: int | None) -> dict[str, Any]:
        stamp: dict[str, Any] = {"v": VERSION, "t": self._clock(), "attempt": self.attempt}
        return stamp if step is None else stamp | {"step": step}


class _RolloutFiles:
    """The two files of the newest step; opening them may fail too, which costs rows, not the run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._open: tuple[int, JsonlWriter, Appender] | None = None
        self._lost = 0

    @property
    def lost(self) -> int:
        return self._lost + (self._open[1].lost if self._open else 0)

    def write(self, step: int, row: Mapping[str, Any], transcript: str) -> None:
        content = transcript.encode("utf-8", "backslashreplace")
        try:
            rows, texts = self._at(step)
        except OSError:
            self._lost += 1
            return
        offset = texts.append(content)
        rows.write({**row, "text": None if offset is None else [offset, len(content)]})

    def _at(self, step: int) -> tuple[JsonlWriter, Appender]:
        if self._open is None or self._open[0] != step:
            self.close()
            stem = self._folder / step_name(step)
            texts = Appender(stem.with_suffix(".text"))
            try:
                self._open = (step, JsonlWriter(stem.with_suffix(".jsonl")), texts)
            except OSError:
                texts.close()
                raise
        return self._open[1], self._open[2]

    def close(self) -> None:
        if self._open is not None:
            self._lost += self._open[1].lost
            self._open[1].close()
            self._open[2].close()
            self._open = None


def _replace_run_file(run: Path, content: Mapping[str, Any]) -> None:
    """A reader sees the old `run.json` or the new one, never a part."""
    temporary = run / f".run.json.{os.getpid()}"
    with temporary.open("wb") as file:
        file.write(encode(content))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(run / "run.json")
