"""Generation ahead of training: each rollout once, none too old, for any timing and any kills."""

import asyncio
import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.contracts import TrajectoryGroup
from jaxrl.rollout import ahead
from jaxrl.rollout.ahead import Ahead, Bound, within
from jaxrl.rollout.cursor import TaskCursor
from tests.rollout.ahead_simulation import TASKS, Scenario, Simulation, simulated, trajectory

TICKETS = list(islice(TaskCursor(TASKS, per_step=2), 8))


@st.composite
def scenarios(draw, *, most_versions: int) -> Scenario:
    """Steps add at most `most_versions`, of which the bound foresees 2."""
    delays = st.lists(st.floats(0.01, 3), min_size=1, max_size=12)
    return Scenario(
        bound=Bound(
            prompts_per_step=draw(st.integers(1, 4)),
            updates_per_step=2,
            max_staleness=draw(st.sampled_from([0, 2, 3, 4, 6])),
        ),
        versions=draw(st.lists(st.integers(0, most_versions), min_size=1, max_size=5)),
        delays=draw(delays),
        kills=draw(st.lists(st.floats(0.01, 60), max_size=5)),
        checkpoint_every=draw(st.integers(1, 3)),
    )


@given(scenarios(most_versions=2))
def test_any_schedule_trains_each_rollout_once_and_none_too_old(scenario):
    simulation = Simulation(scenario)
    assert simulation.run() == []
    assert simulation.regenerated == []  # the bound holds by when groups are begun


@given(scenarios(most_versions=7))
def test_the_bound_holds_even_where_a_step_makes_more_versions_than_foreseen(scenario):
    assert Simulation(scenario).run() == []


def random_scenarios(count: int, *, most_versions: int):
    rng = random.Random(0)
    for _ in range(count):
        yield Scenario(
            bound=Bound(
                prompts_per_step=rng.randint(1, 3), updates_per_step=1, max_staleness=rng.randint(1, 3)
            ),
            versions=[rng.randint(0, most_versions) for _ in range(4)],
            delays=[rng.uniform(0.01, 3) for _ in range(11)],
            kills=[rng.uniform(1, 40) for _ in range(2)],
            checkpoint_every=2,
        )


def test_too_old_groups_are_generated_anew_and_told_of():
    anew = 0
    for scenario in random_scenarios(20, most_versions=4):
        simulation = Simulation(scenario)
        assert simulation.run() == []
        for each in simulation.regenerated:
            assert each.oldest < each.version - scenario.bound.max_staleness
        anew += len(simulation.regenerated)
    assert anew > 20


def one_version_more(group, *, version, max_staleness):
    return within(group, version=version, max_staleness=max_staleness + 1)


def test_the_simulation_notices_a_check_that_is_off_by_one(monkeypatch):
    monkeypatch.setattr(ahead, "within", one_version_more)
    found = [each for one in random_scenarios(20, most_versions=4) for each in Simulation(one).run()]
    assert any("in a step of version" in each for each in found)


def test_the_simulation_notices_generation_that_runs_a_step_too_far(monkeypatch):
    steps = Bound.steps.fget
    assert steps is not None
    scenario = next(random_scenarios(1, most_versions=1))
    assert Simulation(scenario).run() == []
    monkeypatch.setattr(Bound, "prompts", property(lambda self: self.prompts_per_step * (2 + steps(self))))
    assert any("in flight beyond" in each for each in Simulation(scenario).run())


class KeepsWhatKillsLeft(Simulation):
    """Goes on with the groups that were finished at the kill, not with those of the checkpoint."""

    def restored(self, state):
        return self.latest or state.groups


def test_the_simulation_notices_groups_of_abandoned_weights(monkeypatch):
    monkeypatch.setattr(ahead, "within", lambda group, **_: True)
    found = [each for one in random_scenarios(20, most_versions=1) for each in KeepsWhatKillsLeft(one).run()]
    assert any("weights that the run does not have" in each for each in found)


def line_of(play, *, max_staleness=0, **more) -> Ahead:
    bound = Bound(prompts_per_step=2, max_staleness=max_staleness)
    return Ahead(iter(TICKETS), play, bound=bound, **more)


