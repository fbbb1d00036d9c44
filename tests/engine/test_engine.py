"""The engine against the training forward: same tokens, same log-probs, whatever shares the batch."""

import asyncio
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.contracts import Generation, SampleKey, Sampling
from jaxrl.engine.engine import Engine, EngineOptions
from jaxrl.engine.errors import EngineError
from jaxrl.engine.session import EngineSession
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer

OPTIONS = EngineOptions(
    slots=6, context=96, prefill_rows=3, prefill_buckets=(4, 16), decode_steps=3, poison_freed=True
)
STOP = 5


@pytest.fixture(scope="module")
def model() -> Transformer:
    spec = replace(PRESETS["quickstart"], vocab_size=64)
    return Transformer(spec, rngs=nnx.Rngs(0))


@nnx.jit
def padded_logprobs(model: Transformer, tokens_BT, segment_ids_BT):
    hidden_BTD = model(
        tokens_BT, segment_ids_BT=segment_ids_BT, positions_BT=jnp.arange(tokens_BT.shape[1])[None]
    )
    logp_TV = jax.nn.log_softmax(model.logits(hidden_BTD[0]))
    return logp_TV[jnp.arange(tokens_BT.shape[1] - 1), tokens_BT[0, 1:]]


def forward_logprobs(model: Transformer, ids: list[int]) -> np.ndarray:
    """log p(ids[i] | ids[:i]) for i ≥ 1, by the training forward on one padded row."""
    padded, real = np.zeros((2, 1, OPTIONS.context), np.int32)
    padded[0, : len(ids)], real[0, : len(ids)] = ids, 1
    return np.asarray(padded_logprobs(model, padded, real))


async def converse(engine: Engine, task: str, prompts: list[list[int]], *, sample=0, sampling=None) -> dict:
    """A session of several turns; returns all its ids, which were sampled, and their log-probs."""
    session = engine.open_session()
    ids: list[int] = []
    sampled: dict[int, tuple[float, float]] = {}
    for turn, prompt in enumerate(prompts):
        out = await session.generate(
            prompt,
            key=SampleKey(7, task, 0, sample, turn),
            sampling=sampling or Sampling(),
            max_tokens=9,
            stop_ids=[STOP],
        )
        ids += prompt
        for token, logprob, full in zip(out.tokens, out.logprobs, out.full_logprobs, strict=True):
            sampled[len(ids)] = (logprob, full)
            ids.append(token)
        await asyncio.sleep(0)
    session.close()
    return {"ids": ids, "sampled": sampled}


def prompts_of(seed: int, turns: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(6, 64, rng.integers(1, 21)).tolist() for _ in range(turns)]


async def ask(
    session: EngineSession, tokens: list[int], *, sample: int = 0, max_tokens: int = 2, stop_ids=()
) -> Generation:
    """One turn with settings that do not matter to the test."""
    key = SampleKey(0, "t", 0, sample, 0)
    return await session.generate(
        tokens, key=key, sampling=Sampling(), max_tokens=max_tokens, stop_ids=stop_ids
    )


def run(engine: Engine, work):
    async def main():
        async with engine:
            return await work(engine)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine(model, OPTIONS)


async def converse_crowd(engine: Engine):
    """Fourteen conversations over six slots; 0 to 3 share their first prompt as a group does."""
    shared = prompts_of(100, 2)
    jobs = [converse(engine, "shared", shared, sample=i) for i in range(4)]
    jobs += [converse(engine, f"task{i}", prompts_of(i, 1 + i % 3)) for i in range(10)]
    return await asyncio.gather(*jobs), engine._memory.slots.free


@pytest.fixture(scope="module")
def crowd(engine):
    return run(engine, converse_crowd)


def largest_error(model: Transformer, results: list[dict]) -> float:
    errors = []
    for result in results:
        expected = forward_logprobs(model, result["ids"])
        for position, (logprob, full) in result["sampled"].items():
            errors += [abs(logprob - expected[position - 1]), abs(full - expected[position - 1])]
    return max(errors)


def test_sampled_logprobs_equal_the_training_forward(model, crowd):
    assert largest_error(model, crowd[0]) <= 5e-5


def test_sampled_logprobs_equal_the_training_forward_in_float64():
    jax.config.update("jax_enable_x64", True)
    try:
        layers = ("linear_attention", "full_attention")
        spec = replace(PRESETS["quickstart"], vocab_size=64, layer_types=layers, dtype="float64")
        model = Transformer(spec, rngs=nnx.Rngs(1))
        results, _ = run(Engine(model, OPTIONS), converse_crowd)
        assert largest_error(model, results) <= 1e-9
    finally:
        jax.config.update("jax_enable_x64", False)


