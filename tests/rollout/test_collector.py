"""Groups: positional, bounded, retried for infrastructure only, and cancelled without a trace."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from jaxrl.contracts import Outcome, Sampling
from jaxrl.rollout.collector import Collector, CollectorOptions
from sandbox.base import SandboxError
from sandbox.tasks.generated.generate import generate
from tests.rollout.rollout_fakes import FINISH, INSTANCE, SOLVE, FakeGenerator, FakeProvider, view, world

TASKS = generate("train", 12, 1)


def options(**fields) -> CollectorOptions:
    base = CollectorOptions(seed=1, group_size=4, sampling=Sampling(), episodes=8, retry_delay=0.001)
    return replace(base, **fields)


def group_of(around, **fields):
    retries = []
    collector = Collector(around, options=options(**fields), on_retry=retries.append)
    group = asyncio.run(collector.collect_group(INSTANCE.spec, INSTANCE.hidden, epoch=3))
    return group, retries


def test_position_is_sample_whatever_finishes_first():
    class Reversed(FakeGenerator):
        async def wait(self, key):
            await asyncio.sleep(0.01 * (4 - key.sample))

    group, retries = group_of(world(Reversed(SOLVE, (FINISH,), SOLVE, (view(), FINISH))))
    assert [each.sample for each in group.trajectories] == [0, 1, 2, 3] and not retries
    assert [each.reward for each in group.trajectories] == [1, 0, 1, 0]
    assert group.task == INSTANCE.spec.instance_id and group.epoch == 3


def test_faults_are_retried_and_reported():
    provider = FakeProvider("create", "diff", "read")
    around = world(FakeGenerator(SOLVE), provider=provider)
    group, retries = group_of(around)
    assert [each.outcome for each in group.trajectories] == [Outcome.RESOLVED] * 4
    assert len(retries) == 3 and {each.outcome for each in retries} == {Outcome.INFRA_ERROR}
    assert {each.detail for each in retries} == {"create failed", "diff failed", "read failed"}
    assert all(each.attempt == 1 for each in retries) and provider.alive == 0


def test_retries_are_bounded():
    around = world(FakeGenerator(SOLVE), verdicts=[SandboxError("down")] * 9)
    group, retries = group_of(around, group_size=1)
    assert group.trajectories[0].outcome is Outcome.GRADER_ERROR
    assert [each.attempt for each in retries] == [1, 2] and len(around.generator.sessions) == 3


def test_failures_of_the_policy_are_not_retried():
    group, retries = group_of(world(FakeGenerator((FINISH,))))
    assert not retries and {each.outcome for each in group.trajectories} == {Outcome.UNRESOLVED}


def test_episodes_are_bounded_and_every_group_comes_once():
    generator = FakeGenerator(SOLVE, delay=0.001)
    around = world(generator)

    async def scenario():
        collector = Collector(around, options=options(episodes=6))
        return [group async for group in collector.collect(TASKS.specs, TASKS.hidden, epoch=0)]

    groups = asyncio.run(scenario())
    assert sorted(group.task for group in groups) == sorted(spec.instance_id for spec in TASKS.specs)
    assert generator.peak <= 6 and len(generator.sessions) == 48 and around.sandboxes.alive == 0


def test_groups_come_as_they_complete():
    slow = TASKS.specs[0].instance_id

    class FirstIsSlow(FakeGenerator):
        async def wait(self, key):
            if key.task == slow:
                await others_came.wait()

    others_came = asyncio.Event()

    async def scenario():
        collector, came = Collector(world(FirstIsSlow((FINISH,))), options=options(episodes=16)), []
        async with asyncio.timeout(60):
            async for group in collector.collect(TASKS.specs, TASKS.hidden, epoch=0):
                came.append(group.task)
                if len(came) == len(TASKS.specs) - 1:
                    others_came.set()
        return came

    came = asyncio.run(scenario())
    assert came[-1] == slow
    assert sorted(came) == sorted(task.instance_id for task in TASKS.specs)


def test_tasks_are_read_only_as_far_as_there_is_room():
    read = []

    def cursor():
        for spec in TASKS.specs:
            read.append(spec)
            yield spec

    async def scenario():
        collector = Collector(world(FakeGenerator((FINISH,), delay=0.001)), options=options(episodes=4))
        async with aclosing(collector.collect(cursor(), TASKS.hidden, epoch=0)) as groups:
            await anext(groups)
            return len(read)

    assert asyncio.run(scenario()) <= 2


def test_leaving_early_cancels_everything():
    async def scenario():
        around = world(FakeGenerator(SOLVE, delay=0.005))
        collector = Collector(around, options=options())
        async with aclosing(collector.collect(TASKS.specs, TASKS.hidden, epoch=0)) as groups:
            await anext(groups)
        assert around.sandboxes.alive == 0 and around.generator.active == 0
        assert all(session.closed for session in around.generator.sessions)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_cancelling_the_consumer_leaves_nothing():
    async def scenario():
        around = world(FakeGenerator(SOLVE, delay=0.02))
        collector = Collector(around, options=options())

        async def consume():
            async with aclosing(collector.collect(TASKS.specs, TASKS.hidden, epoch=0)) as groups:
                async for _ in groups:
                    pass

        consumer = asyncio.create_task(consume())
        while not around.sandboxes.made:
            await asyncio.sleep(0.005)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert around.sandboxes.alive == 0 and all(session.closed for session in around.generator.sessions)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_an_engine_fault_raises_and_leaves_nothing():
    around = world(FakeGenerator(SOLVE, (view(), RuntimeError("device lost"))))
    with pytest.raises(ExceptionGroup) as raised:
        group_of(around)
    assert raised.group_contains(RuntimeError, match="device lost")
    assert around.sandboxes.alive == 0 and all(session.closed for session in around.generator.sessions)


def test_options_are_checked():
    with pytest.raises(ValueError, match="group_size"):
        options(group_size=0)
