"""Sessions under random use in an engine with too little memory: every token is the training forward's.

Forks, appended turns, cancelled and abandoned turns, preemption, offloading, dropping, weight swaps: at
the end each sampled token's log-probabilities, of the distribution sampled and of the full softmax, are
those that the training forward and a sampler in NumPy give for the session's tokens.
"""

import asyncio
import os
from dataclasses import dataclass, field, replace
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxrl.contracts import Generation, SampleKey, Sampling
from jaxrl.engine.engine import Engine, EngineOptions, EngineSession
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer
from tests.engine.oracle import forward_logits, log_softmax, sampled_log_softmax

CONTEXT, STOP = 640, 5
EXAMPLES = int(os.environ.get("ENGINE_EXAMPLES", "12"))
SAMPLINGS = st.sampled_from(
    [
        Sampling(),
        Sampling(temperature=0),
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(top_k=5),
        Sampling(temperature=1.3, min_p=0.1),
        Sampling(top_k=20, top_p=0.9, min_p=0.02),
    ]
)
LENGTHS = st.one_of(st.integers(1, 20), st.integers(21, 150), st.integers(151, 600))
PICK = st.integers(0, 99)


@dataclass
class Talk:
    """A session, and what the test knows of it."""

    session: EngineSession
    task: asyncio.Task[Generation] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    first: int = 0  # tokens before the first sampled one of the turn in flight
    sampled: dict[int, tuple[float, float, Sampling]] = field(default_factory=dict)  # by position
    turns: int = 0


@cache
def model_of(experts: int, dtype: str) -> Transformer:
    """Two layers of the quickstart's, with that many experts, or dense for 0."""
    spec = replace(
        PRESETS["quickstart"], vocab_size=64, layer_types=("linear_attention", "full_attention"), dtype=dtype
    )
    if experts:
        spec = replace(spec, num_experts=experts)
    else:
        none = dict.fromkeys(("num_experts", "experts_per_token", "expert_dim", "shared_expert_dim"))
        spec = replace(spec, mlp_dim=96, **none)
    return Transformer(spec, rngs=nnx.Rngs(3))


@cache
def engine_of(experts: int, dtype: str, host_copies: int) -> Engine:
    """Three slots, two spare rows, pages for a sequence and a half, host memory for `host_copies`."""
    options = EngineOptions(
        slots=3,
        context=CONTEXT,
        page_size=16,
        parked=2,
        prefill_rows=2,
        prefill_buckets=(8, 64),
        decode_steps=3,
        poison_freed=True,
    )
    model = model_of(experts, dtype)
    full = options.sizes(model.spec)
    probe = Engine(model, replace(options, slots=1, parked=1))
    page, row = probe.steps.page_bytes(), probe.steps.row_bytes()
    pages = full.context // full.page_size * 3 // 2
    budget = (options.slots + options.parked) * row + pages * page
    return Engine(model, replace(options, cache_bytes=budget, host_bytes=host_copies * (row + 20 * page)))