def test_alone_or_in_a_crowd_is_bit_equal(engine, crowd):
    results, _ = crowd
    for i in (0, 4, 9):
        alone = run(engine, lambda engine, i=i: converse(engine, f"task{i}", prompts_of(i, 1 + i % 3)))
        assert alone == results[4 + i]


def test_members_of_a_group_differ_and_share_their_prompt(engine, crowd):
    results, _ = crowd
    prompt = prompts_of(100, 2)[0]
    members = [result["ids"] for result in results[:4]]
    assert all(ids[: len(prompt)] == prompt for ids in members)
    assert len({tuple(ids) for ids in members}) == 4
    alone = run(engine, lambda engine: converse(engine, "shared", prompts_of(100, 2), sample=3))
    assert alone == results[3]


def test_every_slot_is_free_at_the_end(crowd):
    _, free = crowd
    assert free == OPTIONS.slots


def test_a_group_prefills_its_prompt_once(engine):
    prompt = list(range(6, 40))

    async def work(engine: Engine):
        await asyncio.gather(*(converse(engine, "t", [prompt], sample=i) for i in range(6)))
        return engine.stats.prefilled_tokens

    before = engine.stats.prefilled_tokens
    assert run(engine, work) - before == len(prompt) - 1


def test_low_temperature_logprobs_are_those_of_the_sampled_distribution(engine):
    sampling = Sampling(temperature=0.1, top_p=0.95)
    result = run(engine, lambda engine: converse(engine, "t", [[9, 8, 7]], sampling=sampling))
    for logprob, full in result["sampled"].values():
        assert full <= logprob + 1e-6 <= 1e-5


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


@pytest.mark.parametrize(
    "tokens, options, message",
    [
        ([], {}, "empty prompt"),
        ([64], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([7], {"max_tokens": 0}, "max_tokens"),
        ([7], {"stop_ids": [1, 2, 3, 4, 5]}, "stop ids"),
    ],
)
def test_bad_requests_say_why_and_leave_the_engine_alive(engine, tokens, options, message):
    async def work(engine: Engine):
        with pytest.raises(EngineError, match=message):
            await ask(engine.open_session(), tokens, **options)
        return await converse(engine, "t", [[9]])

    assert run(engine, work)["sampled"]


def test_cancelled_and_abandoned_turns_free_their_slots(engine):
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
        for session in sessions[::2]:
            session.close()
        await asyncio.wait(tasks)
        for session in sessions:
            session.close()
        later = await converse(engine, "task0", prompts_of(0, 1))
        return tasks, later, engine._memory.slots.free

    tasks, later, free = run(engine, work)
    assert all(task.cancelled() for task in tasks[::2])
    ends = [(task.result().finish, len(task.result().tokens)) for task in tasks[1::2]]
    assert [ends[i][0] for i in (0, 3)] == ["cancelled", "cancelled"]
    assert [ends[i] for i in (1, 2)] == [("length", 60)] * 2
    assert free == OPTIONS.slots
    assert later == run(engine, lambda engine: converse(engine, "task0", prompts_of(0, 1)))


def test_nan_weights_are_an_error_not_a_token(engine):
    healthy, version = engine.params, engine.version

    async def work(engine: Engine):
        engine.set_weights(jax.tree.map(lambda leaf: leaf * jnp.nan, healthy), version=version)
        with pytest.raises(EngineError, match="non-finite"):
            await converse(engine, "t", [[9]])

    run(engine, work)
    engine.set_weights(healthy, version=version)


def test_weight_swap_waits_for_a_drain_and_tags_tokens(engine):
    async def work(engine: Engine):
        session = engine.open_session()
        out = await ask(session, [7])
        old = engine.version
        assert set(out.versions) == {old}
        with pytest.raises(EngineError, match="drained"):
            engine.set_weights(engine.params, version=old + 1)
        session.close()
        engine.set_weights(engine.params, version=old + 1)
        fresh = await ask(engine.open_session(), [7])
        return set(fresh.versions) == {old + 1}

    assert run(engine, work)


def test_nothing_compiles_after_warm_up(engine):
    async def work(engine: Engine):
        engine._cache = engine.steps.warm_up(engine.params, engine._cache)
        before = engine.steps.programs()
        await asyncio.gather(*(converse(engine, f"x{i}", prompts_of(50 + i, 3)) for i in range(12)))
        return before, engine.steps.programs()

    before, after = run(engine, work)
    assert before == after
