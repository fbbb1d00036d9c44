"""The tools that read a run's feed: what they must notice, and that the picture is well formed."""

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxrl.contracts import Sampling
from jaxrl.evaluation import Evaluation, record
from jaxrl.feed.writer import RunWriter
from tools.check_run import ages, problems
from tools.kill_run import compare
from tools.plot_run import draw

Step = tuple[int, Sequence[tuple[str, int]], int]  # step, (task, version of its tokens), version afterwards


def write_attempt(
    run: Path, steps: Sequence[Step], *, resumed_from: int | None = None, max_staleness: int = 0
) -> None:
    config = {"rl": {"prompts_per_step": 1, "group_size": 1, "max_staleness": max_staleness}}
    feed = RunWriter(run, config=config, versions={}, resumed_from=resumed_from)
    for step, rollouts, version in steps:
        for task, sampled_by in rollouts:
            row = {"task": task, "epoch": 0, "sample": 0, "versions": [sampled_by, sampled_by]}
            feed.rollout(step, row, "text")
        feed.metrics(step, {"reward/pass_rate": (step, 4)})
        feed.event("step", step, version=version)
    feed.close()


def test_a_whole_run_has_no_problems(tmp_path):
    write_attempt(tmp_path, [(1, [("a", 0)], 2), (2, [("b", 2)], 4)])
    assert problems(tmp_path) == []


def test_what_a_resumed_attempt_abandoned_does_not_count(tmp_path):
    write_attempt(tmp_path, [(1, [("a", 0)], 1), (2, [("b", 1)], 2)])
    write_attempt(tmp_path, [(2, [("b", 1)], 2), (3, [("c", 2)], 3)], resumed_from=1)
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    "steps, message",
    [
        ([(1, [("a", 0)], 1), (3, [("b", 1)], 2)], "expected steps 1 to 2"),
        ([(1, [("a", 0)], 1), (2, [("a", 1)], 2)], "trained more than once"),
        ([(1, [("a", 0)], 1), (2, [("b", 0)], 2)], "other weights than version 1"),
        ([(1, [("a", 0)], 1), (2, [], 2)], "step 2: expected 1 rollouts, got 0"),
    ],
)
def test_each_kind_of_problem_is_found(tmp_path, steps, message):
    write_attempt(tmp_path, steps)
    assert any(message in problem for problem in problems(tmp_path))


@pytest.mark.parametrize(("sampled_by", "sound"), [(0, False), (1, True), (3, True), (4, False)])
def test_tokens_may_be_as_old_as_the_bound_and_never_of_later_weights(tmp_path, sampled_by, sound):
    steps = [(1, [("a", 0)], 3), (2, [("b", sampled_by)], 4)]
    write_attempt(tmp_path, steps, max_staleness=2)
    assert problems(tmp_path) == (
        [] if sound else ["step 2: 1 rollouts from other weights than versions 1 to 3"]
    )
    assert ages(tmp_path) == Counter([0, 3 - sampled_by])


def write_whole(run: Path, *, reward: float = 1.0, digest: str = "a", model: bytes = b"m", task: str = "t"):
    """A run of one step with all that is compared after kills."""
    feed = RunWriter(run, config={"rl": {"prompts_per_step": 1, "group_size": 1}}, versions={})
    row = {"task": task, "epoch": 0, "sample": 0, "outcome": "resolved", "reward": reward, "turns": 1}
    feed.rollout(1, row | {"tokens": 9, "sampled": 4, "versions": [0, 0]}, "text")
    feed.event("step", 1, version=1)
    feed.close()
    checkpoint = run / "checkpoints/checkpoint_000001_step_00000001"
    checkpoint.mkdir(parents=True)
    arrays = {"params/w": {"sha256": digest}}
    (checkpoint / "ledger.json").write_text(json.dumps({"ledger": {"arrays": arrays}}))
    (run / "model").mkdir()
    (run / "model/model.safetensors").write_bytes(model)


@pytest.mark.parametrize(
    ("change", "words", "only_synchronous"),
    [
        ({"reward": 0.0}, "ledger of trained rollouts", True),
        ({"digest": "b"}, "1 of 1 arrays of the checkpoint, such as params/w", True),
        ({"model": b"n"}, "the exported model", True),
        ({"task": "u"}, "other rollouts, or in other steps", False),
    ],
)
def test_what_kills_changed_is_named(tmp_path, change, words, only_synchronous):
    write_whole(tmp_path / "whole")
    write_whole(tmp_path / "same")
    write_whole(tmp_path / "other", **change)
    for asynchronous in (False, True):
        compared = {
            name: compare(tmp_path / "whole", tmp_path / name, asynchronous=asynchronous)
            for name in ("same", "other")
        }
        assert compared["same"] == []
        assert any(words in each for each in compared["other"]) != (asynchronous and only_synchronous)


def test_the_picture_is_xml_with_a_point_per_evaluation(tmp_path):
    write_attempt(tmp_path, [(1, [("a", 0)], 1), (2, [("b", 1)], 2)])
    feed = RunWriter(tmp_path, config={}, versions={}, resumed_from=2)
    for step in (0, 2):
        made = Evaluation(
            step=step,
            version=step,
            sampling=Sampling(temperature=1.0, top_p=1.0),
            samples=4,
            resolved={"x": step, "y": 1},
            outcomes={"resolved": step + 1, "unresolved": 7 - step},
            seconds=1.0,
        )
        record(feed, made, split="validation")
    feed.close()
    root = ElementTree.fromstring(draw([tmp_path]))
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == 2 + 2  # two evaluations, two legend marks
