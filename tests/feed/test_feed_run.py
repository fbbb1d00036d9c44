"""A run directory: what is written is read back, and only what still counts."""

import errno
import itertools
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.feed import jsonl, reader
from jaxrl.feed.metrics import METRICS
from jaxrl.feed.schema import Metric, Registry, UndeclaredMetricError, series
from jaxrl.feed.writer import RunWriter


def open_run(run: Path, resumed_from: int | None = None) -> RunWriter:
    clock = itertools.count(1_000.0).__next__
    return RunWriter(run, config={"a": 1}, versions={"jax": "0"}, resumed_from=resumed_from, clock=clock)


def test_every_metric_is_declared_once_with_unit_and_meaning():
    for metric in METRICS:
        assert re.fullmatch(r"[a-z]+/[a-z_]+", metric.name)
        assert metric.unit
        assert metric.meaning
    with pytest.raises(ValueError, match="declared twice"):
        Registry([*METRICS, Metric(name="train/loss", unit="1", kind="gauge", meaning="again")])


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("train/lost", "not declared"),
        ("train/loss{a=1}", "expected labels"),
        ("rollouts/outcome", "expected labels"),
        ("eval/pass_at{k=1}", "expected labels"),
        ("train/loss}", "not declared"),
    ],
)
def test_an_undeclared_series_raises(tmp_path, name, complaint):
    with pytest.raises(UndeclaredMetricError, match=complaint):
        open_run(tmp_path).metrics(1, {name: 1.0})
    assert reader.read_metrics(tmp_path) == []


def test_series_names_carry_labels():
    name = series("eval/pass_at", k=4, temperature=0.1, top_p=0.95)
    assert name == "eval/pass_at{k=4,temperature=0.1,top_p=0.95}"
    assert METRICS.resolve(name).name == "eval/pass_at"
    with pytest.raises(ValueError, match="label task"):
        series("x", task="a,b=c")


@pytest.mark.parametrize("values", [{"train/loss": (1, 2)}, {"reward/mean": 0.5}])
def test_ratios_are_pairs_and_nothing_else_is(tmp_path, values):
    with pytest.raises(TypeError, match="a ratio is"):
        open_run(tmp_path).metrics(1, values)


def test_an_unknown_event_raises(tmp_path):
    with pytest.raises(ValueError, match="expected one of attempt_start"):
        open_run(tmp_path).event("holiday")  # type: ignore[arg-type]


def test_what_is_written_is_read_back(tmp_path):
    writer = open_run(tmp_path)
    writer.metrics(1, {"train/loss": 0.5, "reward/mean": (3, 4), "train/grad_norm": float("nan")})
    writer.metrics(2, {"train/loss": 0.25, "reward/mean": (0, 0)})
    writer.event("eval", 0, pass_at=[0.4, 0.5], tasks={"t1": 2})
    transcript = "view <b>\n\ud800 и\u2028"
    writer.rollout(2, {"task": "t1", "sample": 0, "reward": 1.0}, "first")
    writer.rollout(2, {"task": "t1", "sample": 1, "reward": None}, transcript)
    writer.close()
    assert reader.read_series(tmp_path, "train/loss") == [(1, 0.5), (2, 0.25)]
    assert reader.read_series(tmp_path, "reward/mean") == [(1, 0.75), (2, None)]
    assert reader.read_series(tmp_path, "train/grad_norm") == [(1, None)]
    assert reader.read_metrics(tmp_path)[0]["nonfinite"] == ["m.train/grad_norm"]
    assert [event["tasks"] for event in reader.read_events(tmp_path, "eval")] == [{"t1": 2}]
    rows = reader.read_rollouts(tmp_path, 2)
    assert [row["sample"] for row in rows] == [0, 1]
    assert reader.read_transcript(tmp_path, rows[0]) == "first"
    assert reader.read_transcript(tmp_path, rows[1]) == transcript.replace("\ud800", "\\ud800")
    assert reader.undeclared(tmp_path) == set()
    assert all(row["v"] == 1 and row["attempt"] == 1 for row in rows)


def test_run_json_says_what_the_numbers_mean(tmp_path):
    open_run(tmp_path)
    open_run(tmp_path, 5)
    run = reader.read_run(tmp_path)
    assert (run["attempt"], run["resumed_from"], run["config"]) == (2, 5, {"a": 1})
    assert {metric["name"] for metric in run["metrics"]} == {metric.name for metric in METRICS}
    assert [path.name for path in tmp_path.glob(".run*")] == []


@given(
    attempts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.booleans()), min_size=1, max_size=5)
)
@settings(deadline=None, max_examples=50)
def test_redone_steps_count_once_in_the_newest_attempt(attempts):
    """The oracle keeps a plain list, cut at every resumption."""
    with tempfile.TemporaryDirectory() as folder:
        run, expected = Path(folder), []
        for number, (checkpoint, length, from_scratch) in enumerate(attempts, start=1):
            done = max((step for step, _ in expected), default=0)
            resumed = None if from_scratch or not expected else min(checkpoint, done)
            start = -1 if resumed is None else resumed
            expected = [(step, by) for step, by in expected if step <= start]
            writer = open_run(run, resumed)
            for step in range(start + 1, start + 1 + length):
                writer.metrics(step, {"train/loss": number, "engine/decoded": 10 * (step - start)})
                writer.event("step", step)
                expected.append((step, number))
            writer.close()
        assert reader.read_series(run, "train/loss") == expected
        assert [(row["step"], row["attempt"]) for row in reader.read_events(run, "step")] == expected
        assert reader.read_series(run, "engine/decoded") == [(step, 10) for step, _ in expected]
        assert [attempt.number for attempt in reader.lineage(run).attempts] == list(
            range(1, len(attempts) + 1)
        )


def test_rollouts_of_an_abandoned_step_do_not_count(tmp_path):
    for number, resumed_from in enumerate([None, 1]):
        writer = open_run(tmp_path, resumed_from)
        for step in (1, 2)[number:]:
            writer.rollout(step, {"task": "t", "sample": number}, f"attempt {number}")
        writer.close()
    (row,) = reader.read_rollouts(tmp_path, 2)
    assert (row["attempt"], reader.read_transcript(tmp_path, row)) == (2, "attempt 1")
    assert [row["attempt"] for row in reader.read_rollouts(tmp_path, 1)] == [1]


def test_a_disk_that_fills_up_never_stops_training(tmp_path, monkeypatch):
    writer = open_run(tmp_path)
    writer.rollout(1, {"task": "t"}, "before")

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    real_write, real_open = os.write, os.open
    monkeypatch.setattr(jsonl.os, "write", no_space)
    monkeypatch.setattr(jsonl.os, "open", no_space)
    writer.metrics(1, {"train/loss": 1.0})
    writer.event("step", 1)
    writer.rollout(1, {"task": "t"}, "in between")
    writer.rollout(2, {"task": "t"}, "new file")
    assert writer.lost == 4
    monkeypatch.setattr(jsonl.os, "write", real_write)
    monkeypatch.setattr(jsonl.os, "open", real_open)
    writer.metrics(2, {"train/loss": 2.0, "feed/lost_rows": writer.lost})
    writer.rollout(2, {"task": "t"}, "after")
    assert reader.read_series(tmp_path, "train/loss") == [(2, 2.0)]
    assert [reader.read_transcript(tmp_path, row) for row in reader.read_rollouts(tmp_path, 2)] == ["after"]


def test_a_run_that_cannot_record_its_start_does_not_start(tmp_path, monkeypatch):
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl.os, "write", no_space)
    with pytest.raises(OSError, match="start of the attempt"):
        open_run(tmp_path)
