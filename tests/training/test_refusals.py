"""Settings and files that cannot work are refused in one sentence, before anything is computed."""

import asyncio
import json
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import sft, train
from jaxrl.assembly import build_model, build_tasks, check_prompts, check_sizes, learner_options, open_parts
from jaxrl.config import ConfigError, load
from jaxrl.contracts import OUTCOME_RULES, Outcome, Trajectory, TrajectoryGroup
from jaxrl.reporting import _sampled
from jaxrl.runs import OpenRun, open_run
from jaxrl.supply import bound
from jaxrl.train import Trainer
from sandbox.base import SandboxError
from sandbox.grading.grader import Grader
from sandbox.tasks.generated import generate
from sandbox.tasks.generated.families import FAMILIES, bugs

START = Path(__file__).resolve().parents[2] / "configs/quickstart/start"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tasks.train_count=31", "rl.prompts_per_step = 32: expected at most tasks.train_count = 31"),
        ("rl.row_length=191", "rl.row_length = 191: expected at least engine.context = 192"),
    ],
)
def test_sizes_that_do_not_fit_together(override: str, words: str) -> None:
    check_sizes(load())
    with pytest.raises(ConfigError, match=words):
        asyncio.run(train.train(load(overrides=[override])))


def test_a_bound_that_allows_no_step_ahead() -> None:
    more = ["rl.updates_per_step=2", "rl.max_staleness=1"]
    with pytest.raises(ConfigError, match="rl.max_staleness = 1: expected 0, or at least .* = 2"):
        asyncio.run(train.train(load(overrides=more)))
    assert [bound(load(overrides=[*more, f"rl.max_staleness={n}"])).steps for n in (0, 2, 5)] == [0, 1, 2]


def test_prompt_longer_than_the_context() -> None:
    tasks = SimpleNamespace(specs=["short", "longer"])
    renderer = SimpleNamespace(initial=list)
    for context, fits in ((7, True), (6, False)):
        world = SimpleNamespace(renderer=renderer, generator=SimpleNamespace(context=context))
        if fits:
            check_prompts(world, tasks)  # type: ignore[arg-type]
            continue
        with pytest.raises(ConfigError, match="engine.context = 6: expected more than .* 6 tokens"):
            check_prompts(world, tasks)  # type: ignore[arg-type]


def test_more_tasks_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "function_names", lambda split: ["only"])
    monkeypatch.setattr(generate, "_pairs", lambda split: [(name, bugs(name)[:1]) for name in FAMILIES])
    with pytest.raises(ConfigError, match="tasks.train_count = 100000: expected a smaller count"):
        build_tasks(load(overrides=["tasks.train_count=100000"]), "train")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50_000])


def _without_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: tensors[name] for name in sorted(tensors)[1:]}, path)


def _misshapen(path: Path) -> None:
    tensors = load_file(path)
    name = max(tensors)
    save_file({**tensors, name: tensors[name][:-1].copy()}, path)


@pytest.mark.parametrize("damage", [_cut, _without_a_tensor, _misshapen, Path.unlink])
def test_damaged_starting_weights(tmp_path: Path, damage) -> None:
    folder = tmp_path / "start"
    shutil.copytree(START, folder)
    damage(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"model.checkpoint = {folder}: "):
        build_model(load(overrides=[f"model.checkpoint={folder}"]))


def test_no_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: Grader) -> None:
        raise SandboxError("no user namespaces")

    async def body() -> None:
        config = load()
        async with open_parts(config, build_model(config), None):  # type: ignore[arg-type]
            pytest.fail("expected no parts without sandboxes")

    monkeypatch.setattr(Grader, "start", start)
    with pytest.raises(ConfigError, match="no user namespaces"):
        asyncio.run(body())


def test_run_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        train.main([f"run.output_dir={tmp_path / 'file'}"])
    assert "can't write the run's folder" in capsys.readouterr().err


def test_other_settings_are_free_until_there_is_a_checkpoint(tmp_path: Path) -> None:
    learner = SimpleNamespace(state=dict)
    for context in (20, 192):
        config = load(overrides=[f"engine.context={context}"])
        with open_run(tmp_path, config, learner) as opened:  # type: ignore[arg-type]
            assert opened.fresh
    (tmp_path / "checkpoints/checkpoint_000001_step_00000000").mkdir(parents=True)
    with (
        pytest.raises(ConfigError, match="engine.context: 192 then, 20 now"),
        open_run(tmp_path, load(overrides=["engine.context=20"]), learner),  # type: ignore[arg-type]
    ):
        pytest.fail("expected other settings to be refused")


def test_a_run_older_than_a_setting_goes_on_with_its_default(tmp_path: Path) -> None:
    learner = SimpleNamespace(state=dict)
    with open_run(tmp_path, load(), learner):  # type: ignore[arg-type]
        pass
    older = json.loads((tmp_path / "run.json").read_text())
    del older["config"]["rl"]["max_staleness"], older["config"]["harness"]
    (tmp_path / "run.json").write_text(json.dumps(older))
    (tmp_path / "checkpoints/checkpoint_000001_step_00000000").mkdir(parents=True)
    with (
        pytest.raises(ConfigError, match="rl.max_staleness: 0 then, 1 now"),
        open_run(tmp_path, load(overrides=["rl.max_staleness=1"]), learner),  # type: ignore[arg-type]
    ):
        pytest.fail("expected another value than the default to be refused")
    with open_run(tmp_path, load(), learner) as opened:  # type: ignore[arg-type]
        assert opened.fresh


