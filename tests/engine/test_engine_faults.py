"""What goes wrong in one turn, or in the middle of a pause, costs nobody else anything."""

import asyncio
import contextlib

import jax
import pytest

from jaxrl.engine.engine import Engine, EngineError
from tests.engine.conftest import OPTIONS, ask, nothing_leaked, run


def waiting(coroutine):
    return asyncio.wait_for(coroutine, 60)


def test_a_fault_of_the_planner_is_told_and_the_engine_goes_on(engine, monkeypatch):
    async def work(engine: Engine):
        with monkeypatch.context() as patched:
            patched.setattr(engine._scheduler, "_decode", lambda: 1 / 0)
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await waiting(ask(engine.open_session(), [7]))
        return await waiting(ask(engine.open_session(), [7]))

    assert len(run(engine, work).tokens) == 2


def test_a_decoder_that_raises_ends_its_own_turn_alone(model, engine):
    def text_of(ids):
        raise KeyError("no such token")

    async def work(engine: Engine):
        other = engine.open_session()
        turn = asyncio.ensure_future(ask(other, [9], max_tokens=60))
        with pytest.raises(EngineError, match="text_of failed: KeyError"):
            await waiting(ask(engine.open_session(), [7], stop_strings=["x"]))
        out = await waiting(turn)
        other.close()
        return len(out.tokens), nothing_leaked(engine)

    assert run(Engine(model, OPTIONS, text_of=text_of, steps=engine.steps), work) == (60, True)


@pytest.mark.parametrize("what", ["drain", "swap"])
def test_a_drain_that_is_cancelled_leaves_things_as_they_were(engine, what):
    async def work(engine: Engine):
        session, version = engine.open_session(), engine.version
        turn = asyncio.ensure_future(ask(session, [7], max_tokens=60))
        await asyncio.sleep(0.01)
        swap = engine.swap_weights(engine.params, version=version + 1)
        drain = asyncio.ensure_future(engine.drain() if what == "drain" else swap)
        if what == "drain":
            swap.close()
        await asyncio.sleep(0)
        drain.cancel()
        await waiting(turn)
        session.close()
        out = await waiting(ask(engine.open_session(), [9]))
        return len(out.tokens), engine.version - version

    assert run(engine, work) == (2, 0)


def test_a_drain_leaves_a_pause_alone(engine):
    async def work(engine: Engine):
        await engine.pause()
        await waiting(engine.swap_weights(engine.params, version=engine.version + 1))
        turn = asyncio.ensure_future(ask(engine.open_session(), [7]))
        await asyncio.sleep(0.05)
        assert not turn.done()
        engine.resume()
        return len((await waiting(turn)).tokens)

    assert run(engine, work) == 2


def test_a_drain_in_the_middle_of_paused_turns_is_refused(engine):
    async def work(engine: Engine):
        turn = asyncio.ensure_future(ask(engine.open_session(), [7], max_tokens=60))
        await asyncio.sleep(0.01)
        await engine.pause()
        with pytest.raises(EngineError, match="resume"):
            await waiting(engine.drain())
        turn.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await turn
        await waiting(engine.drain())  # nothing is left to finish
        engine.resume()
        return len((await waiting(ask(engine.open_session(), [7]))).tokens)

    assert run(engine, work) == 2


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(engine):
    async def work(engine: Engine):
        def change(path, leaf):
            return leaf[:-1] if "router" in jax.tree_util.keystr(path) else leaf

        params, version = engine.params, engine.version
        for wrong, message in (
            (jax.tree.map_with_path(change, params), "router.*expected shape"),
            (jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params), "bfloat16"),
            (None, "tree of the engine's model"),
        ):
            with pytest.raises(EngineError, match=message):
                await engine.swap_weights(wrong, version=version + 1)
            with pytest.raises(EngineError, match=message):
                engine.set_weights(wrong, version=version + 1)
        for options in ({"version": "v2"}, {"policy": "foo"}, {"cached": "foo"}):
            with pytest.raises(EngineError, match="expected"):
                await engine.swap_weights(params, **({"version": version + 1} | options))  # type: ignore[arg-type]
        out = await waiting(ask(engine.open_session(), [7]))
        return set(out.versions) == {version}

    assert run(engine, work)


def test_an_engine_is_entered_once_at_a_time(engine):
    async def work(engine: Engine):
        with pytest.raises(EngineError, match="already running"):
            async with engine:
                pytest.fail("expected a second entry to be refused")
        return await waiting(ask(engine.open_session(), [7]))

    assert len(run(engine, work).tokens) == 2
