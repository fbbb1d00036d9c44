"""Order of training, splitting over updates, and the control that permutes rewards."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxrl.contracts import Outcome, Trajectory, TrajectoryGroup, Turn
from jaxrl.rl.examples import GroupOptions
from jaxrl.rl.learner import UpdateReport
from jaxrl.rl.packing import Microbatch
from jaxrl.stepping import StepOptions, StepTrainer, shuffled


class RecordingLearner:
    """Keeps what it is given, in order."""

    def __init__(self) -> None:
        self.batches: list[Microbatch] = []
        self.updates: list[int] = []

    def logprobs(self, batch: Microbatch) -> np.ndarray:
        return batch.sampler_logprobs_BT

    def accumulate(self, batch: Microbatch) -> None:
        self.batches.append(batch)

    def apply(self) -> UpdateReport:
        self.updates.append(len(self.batches))
        return UpdateReport(applied=True, skipped="", version=len(self.updates), metrics={})


def trajectory(task: str, sample: int, reward: float, first: int) -> Trajectory:
    tokens = np.arange(first, first + 6, dtype=np.int32)
    mask = np.array([False] * 3 + [True] * 3)
    return Trajectory(
        task=task,
        epoch=0,
        sample=sample,
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        full_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=(Turn("prompt", 0, 3), Turn("assistant", 3, 6)),
        outcome=Outcome.RESOLVED if reward else Outcome.UNRESOLVED,
        reward=reward,
    )


def groups_of(count: int) -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup(
            task=f"t{i}",
            epoch=0,
            trajectories=tuple(trajectory(f"t{i}", g, float(g == i % 3), 100 * i + 10 * g) for g in range(3)),
        )
        for i in range(count)
    ]


def run_step(arrival: Sequence[TrajectoryGroup], **options) -> RecordingLearner:
    async def main() -> None:
        async def groups() -> AsyncIterator[TrajectoryGroup]:
            for group in arrival:
                yield group

        with ThreadPoolExecutor(1) as device:
            chosen = StepOptions(
                **({"rows": 2, "row_length": 12, "updates": 1, "group": GroupOptions()} | options)
            )
            trainer = StepTrainer(learner, options=chosen, device=device)  # type: ignore[arg-type]
            await trainer.train(groups())

    learner = RecordingLearner()
    asyncio.run(main())
    return learner


def test_microbatches_are_filled_in_the_order_of_the_groups():
    groups = groups_of(5)
    learner = run_step(groups)
    assert len(learner.batches) == 4
    first = [int(batch.tokens_BT[0, 0]) for batch in learner.batches]
    assert first == sorted(first) and first[0] == int(groups[0].trajectories[0].tokens[0])


def test_several_updates_share_the_examples_and_lose_none():
    groups = groups_of(6)
    learner = run_step(groups, updates=2)
    assert learner.updates == [3, 6]
    seen = Counter(
        int(token) for batch in learner.batches for token in batch.tokens_BT[batch.positions_BT == 0]
    )
    expected = {int(t.tokens[0]) for group in groups for t in group.trajectories}
    assert expected <= set(seen)


def test_what_comes_before_the_first_of_several_updates_is_kept_with_the_batch():
    groups = groups_of(6)
    learner = run_step(groups, updates=2)
    for batch in learner.batches:
        np.testing.assert_array_equal(batch.old_logprobs_BT, batch.sampler_logprobs_BT)


def test_equal_groups_leave_nothing_to_train_on():
    groups = [
        TrajectoryGroup(
            task="t", epoch=0, trajectories=tuple(trajectory("t", g, 1.0, 10 * g) for g in range(3))
        )
    ]
    learner = run_step(groups)
    assert learner.batches == [] and learner.updates == [0]


def test_shuffled_rewards_stay_in_number_and_leave_their_trajectories():
    groups = groups_of(20)
    permuted = shuffled(groups, seed=1)
    before = [t for group in groups for t in group.trajectories]
    after = [t for group in permuted for t in group.trajectories]
    assert [t.tokens[0] for t in before] == [t.tokens[0] for t in after]
    assert Counter(t.reward for t in before) == Counter(t.reward for t in after)
    assert sum(a.reward != b.reward for a, b in zip(before, after, strict=True)) > 10
    assert all((t.outcome is Outcome.RESOLVED) == bool(t.reward) for t in after)
    assert [t.reward for g in shuffled(groups, seed=1) for t in g.trajectories] == [t.reward for t in after]
