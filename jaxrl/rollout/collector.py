"""Groups of episodes: concurrent within bounds, retried where a fault was not the policy's."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from jaxrl.contracts import Outcome, Sampling, Trajectory, TrajectoryGroup
from jaxrl.rollout.agent import Attempt, World, run_episode
from sandbox.tasks.schema import Hidden, TaskSpec


@dataclass(frozen=True, kw_only=True)
class Retry:
    """A rollout that is played again, for the run feed. `attempt` counts from 1."""

    task: str
    epoch: int
    sample: int
    attempt: int
    outcome: Outcome
    detail: str


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """`episodes` bounds the rollouts in flight, all groups together."""

    seed: int
    group_size: int
    sampling: Sampling
    episodes: int
    retries: int = 2  # of one rollout
    retry_delay: float = 0.2  # seconds, doubled each time

    def __post_init__(self) -> None:
        if min(self.group_size, self.episodes) < 1 or self.retries < 0:
            raise ValueError(
                f"expected group_size and episodes of 1 or more and retries of 0 or more, got {self}"
            )


class Collector:
    """Plays G rollouts per task. One per event loop; groups may be collected concurrently."""

    def __init__(
        self,
        world: World,
        *,
        options: CollectorOptions,
        on_retry: Callable[[Retry], None] = lambda retry: None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """`slots` bounds the rollouts in flight in place of `options.episodes`, with other collectors."""
        self._world = world
        self._options = options
        self._on_retry = on_retry
        self._slots = slots or asyncio.Semaphore(options.episodes)

    async def collect_group(self, task: TaskSpec, hidden: Hidden, *, epoch: int) -> TrajectoryGroup:
        """The group of one task; position i is sample i. An engine's fault raises and ends the group."""
        async with asyncio.TaskGroup() as group:
            samples = [
                group.create_task(self._sample(task, hidden, self._attempt(epoch, sample)))
                for sample in range(self._options.group_size)
            ]
        return TrajectoryGroup(
            task=task.instance_id, epoch=epoch, trajectories=tuple(each.result() for each in samples)
        )

    async def collect(
        self, tasks: Iterable[TaskSpec], hidden: Callable[[str], Hidden], *, epoch: int
    ) -> AsyncGenerator[TrajectoryGroup, None]:
        """Yields groups as they complete; `tasks` is read only as far as slots are free.

        Leave it early through `contextlib.aclosing`, which cancels what is in flight.
        """
        waiting = iter(tasks)
        ahead = -(-self._options.episodes // self._options.group_size) + 1
        running: set[asyncio.Task[TrajectoryGroup]] = set()
        try:
            while True:
                running |= self._start(islice(waiting, ahead - len(running)), hidden, epoch)
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for group in done:
                    yield group.result()
        finally:
            await _cancel(running)

    def _start(
        self, tasks: Iterator[TaskSpec], hidden: Callable[[str], Hidden], epoch: int
    ) -> set[asyncio.Task[TrajectoryGroup]]:
        return {
            asyncio.create_task(self.collect_group(task, hidden(task.instance_id), epoch=epoch))
            for task in tasks
        }

    def _attempt(self, epoch: int, sample: int) -> Attempt:
        options = self._options
        return Attempt(seed=options.seed, epoch=epoch, sample=sample, sampling=options.sampling)

    async def _sample(self, task: TaskSpec, hidden: Hidden, attempt: Attempt) -> Trajectory:
        for retry in range(self._options.retries + 1):
            async with self._slots:
                made = await run_episode(task, hidden, attempt=attempt, world=self._world)
            if not self._world.rules[made.outcome].retried or retry == self._options.retries:
                return made
            self._report(made, retry + 1)
            await asyncio.sleep(self._options.retry_delay * 2**retry)
        raise AssertionError("unreachable: the last attempt returns")

    def _report(self, made: Trajectory, attempt: int) -> None:
        self._on_retry(
            Retry(
                task=made.task,
                epoch=made.epoch,
                sample=made.sample,
                attempt=attempt,
                outcome=made.outcome,
                detail=made.detail,
            )
        )


async def _cancel(tasks: Iterable[asyncio.Task[TrajectoryGroup]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
