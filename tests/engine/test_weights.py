"""Swapping weights: which version made a token, and what of the old ones is used again."""

import asyncio
import gc
import weakref

import jax
import numpy as np
import pytest
from flax import nnx

from jaxrl.engine.engine import Engine, EngineError
from tests.engine.conftest import OPTIONS, ask, run
from tests.engine.oracle import forward_logits, log_softmax

PROMPT = list(range(6, 40))


@pytest.fixture
def other(engine):
    """Other weights, and the engine's own put back at the end."""
    own = engine.params
    noise = np.random.default_rng(0)
    yield jax.tree.map(lambda leaf: leaf + 0.05 * noise.standard_normal(leaf.shape).astype(leaf.dtype), own)
    engine._use(own, engine.version, keep_prefixes=False)


async def begun(engine, count: int):
    """Turns of which at least one has sampled a token, and none is over."""
    before = engine.stats.sampled_tokens
    sessions = [engine.open_session() for _ in range(count)]
    turns = [
        asyncio.create_task(ask(s, [*PROMPT, 6 + i], sample=i, max_tokens=50)) for i, s in enumerate(sessions)
    ]
    while engine.stats.sampled_tokens == before:
        await asyncio.sleep(0)
    return sessions, turns


def test_a_drain_lets_no_token_carry_a_stale_version(engine, other):
    async def work(engine):
        old = engine.version
        sessions, turns = await begun(engine, 12)  # six slots: some have not begun
        await engine.swap_weights(other, version=old + 1)
        outs = await asyncio.gather(*turns)
        for session in sessions:
            session.close()
        return old, [set(out.versions) for out in outs]

    old, versions = run(engine, work)
    assert all(version in ({old}, {old + 1}) for version in versions)
    assert {old} in versions and {old + 1} in versions


def test_in_flight_every_token_carries_the_version_that_made_it(engine, model, other):
    async def work(engine):
        old = engine.version
        sessions, turns = await begun(engine, 4)
        await engine.swap_weights(other, version=old + 1, policy="in_flight")
        outs = await asyncio.gather(*turns)
        oldest = {session.oldest_version for session in sessions}
        tokens = [session.tokens for session in sessions]
        for session in sessions:
            session.close()
        return old, outs, oldest, tokens

    old, outs, oldest, tokens = run(engine, work)
    for out in outs:
        assert list(out.versions) == sorted(out.versions) and set(out.versions) == {old, old + 1}
    assert oldest == {old}  # the cache of the running ones was kept
    # Tokens of the old version are exactly those of the old weights.
    logits_TV = forward_logits(model, tokens[0], context=96)
    for i, (token, full, version) in enumerate(
        zip(outs[0].tokens, outs[0].full_logprobs, outs[0].versions, strict=True)
    ):
        expected = log_softmax(logits_TV[len(PROMPT) + i])[token]
        assert (abs(expected - full) < 5e-5) == (version == old)


def test_recompute_gives_every_later_token_the_new_weights_alone(engine, model, other):
    async def work(engine):
        old = engine.version
        sessions, turns = await begun(engine, 4)
        await engine.swap_weights(other, version=old + 1, policy="in_flight", cached="recompute")
        outs = await asyncio.gather(*turns)
        oldest = {session.oldest_version for session in sessions}
        tokens = [session.tokens for session in sessions]
        for session in sessions:
            session.close()
        return old, outs, oldest, tokens

    old, outs, oldest, tokens = run(engine, work)
    assert oldest == {old + 1}
    graph = nnx.graphdef(model)
    logits_TV = forward_logits(nnx.merge(graph, other), tokens[0], context=96)
    for i, (token, full, version) in enumerate(
        zip(outs[0].tokens, outs[0].full_logprobs, outs[0].versions, strict=True)
    ):
        if version == old + 1:
            assert abs(log_softmax(logits_TV[len(PROMPT) + i])[token] - full) < 5e-5


