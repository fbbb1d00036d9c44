"""The whole loop with a small step: trains, records, resumes, refuses what it must."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl import train
from jaxrl.config import ConfigError, load
from jaxrl.feed.reader import lineage, read_events, read_rollouts, read_series, read_transcript
from sandbox.tasks.generated.generate import generate
from tools import check_run
from tools.check_run import ages, problems

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "run.steps=2",
    "tasks.train_count=40",
    "tasks.validation_count=6",
    "evaluation.samples=2",
    "rl.prompts_per_step=4",
    "rl.group_size=4",
    "rl.rows_per_microbatch=2",
    "engine.slots=16",
    "engine.prefill_rows=4",
    "sandbox.concurrency=16",
    "checkpoint.every=1",
)

AHEAD = ("rl.max_staleness=1", "rl.updates_per_step=1")


def settings(folder: Path, name: str, *more: str) -> list[str]:
    return [*SMALL, f"run.output_dir={folder}", f"run.run_name={name}", *more]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    train.main(settings(folder, "small"))
    return folder / "small"


def test_every_step_is_recorded_once_and_nothing_is_stale(run):
    assert problems(run) == []
    assert [row["step"] for row in read_events(run, "step")] == [1, 2]
    assert [row["cursor"] for row in read_events(run, "step")] == [4, 8]


def test_a_lost_rollout_is_a_problem(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "copied", ignore=shutil.ignore_patterns("checkpoints"))
    rows = copied / "rollouts/step_000002.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[1:]))
    assert problems(copied) == ["step 2: expected 16 rollouts, got 15"]


def test_no_run_is_no_success(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_run.py", str(tmp_path / "typo")])
    with pytest.raises(SystemExit) as caught:
        check_run.main()
    assert caught.value.code == 2 and "no run.json" in capsys.readouterr().err


def test_sampler_and_trainer_agree(run):
    errors = [value for _, value in read_series(run, "train/logprob_error_max") if value is not None]
    assert errors and max(errors) <= 1e-5


def test_transcripts_hold_real_tool_calls_and_results(run):
    rows = [row for step in (1, 2) for row in read_rollouts(run, step)]
    assert len(rows) == 2 * 16
    texts = [read_transcript(run, row) or "" for row in rows]
    assert any("<function=view>" in text and "<tool_response>\ndef " in text for text in texts)
    assert all(row["reward"] == float(row["outcome"] == "resolved") for row in rows)


def test_start_and_end_are_evaluated_with_both_samplings(run):
    rows = read_events(run, "eval")
    seen = [(row["step"], row["sampling"]["temperature"], len(row["resolved"])) for row in rows]
    assert seen == [(0, 1.0, 6), (0, 0.1, 6), (2, 1.0, 6), (2, 0.1, 6)]


def test_weights_moved_and_are_saved(run):
    before = load_file(ROOT / "configs/quickstart/start/model.safetensors")
    after = load_file(run / "model/model.safetensors")
    assert before.keys() == after.keys()
    assert any(not np.array_equal(before[name], after[name]) for name in before)


def test_a_finished_run_goes_no_further(run):
    train.main(settings(run.parent, "small"))
    assert [row["step"] for row in read_events(run, "step")] == [1, 2]
    assert len(read_events(run, "eval")) == 4
    assert lineage(run).attempts[-1].resumed_from == 2


def test_other_settings_are_refused_by_name(run, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(settings(run.parent, "small", "rl.clip_high=0.3"))
    assert caught.value.code == 2
    assert "rl.clip_high: 0.28 then, 0.3 now" in capsys.readouterr().err


def test_a_truncated_training_distribution_is_refused(tmp_path):
    config = load(None, settings(tmp_path, "truncated", "sampling.top_p=0.9"))
    with pytest.raises(ConfigError, match="whole softmax"):
        asyncio.run(train.train(config))


@pytest.fixture(scope="module")
def ahead(tmp_path_factory) -> Path:
    """A finished asynchronous run of four steps, whose weights change in the middle of turns."""
    folder = tmp_path_factory.mktemp("runs")
    more = ("run.steps=4", "rl.weight_update=in_flight", "tasks.validation_count=2")
    train.main(settings(folder, "ahead", *more, *AHEAD))
    return folder / "ahead"


def test_an_asynchronous_run_trains_stale_tokens_within_the_bound(ahead):
    assert problems(ahead) == []
    assert max(ages(ahead)) == 1  # some rollouts were really generated ahead
    staleness = dict(read_series(ahead, "train/staleness"))
    assert staleness.get(1, 0) == 0 and all(value is None or 0 <= value <= 1 for value in staleness.values())
    assert max(value or 0 for _, value in read_series(ahead, "train/staleness_max")) == 1
    assert all(value == 0 for _, value in read_series(ahead, "groups/regenerated"))


def test_parts_of_a_step_add_up(ahead):
    def series(name: str) -> dict[int, float]:
        return {step: value for step, value in read_series(ahead, name) if value is not None}

    total, idle, share = series("time/step"), series("time/idle"), series("time/idle_share")
    busy = {step: series("time/engine")[step] + series("time/training")[step] for step in total}
    assert list(total) == [1, 2, 3, 4]
    for step, seconds in total.items():
        assert busy[step] > 0 and 0 <= idle[step] < seconds
        assert busy[step] + idle[step] == pytest.approx(seconds, rel=0.2)
        assert share[step] == idle[step] / seconds


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_asynchronous_run_trains_every_rollout_once_and_within_the_bound(tmp_path):
    more = ("run.steps=5", "checkpoint.every=2", "evaluation.samples=1", "tasks.validation_count=2")
    more += AHEAD
    for kill_after in (1, 3):
        _kill_after_step(tmp_path, "killed", kill_after, more)
    train.main(settings(tmp_path, "killed", *more))
    killed = tmp_path / "killed"
    assert problems(killed) == [] and max(ages(killed)) == 1
    rollouts = [row for step in range(1, 6) for row in read_rollouts(killed, step)]
    tasks = list(dict.fromkeys(row["task"] for row in rollouts))
    expected = [spec.instance_id for spec in generate("train", 40, 0).specs[:20]]
    assert len(rollouts) == 5 * 16 and tasks == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_to_the_very_weights_of_an_uninterrupted_one(tmp_path):
    more = ("run.steps=5", "checkpoint.every=2", "evaluation.samples=1", "tasks.validation_count=2")
    train.main(settings(tmp_path, "whole", *more))
    for kill_after in (1, 3, 4):
        _kill_after_step(tmp_path, "killed", kill_after, more)
    train.main(settings(tmp_path, "killed", *more))
    killed = tmp_path / "killed"
    assert problems(killed) == []
    assert len(lineage(killed).attempts) == 4
    assert _files_equal(tmp_path / "whole" / "model", killed / "model")


def _kill_after_step(folder: Path, name: str, step: int, more: tuple[str, ...]) -> None:
    """Starts the run and kills it with SIGKILL as soon as it has finished `step`."""
    command = [sys.executable, "-m", "jaxrl.train", *settings(folder, name, *more)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 280
    while not any(row["step"] >= step for row in read_events(folder / name, "step")):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before its kill"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def _files_equal(left: Path, right: Path) -> bool:
    return (left / "model.safetensors").read_bytes() == (right / "model.safetensors").read_bytes()
