"""What a request may ask for, and what becomes of hostile ones."""

import asyncio
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.contracts import SampleKey, Sampling
from jaxrl.engine.engine import Engine, EngineError
from tests.engine.conftest import OPTIONS, ask, nothing_leaked, run, text_of
from tests.engine.oracle import forward_logits, log_softmax

KEY = SampleKey(7, "t", 0, 0, 0)


def test_finishes(engine):
    async def work(engine: Engine):
        session = engine.open_session()
        seen = []
        out = await ask(session, [7] * 10, max_tokens=1)
        seen.append((out.finish, len(out.tokens), session.length))
        out = await ask(session, [], max_tokens=5, stop_ids=range(4))
        seen.append((out.finish, session.length))
        out = await ask(session, [7] * 10, max_tokens=500)
        seen.append((out.finish, session.length))
        out = await ask(session, [7], max_tokens=5)
        seen.append((out.finish, len(out.tokens)))
        session.close()
        return seen

    first, second, third, fourth = run(engine, work)
    assert first == ("length", 1, 11)
    assert second[0] in ("length", "stop")
    assert third == ("context", OPTIONS.context)
    assert fourth == ("context", 0)


def test_a_stop_string_ends_the_turn_with_the_token_that_completes_it(engine):
    async def work(engine: Engine):
        session = engine.open_session()
        free = await ask(session, [9, 8], max_tokens=40)
        text = text_of(free.tokens)
        stop = text[11:14]  # completed by token 13, if not before
        session.close()
        session = engine.open_session()
        out = await ask(session, [9, 8], max_tokens=40, stop_strings=["\x00", stop])
        after = await ask(session, [9], turn=1, max_tokens=5)
        ids = session.tokens
        session.close()
        return free, text.index(stop) + 3, out, after, ids

    free, end, out, after, ids = run(engine, work)
    assert out.finish == "stop" and out.tokens == free.tokens[:end] and out.logprobs == free.logprobs[:end]
    # The turn after it goes on from exactly these tokens.
    assert ids == (9, 8, *out.tokens, 9, *after.tokens)


def test_turns_after_a_stop_string_are_those_of_the_training_forward(engine, model):
    async def work(engine: Engine):
        session = engine.open_session()
        await ask(session, [9, 8], max_tokens=40, stop_strings=[text_of([t]) for t in range(6, 20)])
        out = await ask(session, [9], turn=1, max_tokens=5)
        ids = session.tokens
        session.close()
        return out, ids

    out, ids = run(engine, work)
    logits_TV = forward_logits(model, ids, context=OPTIONS.context)[-6:-1]
    expected = [log_softmax(row)[token] for row, token in zip(logits_TV, out.tokens, strict=True)]
    np.testing.assert_allclose(out.full_logprobs, expected, atol=1e-5)


def test_streams_bring_the_same_in_parts(engine):
    async def work(engine: Engine):
        session = engine.open_session()
        whole = await ask(session, [9, 8, 7], max_tokens=20)
        session.close()
        session = engine.open_session()
        parts = [
            part async for part in session.stream([9, 8, 7], key=KEY, sampling=Sampling(), max_tokens=20)
        ]
        session.close()
        return whole, parts

    whole, parts = run(engine, work)
    assert len(parts) > 3
    assert [part.finish for part in parts] == [None] * (len(parts) - 1) + ["length"]
    for name in ("tokens", "logprobs", "full_logprobs", "versions"):
        assert tuple(x for part in parts for x in getattr(part, name)) == getattr(whole, name)


def test_a_reader_that_goes_away_ends_its_turn_alone(engine):
    async def work(engine: Engine):
        session, other = engine.open_session(), engine.open_session()
        beside = asyncio.create_task(ask(other, [7], max_tokens=60))
        stream = session.stream([9], key=KEY, sampling=Sampling(), max_tokens=80)
        async with contextlib.aclosing(stream):
            await anext(stream)
        again = await ask(session, [9], turn=1)  # the session goes on
        assert len((await beside).tokens) == 60
        session.close()
        other.close()
        return len(again.tokens), nothing_leaked(engine)

    assert run(engine, work) == (2, True)


def test_a_reader_that_stops_reading_holds_up_nobody(engine):
    async def work(engine: Engine):
        slow = engine.open_session()
        reader = slow.stream([9], key=KEY, sampling=Sampling(), max_tokens=80)
        first = await anext(reader)
        await asyncio.gather(*(ask(engine.open_session(), [7], sample=i, max_tokens=40) for i in range(12)))
        rest = [part async for part in reader]
        return sum(len(part.tokens) for part in [first, *rest])

    assert run(engine, work) == 80