@pytest.mark.parametrize("asked", [False, True])
def test_old_prefixes_serve_new_requests_only_when_asked(engine, other, asked):
    async def work(engine):
        session = engine.open_session()
        await ask(session, PROMPT)
        session.close()
        await engine.swap_weights(other, version=engine.version + 1, keep_prefixes=asked)
        before = engine.stats.prefilled_tokens
        session = engine.open_session()
        await ask(session, PROMPT)
        session.close()
        return engine.stats.prefilled_tokens - before

    assert run(engine, work) == (0 if asked else len(PROMPT) - 1)


def test_a_prompt_half_prefilled_by_old_weights_is_no_prefix_for_new_requests(engine, other):
    async def work(engine):
        first, second = engine.open_session(), engine.open_session()
        long = list(np.random.default_rng(1).integers(6, 64, 80))
        turn = asyncio.create_task(ask(first, long))
        start = engine.stats.prefilled_tokens
        while engine.stats.prefilled_tokens == start:
            await asyncio.sleep(0)
        await engine.swap_weights(other, version=engine.version + 1, policy="in_flight")
        out = await ask(second, long, max_tokens=1)
        await turn
        oldest = second.oldest_version
        first.close()
        second.close()
        return set(out.versions), oldest, engine.version

    versions, oldest, version = run(engine, work)
    assert versions == {version} and oldest == version


def test_weights_are_set_at_once_only_when_nothing_is_held(engine):
    async def work(engine):
        session = engine.open_session()
        out = await ask(session, [7])
        with pytest.raises(EngineError, match="drained"):
            engine.set_weights(engine.params, version=out.versions[0] + 1)
        session.close()
        engine.set_weights(engine.params, version=out.versions[0] + 1)
        fresh = await ask(engine.open_session(), [7])
        return out.versions[0], set(fresh.versions)

    old, new = run(engine, work)
    assert new == {old + 1}


def test_weights_that_were_swapped_out_are_let_go(model):
    engine = Engine(model, OPTIONS)
    engine.set_weights(jax.tree.map(lambda leaf: leaf * 1, engine.params), version=1)
    first = weakref.ref(engine.params["norm"][...])
    assert first() is not None
    engine.set_weights(jax.tree.map(lambda leaf: leaf * 1, engine.params), version=2)
    gc.collect()
    assert first() is None
    own = {id(leaf) for leaf in jax.tree.leaves(nnx.state(model))}
    reached = {id(leaf) for leaf in jax.tree.leaves([engine.params, engine.steps.params])}
    assert not own & reached


def test_pause_loses_nothing_and_resume_goes_on(engine):
    async def work(engine):
        sessions, turns = await begun(engine, 3)
        await engine.pause()
        seen = engine.stats.sampled_tokens
        await asyncio.sleep(0.05)
        assert engine.stats.sampled_tokens == seen and not any(turn.done() for turn in turns)
        engine.resume()
        outs = await asyncio.gather(*turns)
        for session in sessions:
            session.close()
        return outs

    paused = run(engine, work)

    async def plain(engine):
        sessions = [engine.open_session() for _ in range(3)]
        outs = await asyncio.gather(
            *(ask(s, [*PROMPT, 6 + i], sample=i, max_tokens=50) for i, s in enumerate(sessions))
        )
        for session in sessions:
            session.close()
        return outs

    assert [out.logprobs for out in paused] == [out.logprobs for out in run(engine, plain)]


def test_a_swap_in_a_paused_engine_takes_place_before_it_goes_on(engine):
    async def work(engine):
        sessions, turns = await begun(engine, 2)
        await engine.pause()
        await engine.swap_weights(engine.params, version=engine.version + 1, policy="in_flight")
        engine.resume()
        outs = await asyncio.gather(*turns)
        for session in sessions:
            session.close()
        return [out.versions[-1] for out in outs], engine.version

    versions, version = run(engine, work)
    assert versions == [version] * 2
