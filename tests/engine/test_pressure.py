"""Less memory than is asked for: everybody is served, nothing is lost, the budget holds."""

import asyncio
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrl.engine.engine import Engine, EngineError
from tests.engine.conftest import OPTIONS, ask, nothing_leaked, run


def budget(model, pages: int) -> int:
    """Bytes for that many pages beside all slots and rows."""
    probe = Engine(model, OPTIONS)
    rows = (OPTIONS.slots + OPTIONS.parked) * probe.steps.row_bytes()
    return rows + pages * probe.steps.page_bytes()


async def crowd(engine: Engine):
    """Ten conversations of two turns; each ends with 60 to 90 tokens."""

    async def converse(i: int):
        rng, session = np.random.default_rng(i), engine.open_session()
        first = await ask(session, rng.integers(6, 64, 30 + i).tolist(), task=f"t{i}", max_tokens=20)
        second = await ask(session, rng.integers(6, 64, 7).tolist(), task=f"t{i}", turn=1, max_tokens=12)
        session.close()
        return first.tokens, first.logprobs, second.tokens, second.logprobs

    return await asyncio.gather(*(converse(i) for i in range(10)))


@pytest.fixture(scope="module")
def unconstrained(engine):
    return run(engine, crowd)


@pytest.fixture(scope="module")
def tight(model) -> Engine:
    """Two and a half sequences' pages for six slots."""
    return Engine(model, replace(OPTIONS, cache_bytes=budget(model, 30)))


def test_a_small_budget_changes_no_bit_when_sessions_go_to_the_host(tight, unconstrained):
    assert run(tight, crowd) == unconstrained
    assert tight.stats.preemptions > 0 and tight._memory.offloads > 0 and tight._memory.drops == 0
    assert tight.stats.recomputed_tokens == 0
    assert nothing_leaked(tight)


def changed(model, engine: Engine, **options) -> Engine:
    """Another engine under other policies, with the same compiled programs."""
    return Engine(model, replace(engine.options, **options), steps=engine.steps)


@pytest.mark.parametrize("changes", [{"host_bytes": 0}, {"eviction": "recompute"}])
def test_what_was_dropped_is_prefilled_again_as_planned(model, tight, unconstrained, changes):
    engine = changed(model, tight, **changes)
    results = run(engine, crowd)
    for got, expected in zip(results, unconstrained, strict=True):
        assert got[0] == expected[0] and got[2] == expected[2]
        np.testing.assert_allclose([*got[1], *got[3]], [*expected[1], *expected[3]], atol=5e-5)
    memory, stats = engine._memory, engine.stats
    assert memory.offloads == 0 and memory.drops > 0
    # Prompts taken over from kept prefixes need not be prefilled again.
    assert 0 < stats.recomputed_tokens <= memory.dropped_tokens
    assert nothing_leaked(engine)


def test_measured_costs_decide_and_everybody_is_served(model, tight, unconstrained):
    engine = changed(model, tight, eviction="measured")
    assert [r[0] for r in run(engine, crowd)] == [r[0] for r in unconstrained]
    assert engine._memory.offloads + engine._memory.drops > 0


def test_the_cache_is_as_large_as_the_budget_allows_and_no_larger(model, tight):
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(tight._device.cache))
    assert held <= budget(model, 30) < held + tight.steps.page_bytes()


def test_a_budget_without_room_for_one_sequence_is_refused(model):
    with pytest.raises(EngineError, match="cache_bytes.*expected at least"):
        Engine(model, replace(OPTIONS, cache_bytes=budget(model, 11)))
    Engine(model, replace(OPTIONS, cache_bytes=budget(model, 12)))


def test_one_sequence_at_a_time_when_there_is_room_for_one(model, unconstrained):
    engine = Engine(model, replace(OPTIONS, cache_bytes=budget(model, 12)))
    assert run(engine, crowd) == unconstrained
    assert nothing_leaked(engine)
