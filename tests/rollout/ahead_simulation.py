"""A trainer, an engine and kills in virtual time: what generation ahead of training has to survive.

The engine is the hardest case: weights change in the middle of turns, and every token takes time. A killed
attempt leaves nothing but its last complete checkpoint. What a run may never do comes back as a list of
violations.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

import numpy as np

from jaxrl.contracts import Outcome, Trajectory, TrajectoryGroup, Turn
from jaxrl.rollout.ahead import Ahead, Bound, Regenerated
from jaxrl.rollout.cursor import TaskCursor, Ticket
from jaxrl.rollout.group_codec import decode_groups, encode_groups
from sandbox.tasks.schema import TaskSpec

TASKS = tuple(TaskSpec(instance_id=f"t{i}", problem_statement="", files={}) for i in range(11))
SAMPLES = 2
TOKENS = 3
STEPS = 6


class VirtualTime(asyncio.SelectorEventLoop):
    """The clock jumps to the next timer when nothing else is left to run."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def simulated(work):
    """Runs a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(work)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`versions` are what the steps add to the version, in turn; `delays` and `kills` are seconds."""

    bound: Bound
    versions: Sequence[int]
    delays: Sequence[float]
    kills: Sequence[float] = ()
    checkpoint_every: int = 1


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A group that a step trained on, and the version at that step's start."""

    group: TrajectoryGroup
    version: int


@dataclass(frozen=True, kw_only=True)
class State:
    """What a checkpoint holds, and what surviving steps did. `weights` names the weights of each version."""

    step: int = 0
    version: int = 0
    position: int = 0
    groups: bytes = field(default_factory=lambda: encode_groups([]))
    trained: tuple[Trained, ...] = ()
    weights: tuple[tuple[int, int], ...] = ((0, 0),)


class Simulation:
    """Plays a scenario; afterwards `saved` is the run's last checkpoint."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.saved = scenario, State()
        self.regenerated: list[Regenerated] = []
        self.violations: list[str] = []
        self.latest = b""  # groups finished after the last step, saved or not
        self._delays: Iterator[float] = cycle(scenario.delays)
        self._names = iter(range(1, 1_000_000))
        self._engine = (0, 0)  # version and name of the weights in use

    def run(self) -> list[str]:
        """The violations of the whole run, kills and all."""
        simulated(self._run())
        self._check()
        return self.violations

    def restored(self, state: State) -> bytes:
        """The finished groups with which an attempt goes on."""
        return state.groups

    async def _run(self) -> None:
        for after in self.scenario.kills:
            attempt = asyncio.ensure_future(self._attempt(self.saved))
            await asyncio.wait([attempt], timeout=after)
            attempt.cancel()
            await asyncio.wait([attempt])
            if not attempt.cancelled():
                attempt.result()
        await self._attempt(self.saved)

    async def _attempt(self, state: State) -> None:
        self._engine = state.weights[-1]
        bound = self.scenario.bound
        cursor = TaskCursor(TASKS, per_step=bound.prompts_per_step, position=state.position)
        async with Ahead(
            cursor,
            self._play,
            bound=bound,
            position=state.position,
            saved=decode_groups(self.restored(state)),
            on_regenerated=self.regenerated.append,
        ) as line:
            while state.step < STEPS:
                state = await self._step(line, state)
                self.latest = encode_groups(line.finished())
                if state.step % self.scenario.checkpoint_every == 0 or state.step == STEPS:
                    written = replace(state, position=line.position, groups=encode_groups(line.finished()))
                    await self._pass()  # a kill meanwhile leaves the checkpoint before
                    self.saved = written

    async def _step(self, line: Ahead, state: State) -> State:
        line.begin_step(version=state.version, left=STEPS - state.step)
        prompts, trained = self.scenario.bound.prompts_per_step, []
        async for group in line.groups(prompts, version=state.version):
            trained.append(Trained(group=group, version=state.version))
            self._check_line(line, still=prompts - len(trained))
            self._check_weights(group, state)
            await self._pass()
        added = next(islice(cycle(self.scenario.versions), state.step, None))
        version, weights = state.version + added, state.weights
        if added:
            weights += ((version, next(self._names)),)
        await self._pass()  # the engine still has the old weights
        self._engine = weights[-1]
        return replace(
            state,
            step=state.step + 1,
            version=version,
            trained=state.trained + tuple(trained),
            weights=weights,
        )

    async def _play(self, ticket: Ticket) -> TrajectoryGroup:
        samples = [self._sample(ticket, sample) for sample in range(SAMPLES)]
        return TrajectoryGroup(
            task=ticket.task.instance_id, epoch=ticket.epoch, trajectories=await asyncio.gather(*samples)
        )

    async def _sample(self, ticket: Ticket, sample: int) -> Trajectory:
        made_by = []
        for _ in range(TOKENS):
            await self._pass()
            made_by.append(self._engine)
        return trajectory(ticket, sample, made_by)

    async def _pass(self) -> None:
        await asyncio.sleep(next(self._delays))

    def _check_line(self, line: Ahead, *, still: int) -> None:
        beyond = line.unfinished + len(line.finished()) - still
        bound = self.scenario.bound
        if beyond > bound.prompts_per_step * bound.steps:
            self.violations.append(f"{beyond} prompts are in flight beyond the step")

    def _check_weights(self, group: TrajectoryGroup, state: State) -> None:
        """A token of weights that only an abandoned attempt had must not be trained."""
        used = {tuple(pair) for each in group.trajectories for pair in json.loads(each.detail)}
        if not used <= set(state.weights):
            self.violations.append(f"{group.task}: sampled by weights that the run does not have")

    def _check(self) -> None:
        expected = islice(
            TaskCursor(TASKS, per_step=self.scenario.bound.prompts_per_step),
            STEPS * self.scenario.bound.prompts_per_step,
        )
        wanted = [(each.task.instance_id, each.epoch, g) for each in expected for g in range(SAMPLES)]
        made = [(t.task, t.epoch, t.sample) for each in self.saved.trained for t in each.group.trajectories]
        if made != wanted:
            self.violations.append(f"expected each rollout once and in order, got {made}")
        for each in self.saved.trained:
            oldest = each.version - self.scenario.bound.max_staleness
            for t in each.group.trajectories:
                if not all(oldest <= version <= each.version for version in t.versions[t.loss_mask]):
                    self.violations.append(f"{t.task}: {t.versions} in a step of version {each.version}")


def trajectory(ticket: Ticket, sample: int, made_by: Sequence[tuple[int, int]]) -> Trajectory:
    """One prompt token and a sampled one for each (version, name of weights)."""
    count = len(made_by)
    zeros_T = np.zeros(count + 1, np.float32)
    return Trajectory(
        task=ticket.task.instance_id,
        epoch=ticket.epoch,
        sample=sample,
        tokens=np.arange(count + 1, dtype=np.int32),
        loss_mask=np.arange(count + 1) > 0,
        logprobs=zeros_T,
        full_logprobs=zeros_T,
        versions=np.array([-1, *(version for version, _ in made_by)], np.int32),
        turns=(Turn("prompt", 0, 1), Turn("assistant", 1, count + 1)),
        outcome=Outcome.RESOLVED,
        reward=1.0,
        detail=json.dumps(made_by),
    )
