"""Dynamic sampling: which tasks are drawn, in which order, and when it ends."""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.contracts import TrajectoryGroup
from jaxrl.rollout.ahead import Ahead, Bound
from jaxrl.rollout.cursor import TaskCursor, Ticket
from jaxrl.rollout.waves import waves


class Tasks:
    """Draws numbered groups; those of `mixed` have rewards to compare."""

    def __init__(self, mixed: list[bool]) -> None:
        self.mixed, self.drawn, self.waves, self.closed = mixed, 0, [], 0

    async def play(self, count: int) -> AsyncGenerator[TrajectoryGroup, None]:
        self.waves.append(count)
        first, self.drawn = self.drawn, self.drawn + count
        try:
            for number in range(first, first + count):
                await asyncio.sleep(0)
                yield TrajectoryGroup(task=str(number), epoch=0, trajectories=())
        finally:
            self.closed += 1

    def is_mixed(self, group: TrajectoryGroup) -> bool:
        return self.mixed[int(group.task) % len(self.mixed)]

    def run(self, *, wanted: int, rounds: int) -> list[int]:
        async def main() -> list[int]:
            drawn = waves(self.play, wanted=wanted, rounds=rounds, mixed=self.is_mixed)
            return [int(group.task) async for group in drawn]

        return asyncio.run(main())


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 6))
def test_enough_mixed_groups_or_all_rounds_used_and_none_left_over(mixed, wanted, rounds):
    tasks = Tasks(mixed)
    seen = tasks.run(wanted=wanted, rounds=rounds)
    assert seen == list(range(tasks.drawn))
    good = sum(mixed[i % len(mixed)] for i in seen)
    assert good <= wanted and (good == wanted or len(tasks.waves) == rounds + 1)
    before = [
        sum(mixed[i % len(mixed)] for i in range(sum(tasks.waves[:n]))) for n in range(len(tasks.waves))
    ]
    assert tasks.waves == [wanted - each for each in before]
    assert tasks.closed == len(tasks.waves)


@pytest.mark.parametrize(
    ("mixed", "rounds", "drawn"),
    [
        ([True], 3, [4]),
        ([False], 2, [4, 4, 4]),
        ([True, False], 3, [4, 2, 1]),
        ([False, True, True, True], 0, [4]),
    ],
)
def test_waves_draw_what_is_missing(mixed, rounds, drawn):
    tasks = Tasks(mixed)
    tasks.run(wanted=4, rounds=rounds)
    assert tasks.waves == drawn


def test_a_wave_that_is_left_early_is_closed():
    tasks = Tasks([False])

    async def main() -> None:
        drawn = waves(tasks.play, wanted=3, rounds=5, mixed=tasks.is_mixed)
        await anext(drawn)
        await drawn.aclose()

    asyncio.run(main())
    assert (tasks.waves, tasks.closed) == ([3], 1)


class Task:
    """What a cursor and the line of groups need of a task."""

    def __init__(self, number: int) -> None:
        self.instance_id = str(number)


def two_steps(mixed: list[bool], latencies: list[int], *, max_staleness: int) -> tuple[list[int], int]:
    """(tasks of two steps of four, cursor) if group i takes `latencies[i]` turns of the event loop."""

    async def play(ticket: Ticket) -> TrajectoryGroup:
        for _ in range(latencies[int(ticket.task.instance_id) % len(latencies)]):
            await asyncio.sleep(0)
        return TrajectoryGroup(task=ticket.task.instance_id, epoch=ticket.epoch, trajectories=())

    async def main() -> tuple[list[int], int]:
        tasks: Any = [Task(number) for number in range(40)]
        bound = Bound(prompts_per_step=4, max_staleness=max_staleness)
        seen = []
        async with Ahead(TaskCursor(tasks, per_step=4), play, bound=bound) as line:
            for version, left in ((0, 2), (1, 1)):
                line.begin_step(version=version, left=left)
                drawn = waves(
                    partial(line.groups, version=version),
                    wanted=4,
                    rounds=2,
                    mixed=lambda group: mixed[int(group.task) % len(mixed)],
                )
                seen += [int(group.task) async for group in drawn]
            return seen, line.position

    return asyncio.run(main())


@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(0, 1),
)
def test_what_is_trained_does_not_depend_on_what_finishes_first(mixed, latencies, max_staleness):
    seen, position = two_steps(mixed, latencies, max_staleness=max_staleness)
    assert (seen, position) == two_steps(mixed, [0], max_staleness=0)
    assert seen == list(range(position))
