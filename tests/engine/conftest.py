"""One small engine for all tests of a worker: compiling is what costs."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
from flax import nnx

from jaxrl.contracts import Generation, SampleKey, Sampling
from jaxrl.engine.engine import Engine, EngineOptions, EngineSession
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer

# JetStream has an environment of its own: `make jetstream` runs the tests that drive it there.
collect_ignore = [] if find_spec("jetstream") else ["test_jetstream.py"]

OPTIONS = EngineOptions(
    slots=6,
    context=96,
    page_size=8,
    parked=4,
    prefill_rows=3,
    prefill_buckets=(4, 16),
    decode_steps=3,
    top_logprobs=3,
    routed_experts=True,
    poison_freed=True,
)


def text_of(ids) -> str:
    """Letters stand for tokens."""
    return "".join(chr(ord("0") + token) for token in ids)


@pytest.fixture(scope="session")
def model() -> Transformer:
    """The quickstart's layers with a small vocabulary, untrained."""
    return Transformer(replace(PRESETS["quickstart"], vocab_size=64), rngs=nnx.Rngs(0))


@pytest.fixture(scope="session")
def engine(model) -> Engine:
    """An engine with `OPTIONS`; enter it in each test."""
    return Engine(model, OPTIONS, text_of=text_of)


def run[Result](engine: Engine, work: Callable[[Engine], Awaitable[Result]]) -> Result:
    """What `work` returns, inside the running engine."""

    async def main():
        async with engine:
            return await work(engine)

    return asyncio.run(main())


async def ask(
    session: EngineSession,
    tokens,
    *,
    task: str = "t",
    sample: int = 0,
    turn: int = 0,
    max_tokens: int = 2,
    sampling: Sampling | None = None,
    **options,
) -> Generation:
    """One turn with settings that do not matter to the test."""
    key = SampleKey(7, task, 0, sample, turn)
    return await session.generate(
        tokens, key=key, sampling=sampling or Sampling(), max_tokens=max_tokens, **options
    )


def nothing_leaked(engine: Engine) -> bool:
    """Whether every place is free once kept prefixes are given back."""
    memory = engine._memory
    for prefix in engine._prefixes.clear():
        memory.discard(prefix)
    pools = (memory.slots, memory.rows, memory.pages)
    places = all(pool.free == pool.count for pool in pools)
    return places and not memory.host_used and not memory.idle and not memory.away
