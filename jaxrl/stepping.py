"""One training step: groups in, one or more optimizer updates out. Only entry points import this.

Groups are trained in the order in which they come, task order, so equal groups give equal weights. With one
update a step, microbatches go to the device while slower groups still generate.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np

from jaxrl.contracts import OUTCOME_RULES, Trajectory, TrajectoryGroup
from jaxrl.rl.examples import GroupExamples, GroupOptions, group_examples
from jaxrl.rl.learner import Learner, UpdateReport
from jaxrl.rl.packing import Example, Microbatch, Packer, pack


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Shapes and counts of a step; `shuffle_seed` permutes rewards over the step (a control)."""

    rows: int
    row_length: int
    updates: int
    group: GroupOptions
    shuffle_seed: int | None = None


@dataclass
class StepResult:
    """What a step trained on, and what came of it."""

    groups: list[TrajectoryGroup]
    examples: list[GroupExamples] = field(default_factory=list)
    reports: list[UpdateReport] = field(default_factory=list)
    generation_seconds: float = 0.0
    training_seconds: float = 0.0  # on the device, overlapped with generation or not
    logprob_errors: list[np.ndarray] = field(default_factory=list)  # of trained tokens, sampling weights
    packed_tokens: int = 0
    packed_positions: int = 0


class StepTrainer:
    """Feeds a learner with the groups of one step after the other."""

    def __init__(self, learner: Learner, *, options: StepOptions, device: Executor) -> None:
        self._learner, self._options, self._device = learner, options, device

    async def train(self, groups: AsyncIterator[TrajectoryGroup]) -> StepResult:
        """Trains on all of `groups`."""
        started = time.perf_counter()
        result = StepResult(groups=[])
        streamed = self._options.updates == 1 and self._options.shuffle_seed is None
        packer = Packer(rows=self._options.rows, row_length=self._options.row_length)
        async for group in groups:
            result.groups.append(group)
            if streamed:
                await self._accumulate(_fed(packer, self._examples(group, result)), result)
        result.generation_seconds = time.perf_counter() - started
        if streamed:
            await self._accumulate(packer.flush(), result)
            await self._apply(result)
        else:
            await self._train_collected(result)
        return result

    async def _train_collected(self, result: StepResult) -> None:
        """All groups at hand: rewards may be permuted, and examples split over several updates."""
        if self._options.shuffle_seed is not None:
            result.groups = shuffled(result.groups, seed=self._options.shuffle_seed)
        examples = [each for group in result.groups for each in self._examples(group, result)]
        parts = np.array_split(np.arange(len(examples)), self._options.updates)
        packed = [self._packed([examples[i] for i in part]) for part in parts]
        batches = [[await self._timed(result, self._scored, batch) for batch in part] for part in packed]
        result.logprob_errors = [_logprob_errors(batch) for part in batches for batch in part]
        for part in batches:
            await self._accumulate(part, result)
            await self._apply(result)

    def _packed(self, examples: Sequence[Example]) -> list[Microbatch]:
        return [*pack(examples, rows=self._options.rows, row_length=self._options.row_length)]

    def _scored(self, batch: Microbatch) -> Microbatch:
        """With the trainer's log-probs from before the first update: later ones change the weights."""
        return batch._replace(old_logprobs_BT=self._learner.logprobs(batch))

    def _examples(self, group: TrajectoryGroup, result: StepResult) -> list[Example]:
        made = group_examples(group, options=self._options.group)
        result.examples.append(made)
        return made.examples

    async def _accumulate(self, batches: Iterable[Microbatch], result: StepResult) -> None:
        for batch in batches:
            result.packed_tokens += int((batch.segment_ids_BT > 0).sum())
            result.packed_positions += batch.segment_ids_BT.size
            await self._timed(result, self._learner.accumulate, batch)

    async def _apply(self, result: StepResult) -> None:
        result.reports.append(await self._timed(result, self._learner.apply))

    async def _timed(self, result: StepResult, work, *arguments):
        def timed():
            started = time.perf_counter()
            value = work(*arguments)
            return value, time.perf_counter() - started

        value, seconds = await asyncio.get_running_loop().run_in_executor(self._device, timed)
        result.training_seconds += seconds
        return value


def _logprob_errors(batch: Microbatch) -> np.ndarray:
    """|trainer - sampler| of every trained token."""
    return np.abs(batch.old_logprobs_BT - batch.sampler_logprobs_BT)[batch.weights_BT > 0]


def shuffled(groups: Sequence[TrajectoryGroup], *, seed: int) -> list[TrajectoryGroup]:
    """The same trajectories with their outcomes and rewards permuted among the trained ones."""
    trained = [t for group in groups for t in group.trajectories if OUTCOME_RULES[t.outcome].trained]
    order = np.random.default_rng(seed).permutation(len(trained))
    given = {id(t): trained[order[i]] for i, t in enumerate(trained)}

    def swap(trajectory: Trajectory) -> Trajectory:
        other = given.get(id(trajectory), trajectory)
        return replace(trajectory, outcome=other.outcome, reward=other.reward)

    return [replace(group, trajectories=tuple(map(swap, group.trajectories))) for group in groups]


def _fed(packer: Packer, examples: Sequence[Example]) -> Iterator[Microbatch]:
    for example in examples:
        yield from packer.add(example)