def test_top_logprobs_are_the_most_likely_of_the_full_softmax(engine, model):
    async def work(engine: Engine):
        session = engine.open_session()
        sampling = Sampling(temperature=0.5, top_k=7)
        out = await ask(session, [9, 8, 7], max_tokens=6, sampling=sampling, top_logprobs=3)
        ids = session.tokens
        session.close()
        return out, ids

    out, ids = run(engine, work)
    logits_TV = forward_logits(model, ids, context=OPTIONS.context)[2:-1]
    assert len(out.top_logprobs) == 6
    for row_V, top in zip(logits_TV, out.top_logprobs, strict=True):
        logp_V = log_softmax(row_V)
        best = np.argsort(-logp_V)[:3]
        assert [token for token, _ in top] == best.tolist()
        np.testing.assert_allclose([value for _, value in top], logp_V[best], atol=1e-5)


def test_routed_experts_cover_every_token_fed_once_and_are_the_models(engine, model):
    async def work(engine: Engine):
        sessions = [engine.open_session() for _ in range(3)]
        prompt = np.random.default_rng(0).integers(6, 64, 37).tolist()
        firsts = await asyncio.gather(
            *(ask(s, prompt, sample=i, max_tokens=5) for i, s in enumerate(sessions))
        )
        second = await ask(sessions[1], [9, 9], turn=1, max_tokens=4)
        return firsts, second, sessions[1].tokens

    firsts, second, ids = run(engine, work)
    assert [out.routed_experts.shape for out in firsts] == [(37 + 4, 4, 2)] * 3  # pyright: ignore
    got = np.concatenate([firsts[1].routed_experts, second.routed_experts])  # pyright: ignore
    assert len(got) == len(ids) - 1
    np.testing.assert_array_equal(np.sort(got, -1), np.sort(model_routes(model, ids[:-1]), -1))


def model_routes(model, ids) -> np.ndarray:
    """[T, L, X] by the training forward's own router inputs, layer by layer."""
    from jaxrl.model.block import Packing
    from jaxrl.model.norms import rms_norm

    ones = jnp.ones((1, len(ids)), jnp.int32)
    packing = Packing.of(ones, jnp.arange(len(ids))[None], model.spec)
    x_BTD, routes = model.embed[...][jnp.asarray([ids])], []
    for block in model.layers:
        after = block(x_BTD, packing)[0]
        mixer = block.mixer
        h_BTD = rms_norm(x_BTD, block.mixer_norm[...], eps=block.eps)
        mixed = (
            mixer(h_BTD, segment_ids_BT=ones)
            if hasattr(mixer, "conv")
            else mixer(h_BTD, rope=packing.rope, mask_BTS=packing.mask_BTS)
        )
        into = rms_norm(x_BTD + mixed, block.mlp_norm[...], eps=block.eps)
        probability_TE = block.mlp.probabilities(into[0])
        routes.append(jax.lax.top_k(probability_TE, model.spec.experts_per_token)[1])
        x_BTD = after
    return np.stack(routes, 1)


def test_append_prefills_without_sampling(engine):
    async def work(engine: Engine):
        session = engine.open_session()
        await session.append(list(range(6, 30)))
        await session.append([9])
        before = engine.stats.prefilled_tokens
        out = await ask(session, [], max_tokens=5)
        assert engine.stats.prefilled_tokens == before
        session.close()
        session = engine.open_session()
        alone = await ask(session, [*range(6, 30), 9], max_tokens=5)
        with pytest.raises(EngineError, match="do not fit"):
            await session.append([9] * 90)
        session.close()
        return out.tokens == alone.tokens

    assert run(engine, work)


def test_no_stop_strings_without_a_tokenizer(model, engine):
    async def work(engine: Engine):
        with pytest.raises(EngineError, match="text_of"):
            await ask(engine.open_session(), [7], stop_strings=["x"])
        return True

    assert run(Engine(model, OPTIONS, steps=engine.steps), work)


