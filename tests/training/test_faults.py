"""A fault costs its own rollouts and nothing else: the step trains on the rest, and the feed tells why."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl import train
from jaxrl.config import load
from jaxrl.contracts import Outcome
from jaxrl.feed.reader import read_events, read_series
from jaxrl.feed.writer import RunWriter
from jaxrl.rl.examples import GroupOptions
from jaxrl.rollout.agent import run_episode
from jaxrl.rollout.calls import render_call
from jaxrl.runs import OpenRun
from jaxrl.stepping import StepOptions, StepResult, StepTrainer
from jaxrl.supply import Supply
from sandbox.base import Image, SandboxError
from sandbox.namespace import NamespaceProvider
from sandbox.pool import SandboxPool
from sandbox.tasks.generated.generate import generate
from tests.rollout.rollout_fakes import (
    ATTEMPT,
    FINISH,
    INSTANCE,
    FakeGenerator,
    FakeGrader,
    FakeProvider,
    world,
)
from tests.training.test_stepping import RecordingLearner
from tests.training.test_train import settings
from tools.check_run import problems

TASKS = generate("train", 8, 1)
BROKEN = TASKS.specs[1]
MORE = ("rl.prompts_per_step=3", "rl.group_size=2", "sandbox.concurrency=4")
ONE_UPDATE = ("rl.updates_per_step=1", "tasks.validation_count=2")
VIEW_AND_FINISH = (render_call("view", {"path": "app.py"}) + FINISH,)


def is_broken(files) -> bool:
    return files == {path: text.encode() for path, text in BROKEN.files.items()}


class NoSandbox(FakeProvider):
    """Starts no sandbox for one task, as where its image is missing."""

    async def create(self, files, limits):
        if is_broken(files):
            raise SandboxError("image broken.sif: expected a file, found none")
        return await super().create(files, limits)


class DiesInTheMiddle(FakeProvider):
    """The sandboxes of one task are gone when the first tool reads a file."""

    async def create(self, files, limits):
        sandbox = await super().create(files, limits)

        async def gone(path: str) -> bytes:
            raise SandboxError("the sandbox has ended: killed from outside")

        if is_broken(files):
            sandbox.read = gone  # type: ignore[method-assign]
        return sandbox


class Crashes(FakeGrader):
    """The graders of one task die."""

    async def grade(self, task, hidden, diff):
        if task.instance_id == BROKEN.instance_id:
            raise SandboxError("a grading process died: status -9")
        return await super().grade(task, hidden, diff)


def play_step(folder: Path, around: Any) -> tuple[StepResult, RecordingLearner]:
    """One step of three tasks, the second of which is broken."""
    config, learner = load(overrides=list(MORE)), RecordingLearner()
    feed = RunWriter(folder, config={}, versions={})
    opened = OpenRun(folder, feed, None, 0, 0, fresh=True)  # type: ignore[arg-type]

    async def main() -> StepResult:
        options = StepOptions(rows=1, row_length=512, updates=1, group=GroupOptions(drop_equal_groups=False))
        supply = Supply(config, opened, around)
        with ThreadPoolExecutor(1) as device:
            trainer = StepTrainer(learner, options=options, device=device)  # type: ignore[arg-type]
            async with supply.open(TASKS) as groups:
                groups.begin_step(version=3, left=1)  # what the scripted engine says of its first turns
                return await trainer.train(groups.groups(3, version=3))

    try:
        return asyncio.run(main()), learner
    finally:
        feed.close()


@pytest.mark.parametrize(
    ("provider", "grader", "outcome", "words"),
    [
        (NoSandbox, FakeGrader, Outcome.INFRA_ERROR, "image broken.sif: expected a file, found none"),
        (DiesInTheMiddle, FakeGrader, Outcome.INFRA_ERROR, "killed from outside"),
        (FakeProvider, Crashes, Outcome.GRADER_ERROR, "a grading process died"),
    ],
    ids=["missing image", "sandbox crash", "grader crash"],
)
def test_a_broken_task_is_masked_and_told_and_the_others_are_trained(
    tmp_path, provider, grader, outcome, words
):
    made = provider()
    around = replace(world(FakeGenerator(VIEW_AND_FINISH), provider=made), grader=grader(made))
    result, learner = play_step(tmp_path, around)
    assert [group.task for group in result.groups] == [spec.instance_id for spec in TASKS.specs[:3]]
    endings = [[each.outcome for each in group.trajectories] for group in result.groups]
    assert endings == [[Outcome.UNRESOLVED] * 2, [outcome] * 2, [Outcome.UNRESOLVED] * 2]
    sampled = [int(t.loss_mask.sum()) for g in (0, 2) for t in result.groups[g].trajectories]
    assert sum(np.count_nonzero(batch.weights_BT) for batch in learner.batches) == sum(sampled) > 0
    assert learner.updates == [len(learner.batches)]
    told = read_events(tmp_path, "alert")
    assert len(told) == 2 * 2 and {row["task"] for row in told} == {BROKEN.instance_id}
    assert all(words in row["reason"] for row in told)
    assert made.alive == 0


@pytest.mark.sandbox
def test_an_image_that_is_not_there_is_named_in_the_rollout(tmp_path):
    task = replace(INSTANCE.spec, image=Image(source=tmp_path / "none"))

    async def main():
        pool = SandboxPool(NamespaceProvider(), size=1)
        try:
            around = replace(world(FakeGenerator(VIEW_AND_FINISH)), sandboxes=pool)
            return await run_episode(task, INSTANCE.hidden, attempt=ATTEMPT, world=around)
        finally:
            await pool.close()

    made = asyncio.run(main())
    assert made.outcome is Outcome.INFRA_ERROR and made.reward is None
    assert str(tmp_path / "none") in made.detail


@pytest.mark.slow
def test_steps_without_any_advantage_are_told_and_change_nothing(tmp_path):
    """In one turn nobody can repair anything: all rewards are 0."""
    train.main(settings(tmp_path, "zero", "harness.max_turns=1", *ONE_UPDATE))
    run = tmp_path / "zero"
    assert problems(run) == []
    reasons = [row["reason"] for row in read_events(run, "alert")]
    assert reasons == ["update skipped: no trained tokens"] * 2
    assert [row["version"] for row in read_events(run, "step")] == [0, 0]
    assert read_series(run, "train/updates") == [(1, 0), (2, 0)]
    assert read_events(run, "stop")[-1]["reason"] == "finished"