@pytest.mark.parametrize("line", ["not json", json.dumps({"other": 1}), json.dumps({"messages": [{}]})])
def test_data_that_are_no_conversations(tmp_path: Path, line: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(line + "\n")
    with pytest.raises(ConfigError, match="expected a conversation"):
        sft.read_lines([str(data)])


def test_supervised_training_does_not_write_into_another_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="choose another run.run_name"):
        sft.train(load(), tmp_path)


def test_full_disk_ends_the_run_with_a_reason_and_no_draft(tmp_path: Path) -> None:
    tree = {"params": {"w": np.random.default_rng(0).random(200_000)}}
    learner = SimpleNamespace(state=lambda: tree, version=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_run(tmp_path, load(), learner) as opened:  # type: ignore[arg-type]
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
        try:
            with pytest.raises(ConfigError, match="step 3 could not be saved"):
                opened.save(3, 9, learner)  # type: ignore[arg-type]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list((tmp_path / "checkpoints").iterdir())
        opened.save(3, 9, learner)  # type: ignore[arg-type]


def test_another_models_checkpoint(tmp_path: Path) -> None:
    learners = [
        SimpleNamespace(state=lambda size=size: {"params": {"w": np.zeros(size)}}, version=1)
        for size in (3, 4)
    ]
    with open_run(tmp_path, load(), learners[0]) as opened:  # type: ignore[arg-type]
        opened.save(1, 4, learners[0])  # type: ignore[arg-type]
    with (
        pytest.raises(ConfigError, match=f"{tmp_path}: its checkpoints are another model's"),
        open_run(tmp_path, load(), learners[1]),  # type: ignore[arg-type]
    ):
        pytest.fail("expected another model's checkpoint to be refused")


def test_a_checkpoint_of_other_frozen_weights(tmp_path: Path) -> None:
    def load_into(state, version: int) -> None:
        raise ValueError("expected the frozen weights of the run's start")

    learner = SimpleNamespace(state=lambda: {"params": {"w": np.zeros(3)}}, version=1, load=load_into)
    with open_run(tmp_path, load(), learner) as opened:  # type: ignore[arg-type]
        opened.save(1, 4, learner)  # type: ignore[arg-type]
    with (
        pytest.raises(ConfigError, match="another model's .* expected the frozen weights"),
        open_run(tmp_path, load(), learner),  # type: ignore[arg-type]
    ):
        pytest.fail("expected a checkpoint of other frozen weights to be refused")


def test_damaged_checkpoints_are_said_aloud() -> None:
    feed = SimpleNamespace(attempt=2)
    opened = OpenRun(Path("r"), feed, None, 0, 0, fresh=True, damaged=3)  # type: ignore[arg-type]
    assert opened.greeting == "run r starts (attempt 2); 3 newer checkpoints are damaged"


def test_cosine_without_an_update_after_the_warm_up() -> None:
    config = load(overrides=["optimizer.schedule=cosine", "optimizer.warmup_steps=3"])
    assert learner_options(config, total_steps=4).total_steps == 4
    with pytest.raises(ConfigError, match="optimizer.schedule = cosine: expected more than"):
        learner_options(config, total_steps=3)


def test_second_interrupt_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(config) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(train, "train", cancelled)
    with pytest.raises(SystemExit) as caught:
        train.main([])
    assert caught.value.code == 130


def test_rollouts_that_do_not_vote_are_not_in_the_pass_rate() -> None:
    outcomes = (Outcome.RESOLVED, Outcome.UNRESOLVED, Outcome.INFRA_ERROR, Outcome.SUSPECTED_TAMPERING)
    nothing = np.zeros(0, np.int32)
    trajectories = [
        Trajectory(
            task="t", epoch=0, sample=sample, tokens=nothing, loss_mask=nothing.astype(bool),
            logprobs=nothing.astype(np.float32), full_logprobs=nothing.astype(np.float32), versions=nothing,
            turns=(), outcome=outcome, reward=OUTCOME_RULES[outcome].reward,
        )
        for sample, outcome in enumerate(outcomes)
    ]  # fmt: skip
    values = _sampled([TrajectoryGroup(task="t", epoch=0, trajectories=trajectories)])
    assert values["reward/pass_rate"] == (1, 3) and values["reward/mean"] == (1.0, 3)


def test_no_further_evaluation_once_asked_to_stop() -> None:
    trainer = object.__new__(Trainer)
    played = []

    async def evaluate(step: int, sampling, *, whole: bool) -> None:
        played.append(sampling.temperature)
        trainer._stopping = True

    trainer._config, trainer._stopping, trainer._evaluate = load(), False, evaluate
    asyncio.run(trainer._evaluate_due(0))
    assert played == [1.0]