class EngineMachine(RuleBasedStateMachine):
    """Drives one engine on an event loop of its own."""

    experts, dtype, error = 8, "float64", 1e-9

    @initialize(host_copies=st.sampled_from([0, 2, 100]))
    def start(self, host_copies):
        self.loop = asyncio.new_event_loop()
        self.engine = engine_of(self.experts, self.dtype, host_copies)
        self.talks: list[Talk] = []
        self.opened = 0
        self.loop.run_until_complete(self.engine.__aenter__())

    def ready(self) -> list[Talk]:
        return [talk for talk in self.talks if talk.task is None]

    def flying(self) -> list[Talk]:
        return [talk for talk in self.talks if talk.task is not None]

    def collect(self, talk: Talk) -> None:
        """Books what the turn of `talk`, which has ended, has sampled."""
        assert talk.task is not None
        result, talk.task = talk.task.result(), None
        tokens = talk.session.tokens
        assert tokens[talk.first : talk.first + len(result.tokens)] == tuple(result.tokens)
        for i, pair in enumerate(zip(result.logprobs, result.full_logprobs, strict=True)):
            talk.sampled[talk.first + i] = (*pair, talk.sampling)
        assert set(result.versions) <= set(range(self.engine.version + 1))

    @precondition(lambda self: len(self.talks) < 6)
    @rule()
    def open(self):
        self.talks.append(Talk(self.engine.open_session()))

    @precondition(lambda self: self.ready())
    @rule(pick=PICK, length=LENGTHS, new=st.integers(1, 12), sampling=SAMPLINGS, shared=st.booleans())
    def ask(self, pick, length, new, sampling, shared):
        talk = self.ready()[pick % len(self.ready())]
        session = talk.session
        if session.length + length >= CONTEXT:
            return
        seed = 0 if shared else 1000 * self.opened + talk.turns
        prompt = np.random.default_rng(seed).integers(6, 64, length).tolist()
        self.opened += 1
        talk.turns += 1
        talk.sampling, talk.first = sampling, session.length + length
        key = SampleKey(0, f"s{self.opened}", 0, 0, talk.turns)
        turn = session.generate(prompt, key=key, sampling=sampling, max_tokens=new, stop_ids=[STOP])
        talk.task = self.loop.create_task(turn)

    @precondition(lambda self: self.ready())
    @rule(pick=PICK, length=st.integers(1, 100))
    def append(self, pick, length):
        talk = self.ready()[pick % len(self.ready())]
        if talk.session.length + length < CONTEXT:
            tokens = np.random.default_rng(length).integers(6, 64, length).tolist()
            self.loop.run_until_complete(talk.session.append(tokens))

    @rule(jobs=st.integers(1, 5))
    def run(self, jobs):
        """Lets the engine run a few device jobs."""

        async def work():
            stats = self.engine.stats
            goal = stats.prefill_dispatches + stats.decode_dispatches + jobs
            while stats.prefill_dispatches + stats.decode_dispatches < goal and any(
                talk.task and not talk.task.done() for talk in self.talks
            ):
                await asyncio.sleep(0)

        self.loop.run_until_complete(work())

    @precondition(lambda self: self.flying())
    @rule(pick=PICK)
    def await_one(self, pick):
        talk = self.flying()[pick % len(self.flying())]
        self.loop.run_until_complete(asyncio.wait([talk.task]))
        self.collect(talk)

    @precondition(lambda self: self.flying())
    @rule(pick=PICK)
    def cancel(self, pick):
        talk = self.flying()[pick % len(self.flying())]
        assert talk.task is not None
        talk.task.cancel()
        self.loop.run_until_complete(asyncio.wait([talk.task]))
        if talk.task.cancelled():
            talk.task = None
        else:
            self.collect(talk)

    @precondition(lambda self: self.ready() and len(self.talks) < 6)
    @rule(pick=PICK)
    def fork(self, pick):
        talk = self.ready()[pick % len(self.ready())]
        self.loop.run_until_complete(talk.session._end_of_cancelled())
        twin = Talk(talk.session.fork(), sampled=dict(talk.sampled))
        assert twin.session.tokens == talk.session.tokens
        self.talks.append(twin)

    @precondition(lambda self: self.talks)
    @rule(pick=PICK)
    def close(self, pick):
        talk = self.talks.pop(pick % len(self.talks))
        self.loop.run_until_complete(asyncio.sleep(0))  # a turn that was only just asked for begins
        talk.session.close()
        if talk.task is not None:
            self.loop.run_until_complete(asyncio.wait([talk.task]))
            assert talk.task.cancelled() or talk.task.result().finish is not None
        self.check(talk)

    @rule(in_flight=st.booleans(), again=st.booleans())
    def swap_weights(self, in_flight, again):
        """The same weights under a new version: what each token is worth must not change."""
        swap = self.engine.swap_weights(
            self.engine.params,
            version=self.engine.version + 1,
            policy="in_flight" if in_flight else "drain",
            cached="recompute" if again else "keep",
        )
        self.loop.run_until_complete(swap)

    @invariant()
    def the_cache_stays_within_its_places(self):
        if not hasattr(self, "engine"):
            return
        memory = self.engine._memory
        assert memory.host_used <= memory.host_bytes
        assert self.engine._device.cache is not None

    def check(self, talk: Talk) -> None:
        """All that `talk` has sampled, against the training forward."""
        tokens = talk.session.tokens
        if not talk.sampled:
            return
        logits_TV = forward_logits(model_of(self.experts, self.dtype), tokens, context=CONTEXT)
        wrong = {}
        for position, (logprob, full, sampling) in talk.sampled.items():
            row_V, token = logits_TV[position - 1], tokens[position]
            right = (sampled_log_softmax(row_V, sampling)[token], log_softmax(row_V)[token])
            if not np.allclose((logprob, full), right, rtol=0, atol=self.error):
                wrong[position] = (logprob, full), right, sampling
        assert not wrong, str(wrong)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        try:
            self.finish()
        finally:
            self.loop.run_until_complete(self.engine.__aexit__())
            self.loop.close()

    def finish(self) -> None:
        flying = [talk.task for talk in self.flying() if talk.task is not None]
        if flying:
            _, late = self.loop.run_until_complete(asyncio.wait(flying, timeout=8))
            assert not late, "turns that never end"
        for talk in self.flying():
            self.collect(talk)
        for talk in self.talks:
            self.check(talk)
            talk.session.close()
        self.loop.run_until_complete(self.engine.pause())  # until all was given back
        memory = self.engine._memory
        for prefix in self.engine._prefixes.clear():
            memory.discard(prefix)
        assert [pool.free for pool in (memory.slots, memory.rows, memory.pages)] == [
            pool.count for pool in (memory.slots, memory.rows, memory.pages)
        ]
        assert memory.host_used == 0 and not self.engine._scheduler.waiting


class DenseMachine(EngineMachine):
    """A dense model."""

    experts = 0


class ManyExpertsMachine(EngineMachine):
    """So many experts that tokens are sorted by them; in float32, as runs are."""

    experts, dtype, error = 32, "float32", 5e-5


@pytest.fixture(autouse=True)
def x64(request):
    """float64 where the machine asks for it."""
    jax.config.update("jax_enable_x64", "ManyExperts" not in request.node.nodeid)
    yield
    jax.config.update("jax_enable_x64", False)


_SETTINGS = settings(max_examples=EXAMPLES, stateful_step_count=25, deadline=None)
TestFewExperts, TestDense, TestManyExperts = (
    machine.TestCase for machine in (EngineMachine, DenseMachine, ManyExpertsMachine)
)
TestFewExperts.settings = TestDense.settings = TestManyExperts.settings = _SETTINGS