def test_a_session_does_one_thing_at_a_time(engine):
    async def work(engine: Engine):
        session = engine.open_session()
        turn = asyncio.create_task(ask(session, [7], max_tokens=30))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already generates"):
            await ask(session, [8])
        with pytest.raises(EngineError, match="fork"):
            session.fork()
        await turn
        session.close()
        session.close()
        with pytest.raises(EngineError, match="closed"):
            await ask(session, [8])
        return True

    assert run(engine, work)


def test_an_engine_that_is_not_running_says_so(engine):
    async def work():
        with pytest.raises(EngineError, match="async with"):
            await ask(engine.open_session(), [7])

    asyncio.run(work())


def test_cancelled_and_abandoned_turns_give_back_what_they_held(engine):
    async def work(engine: Engine):
        before = engine.stats.sampled_tokens
        sessions = [engine.open_session() for _ in range(9)]
        tasks = [
            asyncio.create_task(ask(session, [8, 9] * 9, sample=i, max_tokens=60))
            for i, session in enumerate(sessions)
        ]
        while engine.stats.sampled_tokens == before:
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        sessions[1].close()
        sessions[7].close()
        await asyncio.wait(tasks)
        kept = sessions[0].tokens
        again = await ask(sessions[0], [9], turn=1)  # a cancelled session goes on from what it has
        assert sessions[0].tokens == (*kept, 9, *again.tokens)
        for session in sessions:
            session.close()
        return tasks, nothing_leaked(engine)

    tasks, clean = run(engine, work)
    assert all(task.cancelled() for task in tasks[::2])
    ends = [(task.result().finish, len(task.result().tokens)) for task in tasks[1::2]]
    assert [ends[i][0] for i in (0, 3)] == ["cancelled", "cancelled"]
    assert [ends[i] for i in (1, 2)] == [("length", 60)] * 2
    assert clean


def test_nan_weights_are_an_error_not_a_token(engine):
    healthy, version = engine.params, engine.version

    async def work(engine: Engine):
        session = engine.open_session()
        first = await ask(session, [9, 8], max_tokens=3)
        held = session.tokens
        nan = jax.tree.map(lambda leaf: leaf * jnp.nan, healthy)
        await engine.swap_weights(nan, version=version + 1)
        with pytest.raises(EngineError, match="non-finite"):
            await ask(session, [9], turn=1)
        assert session.tokens == held
        await engine.swap_weights(healthy, version=version + 2)
        out = await ask(session, [9], turn=1)  # as before the failed turn
        session.close()
        return len(first.tokens) + len(out.tokens), nothing_leaked(engine)

    assert run(engine, work) == (5, True)


def test_a_device_fault_fails_what_runs_and_loses_no_session(engine, monkeypatch):
    async def work(engine: Engine):
        idle, busy = engine.open_session(), engine.open_session()
        await ask(idle, list(range(6, 30)), max_tokens=5)
        held = idle.tokens

        def broken(*_, **__):
            raise RuntimeError("no such device")

        with monkeypatch.context() as patch:
            patch.setattr(engine.steps, "generate", broken)
            with pytest.raises(EngineError, match="device job failed: RuntimeError: no such device"):
                await ask(busy, [7, 8])
        out = await ask(idle, [9], turn=1, max_tokens=4)
        assert idle.tokens == (*held, 9, *out.tokens) and busy.length == 0
        idle.close()
        busy.close()
        return nothing_leaked(engine)

    assert run(engine, work)


def test_stopping_ends_what_is_queued(engine):
    async def main():
        async with engine:
            turns = [
                asyncio.create_task(ask(engine.open_session(), [7], sample=i, max_tokens=90))
                for i in range(20)
            ]
            await asyncio.sleep(0.01)
        return await asyncio.gather(*turns, return_exceptions=True)

    ends = asyncio.run(main())
    assert any(isinstance(end, EngineError) and "stopped" in str(end) for end in ends)
    assert nothing_leaked(engine)


def test_ten_thousand_queued_requests(engine):
    async def work(engine: Engine):
        sessions = [engine.open_session() for _ in range(10_000)]
        turns = [
            asyncio.create_task(ask(session, [6 + i % 50, 9], sample=i, max_tokens=1))
            for i, session in enumerate(sessions)
        ]
        await asyncio.sleep(0)
        for turn in turns[60:]:
            turn.cancel()
        outs = await asyncio.gather(*turns, return_exceptions=True)
        for session in sessions:
            session.close()
        return [len(out.tokens) for out in outs[:60]], nothing_leaked(engine)  # pyright: ignore

    assert run(engine, work) == ([1] * 60, True)