def group_of(ticket, version=0):
    return TrajectoryGroup(
        task=ticket.task.instance_id,
        epoch=ticket.epoch,
        trajectories=(trajectory(ticket, 0, [(version, 0)]),),
    )


def test_groups_come_in_task_order_whatever_finishes_first():
    async def play(ticket):
        await asyncio.sleep(10 - ticket.position)
        return group_of(ticket)

    async def scenario():
        async with line_of(play, max_staleness=2) as line:
            line.begin_step(version=0, left=9)
            return [group.task async for group in line.groups(5, version=0)], line.position

    names, position = simulated(scenario())
    assert names == [each.task.instance_id for each in TICKETS[:5]] and position == TICKETS[4].position


def test_nothing_is_generated_for_steps_that_will_not_come():
    played = []

    async def play(ticket):
        played.append(ticket)
        return group_of(ticket)

    async def scenario():
        async with line_of(play, max_staleness=3) as line:
            for left, expected in ((2, 4), (1, 4)):
                line.begin_step(version=0, left=left)
                assert [group async for group in line.groups(2, version=0)]
                assert len(played) == expected

    simulated(scenario())
    assert played == TICKETS[:4]


def test_what_fails_raises_in_its_turn_and_leaves_nothing_running():
    async def play(ticket):
        await asyncio.sleep(ticket.position)
        if ticket.position == 2:
            raise OSError("device lost")
        return group_of(ticket)

    async def scenario():
        came = []
        with pytest.raises(OSError, match="device lost"):
            async with line_of(play, max_staleness=3) as line:
                line.begin_step(version=0, left=9)
                async for group in line.groups(4, version=0):
                    came.append(group.task)
        assert came == [TICKETS[0].task.instance_id]
        assert len(asyncio.all_tasks()) == 1

    simulated(scenario())


def test_who_waits_can_be_cancelled_without_losing_the_group():
    async def play(ticket):
        await asyncio.sleep(5)
        return group_of(ticket)

    async def scenario():
        async with line_of(play) as line:
            line.begin_step(version=0, left=1)
            waiting = asyncio.ensure_future(anext(line.groups(1, version=0)))
            await asyncio.sleep(1)
            waiting.cancel()
            await asyncio.wait([waiting])
            await asyncio.sleep(5)
            return len(line.finished()), line.unfinished

    assert simulated(scenario()) == (2, 0)


@pytest.mark.parametrize("sampled_by", [3, 6])
def test_weights_that_were_not_handed_over_are_an_error_and_no_endless_repetition(sampled_by):
    told = []

    async def play(ticket):
        return group_of(ticket, sampled_by)

    async def scenario():
        async with line_of(play, max_staleness=1, on_regenerated=told.append) as line:
            line.begin_step(version=5, left=9)
            await anext(line.groups(1, version=5))

    with pytest.raises(RuntimeError, match="expected tokens sampled by version 5, got versions .*hand the"):
        simulated(scenario())
    assert [(each.oldest, each.newest, each.version) for each in told] == [(sampled_by, sampled_by, 5)]


@pytest.mark.parametrize(("sampled_by", "kept"), [(2, False), (3, True), (5, True), (6, False)])
def test_saved_groups_count_if_they_fit_the_restored_version(sampled_by, kept):
    played, told = [], []

    async def play(ticket):
        played.append(ticket)
        return group_of(ticket, 5)

    async def scenario():
        saved = [group_of(TICKETS[0], sampled_by)]
        async with line_of(play, max_staleness=2, saved=saved, on_regenerated=told.append) as line:
            line.begin_step(version=5, left=1)
            return [group.trajectories[0].versions[-1] async for group in line.groups(2, version=5)]

    assert simulated(scenario()) == [sampled_by if kept else 5, 5]
    assert played.count(TICKETS[0]) == (not kept) == len(told)


def test_a_group_without_sampled_tokens_is_never_too_old():
    empty = TrajectoryGroup(task="t", epoch=0, trajectories=(trajectory(TICKETS[0], 0, []),))
    assert within(empty, version=9, max_staleness=0)
