"""Each distinct token is prefilled once: groups, common beginnings, turns, forks."""

import asyncio

import numpy as np

from jaxrl.contracts import Sampling
from jaxrl.engine.context import Place
from jaxrl.engine.prefixes import Prefixes
from tests.engine.conftest import ask, nothing_leaked, run


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 64, count).tolist()


def prefilled(engine, work) -> int:
    """Tokens that `work` has prefilled, in an engine that keeps nothing from before."""

    async def main(engine):
        before = engine.stats.prefilled_tokens
        await work(engine)
        return engine.stats.prefilled_tokens - before

    return run(engine, main)


def test_a_group_that_comes_at_once_pays_its_prompt_once(engine):
    async def work(engine):
        sessions = [engine.open_session() for _ in range(9)]
        await asyncio.gather(*(ask(session, ids(0, 41), sample=i) for i, session in enumerate(sessions)))

    assert prefilled(engine, work) == 40


def test_late_members_of_a_group_find_its_prompt(engine):
    async def work(engine):
        for i in range(4):
            session = engine.open_session()
            await ask(session, ids(0, 41), sample=i)
            session.close()

    assert prefilled(engine, work) == 40


def test_prompts_that_part_behind_a_common_text_share_its_whole_chunks(engine):
    common = ids(0, 40)  # two and a half chunks of 16

    async def work(engine):
        sessions = [engine.open_session() for _ in range(5)]
        await asyncio.gather(*(ask(s, common + ids(10 + i, 9)) for i, s in enumerate(sessions)))

    assert prefilled(engine, work) == 32 + 5 * (48 - 32)


def test_groups_with_a_common_text_prefill_the_text_once_and_each_prompt_once(engine):
    common = ids(0, 40)

    async def work(engine):
        sessions = [(engine.open_session(), group, i) for group in range(4) for i in range(4)]
        await asyncio.gather(
            *(ask(s, common + ids(10 + g, 9), task=f"g{g}", sample=i) for s, g, i in sessions)
        )

    assert prefilled(engine, work) == 32 + 4 * (48 - 32)


def test_common_beginnings_are_learned_from_prompts_that_come_one_by_one(engine):
    common = ids(0, 40)

    async def work(engine):
        for i in range(5):
            session = engine.open_session()
            await ask(session, common + ids(10 + i, 9))
            session.close()

    # The first two compute it; the second keeps the place where they part.
    assert prefilled(engine, work) == 2 * 48 + 3 * 16


def test_turns_prefill_only_what_is_new(engine):
    async def work(engine):
        session = engine.open_session()
        for turn in range(4):
            await ask(session, ids(turn, 10), turn=turn, max_tokens=5)

    # 9 of the first prompt; later the last sampled token and all but the last of each prompt.
    assert prefilled(engine, work) == 9 + 3 * 10


def test_forks_share_all_and_go_their_own_ways(engine):
    async def work(engine):
        trunk = engine.open_session()
        await ask(trunk, ids(0, 30), max_tokens=6)
        forks = [trunk.fork() for _ in range(3)]
        assert all(fork.tokens == trunk.tokens for fork in forks)
        before = engine.stats.prefilled_tokens
        branches = await asyncio.gather(
            *(ask(s, [7, 8], sample=i, max_tokens=12) for i, s in enumerate([trunk, *forks]))
        )
        assert engine.stats.prefilled_tokens - before == 4 * 2
        alone = []
        for i in range(4):
            session = engine.open_session()
            await ask(session, ids(0, 30), max_tokens=6)
            alone.append(await ask(session, [7, 8], sample=i, max_tokens=12))
            session.close()
        for session in [trunk, *forks]:
            session.close()
        return branches, alone

    branches, alone = run(engine, work)
    assert [b.tokens for b in branches] == [a.tokens for a in alone]
    assert [b.logprobs for b in branches] == [a.logprobs for a in alone]
    assert len({b.tokens for b in branches}) == 4


def test_a_fork_outlives_its_trunk(engine):
    async def work(engine):
        trunk = engine.open_session()
        await ask(trunk, ids(0, 20))
        fork = trunk.fork()
        trunk.close()
        out = await ask(fork, [9], max_tokens=5)
        fork.close()
        return out, nothing_leaked(engine)

    out, clean = run(engine, work)
    assert len(out.tokens) == 5 and clean


def test_greedy_members_of_a_group_agree_to_the_bit(engine):
    async def work(engine):
        sessions = [engine.open_session() for _ in range(5)]
        greedy = Sampling(temperature=0)
        return await asyncio.gather(
            *(ask(s, ids(0, 33), sample=i, sampling=greedy, max_tokens=20) for i, s in enumerate(sessions))
        )

    assert len({(out.tokens, out.full_logprobs) for out in run(engine, work)}) == 1


def test_members_wait_again_when_the_one_that_prefills_goes_away(engine):
    async def work(engine):
        sessions = [engine.open_session() for _ in range(4)]
        turns = [asyncio.create_task(ask(s, ids(0, 90), sample=i)) for i, s in enumerate(sessions)]
        while not engine._scheduler.active:
            await asyncio.sleep(0)
        sessions[0].close()
        ends = [out.finish for out in await asyncio.gather(*turns)]
        for session in sessions:
            session.close()
        return ends, nothing_leaked(engine)

    assert run(engine, work) == (["cancelled", "length", "length", "length"], True)


def test_idle_sessions_give_up_their_slots_and_go_on_unharmed(engine):
    async def work(engine):
        sessions = [engine.open_session() for _ in range(16)]
        first = [await ask(s, ids(i, 20), sample=i) for i, s in enumerate(sessions)]
        places = {session.place for session in sessions}
        second = [await ask(s, [9], sample=i, turn=1, max_tokens=6) for i, s in enumerate(sessions)]
        for session in sessions:
            session.close()
        session = engine.open_session()
        assert await ask(session, ids(0, 20), sample=0) == first[0]
        alone = await ask(session, [9], sample=0, turn=1, max_tokens=6)
        session.close()
        return places, second[0], alone, nothing_leaked(engine)

    places, crowded, alone, clean = run(engine, work)
    assert places == {Place.LIVE, Place.PARKED, Place.HOST}
    assert crowded.tokens == alone.tokens and crowded.logprobs == alone.logprobs
    assert clean


def test_a_prefix_is_found_by_its_tokens_and_not_by_its_length():
    prefixes = Prefixes(4)
    prefixes.announce("a", [1, 2, 3, 4, 5, 6], start=0)
    assert prefixes.match([1, 2, 3, 4, 5, 7]).builder == "a"  # the common chunk  # pyright: ignore
    assert prefixes.match([1, 2, 3, 5, 5, 6]) is None
    assert prefixes.match([2, 1, 3, 4]) is None
    found = prefixes.match([1, 2, 3, 4, 5, 6])
    assert found is not None and found.length == 6 and not found.ready
    prefixes.abandon("a")
    assert found.gone and prefixes.match([1, 2, 3, 4, 5, 6]) is None
