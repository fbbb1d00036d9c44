"""Supervised training and stand-alone evaluation, small but whole."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl import eval as evaluation_command
from jaxrl import sft
from jaxrl.config import ConfigError
from jaxrl.feed.reader import read_series
from jaxrl.rollout.conversation import to_json
from jaxrl.rollout.demos import STAGE_1, conversations
from jaxrl.rollout.harness import COMPACT
from sandbox.tasks.generated.generate import instances

START = Path(__file__).resolve().parents[2] / "configs/quickstart/start"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demos.jsonl"
    stream = conversations(instances("train", 40, 5), mix=STAGE_1, harness=COMPACT, seed=0)
    path.write_text("".join(f"{to_json(each)}\n" for each in islice(stream, 60)))
    return path


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    """A run of three updates from the starting checkpoint."""
    folder = tmp_path_factory.mktemp("sft")
    options = ["sft.steps=3", "sft.rows=2", "optimizer.learning_rate=1e-3", "optimizer.warmup_steps=0"]
    sft.main([*options, f"sft.data=[{data}]", f"run.output_dir={folder}", "run.run_name=sft"])
    return folder / "sft"


def test_sft_writes_a_model_that_differs_from_the_start(trained):
    assert (trained / "model" / "tokenizer.json").is_file()
    before, after = (load_file(each / "model.safetensors") for each in (START, trained / "model"))
    assert before.keys() == after.keys()
    assert not all(np.array_equal(before[name], after[name]) for name in before)
    losses = [value for _, value in read_series(trained, "sft/loss")]
    assert len(losses) == 3 and all(value is not None and 0 < value < 5 for value in losses)


def test_eval_counts_every_task_and_sample(trained, tmp_path, capsys):
    evaluation_command.main(
        [
            f"model.checkpoint={trained / 'model'}",
            "evaluation.split=test",
            "evaluation.samples=2",
            "evaluation.sampling_sets=[[1.0, 1.0]]",
            "tasks.test_count=5",
            "engine.slots=16",
            "engine.prefill_rows=4",
            f"run.output_dir={tmp_path}",
        ]
    )
    (row,) = map(json.loads, (tmp_path / "quickstart" / "evaluations.jsonl").read_text().splitlines())
    assert row["split"] == "test" and len(row["resolved"]) == 5
    assert sum(row["outcomes"].values()) == 10
    assert "test  5 tasks x 2  T=1 top_p=1  pass@1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "paths, message", [([], "at least one file"), (["missing.jsonl"], "can't read missing.jsonl")]
)
def test_missing_data_is_named(paths, message):
    with pytest.raises(ConfigError, match=message):
        sft.read_lines(paths)
