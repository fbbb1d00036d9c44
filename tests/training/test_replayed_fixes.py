"""The known fix of every task earns 1.0 through the whole loop, and a wrong one does not."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl import replay, train
from jaxrl.config import ConfigError, load
from jaxrl.feed.reader import read_events, read_series
from jaxrl.replay import known_files
from jaxrl.tasksets import evenly
from sandbox.base import Image
from sandbox.tasks.generated.generate import generate

CONFIGS = Path(__file__).parents[2] / "configs"
FEW = ["tasks.train_count=3", "tasks.validation_count=2", "rl.prompts_per_step=2", "sandbox.concurrency=2"]


def test_known_fixes_of_generated_tasks_earn_1(capsys) -> None:
    assert asyncio.run(replay.replay(load(overrides=[*FEW, "grader.workers=1"])))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["1.0"] * 5
    assert lines[5].startswith("5 of 5 tasks earned 1.0")


def test_a_wrong_fix_earns_nothing_and_is_told(monkeypatch, capsys) -> None:
    def wrong(task, hidden):
        before, after = known_files(task, hidden)
        return before, {path: (data or b"") + b"\nx = 1\n" for path, data in before.items() if path in after}

    monkeypatch.setattr(replay, "known_files", wrong)
    with pytest.raises(SystemExit) as ended:
        replay.main([*FEW, "replay.splits=[validation]", "grader.workers=1"])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert out.count("unresolved") == 2 and "0 of 2 tasks earned 1.0" in out


def test_tasks_without_a_known_fix_or_with_files_in_an_image_are_refused() -> None:
    tasks = generate("train", 8, 0)
    task, hidden = tasks.specs[0], tasks.hidden(tasks.specs[0].instance_id)
    with pytest.raises(ConfigError, match="expected a known fix to replay"):
        known_files(task, replace(hidden, reference={}))
    inside = replace(task, files={}, image=Image(name="some.sif"))
    with pytest.raises(ConfigError, match=r"app.py in a folder of this machine, and it is in image some.sif"):
        known_files(inside, hidden)


def test_compact_cannot_carry_a_change_of_whole_files() -> None:
    hidden = SimpleNamespace(reference={"app.py": None})
    task = generate("train", 8, 0).specs[0]
    with pytest.raises(ConfigError, match=r"harness.name = compact: .*app.py: .*; take openhands"):
        replay._turns(load(), task, hidden)  # type: ignore[arg-type]


def test_some_of_each_project_are_spread_over_its_list() -> None:
    projects = {f"a{i}": "a" for i in range(6)} | {"b0": "b"}
    assert evenly([*projects], projects, 2) == ["a0", "a5", "b0"]
    assert evenly([*projects], projects, None) == [*projects]
    assert evenly([*projects], projects, 3) == ["a0", "a2", "a5", "b0"]
    assert evenly([*projects], projects, 1) == ["a0", "b0"]
    assert evenly(["a0", "a1", "a2"], projects, 9) == ["a0", "a1", "a2"]


@pytest.mark.slow
def test_known_fixes_of_a_release_and_a_mutation_earn_1(capsys) -> None:
    only = ["tasks.train_projects=[jinja2]", "tasks.per_project=2", "replay.splits=[train]"]
    assert asyncio.run(replay.replay(load(CONFIGS / "projects.yaml", overrides=only)))
    assert "2 of 2 tasks earned 1.0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_of_the_tiny_model_on_projects(tmp_path: Path, capsys) -> None:
    """Prompts, tools, grading, gradient and update at full length, and a word about having learnt nothing."""
    config = load(CONFIGS / "projects_smoke.yaml", overrides=[f"run.output_dir={tmp_path}"])
    asyncio.run(train.train(config))
    run = tmp_path / "projects_smoke"
    assert "every advantage is 0 and nothing can be learnt (6 rollouts: " in capsys.readouterr().out
    assert read_events(run, "stop")[-1]["reason"] == "finished"
    values = {name: read_series(run, name) for name in ("train/updates", "reward/mean", "train/grad_norm")}
    assert values == {"train/updates": [(1, 1)], "reward/mean": [(1, 0)], "train/grad_norm": [(1, 0)]}
    trained, sampled = (read_series(run, f"tokens/{name}") for name in ("trained", "sampled"))
    assert trained == sampled != [(1, 0)]
