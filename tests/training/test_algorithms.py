"""Every algorithm once through the whole loop, with real episodes; adapters saved, resumed, exported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl import train
from jaxrl.feed.reader import read_events, read_series
from jaxrl.generate import load_model
from tools.check_run import problems

ROOT = Path(__file__).resolve().parents[2]
START = ROOT / "configs/quickstart/start/model.safetensors"
SMALL = (
    "tasks.train_count=40",
    "tasks.validation_count=2",
    "evaluation.samples=1",
    "evaluation.sampling_sets=[[1.0, 1.0]]",
    "rl.prompts_per_step=6",
    "rl.group_size=4",
    "rl.rows_per_microbatch=2",
    "engine.slots=24",
    "engine.prefill_rows=4",
    "sandbox.concurrency=24",
    "checkpoint.every=1",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def play(folder: Path, *more: str, steps: int = 1, name: str = "run") -> Path:
    train.main([*SMALL, f"run.output_dir={folder}", f"run.run_name={name}", f"run.steps={steps}", *more])
    return folder / name


def series(run: Path, metric: str) -> dict[int, float]:
    return {step: value for step, value in read_series(run, metric) if value is not None}


def last(run: Path, metric: str) -> float:
    return list(series(run, metric).values())[-1]


ALGORITHMS = {
    "grpo": ("rl.preset=grpo", "rl.updates_per_step=2"),
    "mlperf_v6_1": ("rl.preset=mlperf_v6_1", "rl.updates_per_step=1"),
    "dr_grpo": ("rl.preset=dr_grpo",),
    "gspo": ("rl.preset=gspo",),
    "cispo": ("rl.preset=cispo",),
    "recomputed": ("rl.ratio=recomputed", "rl.importance.kind=truncated"),
    "replayed": ("rl.router=replayed",),
}


@pytest.mark.parametrize("more", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_a_step_of_each_algorithm(tmp_path, more):
    run = play(tmp_path, *more)
    assert problems(run) == []
    assert [row["step"] for row in read_events(run, "step")] == [1]
    assert last(run, "train/updates") >= 1
    assert last(run, "train/logprob_error_max") <= 1e-5
    if more[0] == "rl.preset=grpo":
        assert last(run, "train/kl") >= 0
    before, after = load_file(START), load_file(run / "model/model.safetensors")
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert routers and moved
    assert not routers & moved if more[0] == "rl.preset=mlperf_v6_1" else routers <= moved


def test_dynamic_sampling_replaces_equal_groups_and_resumes_at_the_right_task(tmp_path):
    dapo = ("rl.preset=dapo", "rl.dynamic_sampling_rounds=2", "rl.updates_per_step=1")
    whole = play(tmp_path, *dapo, steps=2, name="whole")
    halved = [play(tmp_path, *dapo, steps=steps, name="halved") for steps in (1, 2)][-1]
    for run in (whole, halved):
        assert problems(run) == []
        drawn, mixed, missing = (series(run, f"groups/{name}") for name in ("drawn", "mixed", "missing"))
        for step, count in drawn.items():
            assert round(mixed[step] * count) == 6 - missing[step] and missing[step] >= 0
            assert count > 6 or missing[step] == 0
        assert max(drawn.values()) > 6  # some groups were replaced
        cursors = [row["cursor"] for row in read_events(run, "step")]
        assert cursors == [drawn[1], drawn[1] + drawn[2]]
    model = Path("model/model.safetensors")
    assert (whole / model).read_bytes() == (halved / model).read_bytes()


def test_adapters_are_saved_resumed_and_exported(tmp_path):
    lora = ("rl.lora={rank: 4, targets: [attention, gdn, experts]}",)
    whole = play(tmp_path, *lora, steps=2, name="whole")
    halved = [play(tmp_path, *lora, steps=steps, name="halved") for steps in (1, 2)][-1]
    files = [load_file(run / "model/model.safetensors") for run in (whole, halved)]
    before = load_file(START)
    assert files[0].keys() == files[1].keys() == before.keys()
    for name, array in files[0].items():
        np.testing.assert_array_equal(array, files[1][name])
        assert array.dtype == before[name].dtype
    moved = {name for name in before if not np.array_equal(before[name], files[0][name])}
    assert moved and all("_proj" in name and "shared" not in name for name in moved)
    assert last(whole, "train/logprob_error_max") <= 1e-5
    (newest,) = sorted((whole / "checkpoints").glob("checkpoint_*"))[-1:]
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    assert size < 0.5 * START.stat().st_size
    model: Any = load_model(whole)
    embedding = next(array for name, array in files[0].items() if name.endswith("embed_tokens.weight"))
    np.testing.assert_array_equal(np.asarray(model.embed[...]), embedding)
    q = next(array for name, array in files[0].items() if name.endswith("self_attn.q_proj.weight"))
    attention = next(i for i, kind in enumerate(model.spec.layer_types) if kind == "full_attention")
    np.testing.assert_array_equal(np.asarray(model.layers[attention].mixer.q[...]).T, q)
