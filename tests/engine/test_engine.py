"""The engine against the training forward: same tokens, same log-probs, whatever shares the batch."""

import asyncio
import random
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxrl.contracts import Sampling
from jaxrl.engine.engine import Engine
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer
from tests.engine.conftest import OPTIONS, ask, nothing_leaked, run
from tests.engine.oracle import forward_logits, log_softmax

STOP = 5


async def converse(engine: Engine, task: str, prompts: list[list[int]], *, sample=0, sampling=None) -> dict:
    """A session of several turns; returns all its ids, which were sampled, and their log-probs."""
    session = engine.open_session()
    sampled: dict[int, tuple[float, float]] = {}
    for turn, prompt in enumerate(prompts):
        start = session.length + len(prompt)
        settings = {"sampling": sampling, "max_tokens": 9, "stop_ids": [STOP]}
        out = await ask(session, prompt, task=task, sample=sample, turn=turn, **settings)
        for i, pair in enumerate(zip(out.logprobs, out.full_logprobs, strict=True)):
            sampled[start + i] = pair
        await asyncio.sleep(0)
    tokens = list(session.tokens)
    session.close()
    return {"ids": tokens, "sampled": sampled}


def prompts_of(seed: int, turns: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(6, 64, rng.integers(1, 21)).tolist() for _ in range(turns)]


async def converse_crowd(engine: Engine):
    """Fourteen conversations over six slots; 0 to 3 share their first prompt as a group does."""
    shared = prompts_of(100, 2)
    jobs = [converse(engine, "shared", shared, sample=i) for i in range(4)]
    jobs += [converse(engine, f"task{i}", prompts_of(i, 1 + i % 3)) for i in range(10)]
    return await asyncio.gather(*jobs)


def largest_error(model: Transformer, results: list[dict]) -> float:
    errors = []
    for result in results:
        logits_TV = forward_logits(model, result["ids"], context=OPTIONS.context)
        for position, (logprob, full) in result["sampled"].items():
            expected = log_softmax(logits_TV[position - 1])[result["ids"][position]]
            errors += [abs(logprob - expected), abs(full - expected)]
    return max(errors)


def test_sampled_logprobs_equal_the_training_forward(model, engine):
    assert largest_error(model, run(engine, converse_crowd)) <= 5e-5
    assert nothing_leaked(engine)


def test_sampled_logprobs_equal_the_training_forward_in_float64():
    jax.config.update("jax_enable_x64", True)
    try:
        layers = ("linear_attention", "full_attention")
        spec = replace(PRESETS["quickstart"], vocab_size=64, layer_types=layers, dtype="float64")
        model = Transformer(spec, rngs=nnx.Rngs(1))
        results = run(Engine(model, OPTIONS), converse_crowd)
        assert largest_error(model, results) <= 1e-9
    finally:
        jax.config.update("jax_enable_x64", False)


def test_alone_or_among_sixty_three_others_in_any_order_is_bit_equal(engine):
    """Sessions of all lengths and two turns over six slots, so that many are parked and offloaded."""

    async def crowd(engine, order):
        turns = {i: asyncio.create_task(converse(engine, f"t{i}", prompts_of(i, 1 + i % 2))) for i in order}
        return {i: await turn for i, turn in turns.items()}

    order = list(range(64))
    first = run(engine, lambda engine: crowd(engine, order))
    random.Random(1).shuffle(order)
    assert run(engine, lambda engine: crowd(engine, order)) == first
    for i in range(0, 64, 9):
        assert (
            run(engine, lambda engine, i=i: converse(engine, f"t{i}", prompts_of(i, 1 + i % 2))) == first[i]
        )


def test_low_temperature_logprobs_are_those_of_the_sampled_distribution(engine):
    sampling = Sampling(temperature=0.1, top_p=0.95)
    result = run(engine, lambda engine: converse(engine, "t", [[9, 8, 7]], sampling=sampling))
    for logprob, full in result["sampled"].values():
        assert full <= logprob + 1e-6 <= 1e-5


def test_nothing_compiles_after_warm_up(engine):
    async def work(engine: Engine):
        await engine.warm_up()
        before = engine.steps.programs()
        await asyncio.gather(*(converse(engine, f"x{i}", prompts_of(50 + i, 3)) for i in range(24)))
        trunk = engine.open_session()
        await ask(trunk, list(range(6, 40)))
        twin = trunk.fork()
        await ask(twin, [9])
        await engine.swap_weights(engine.params, version=engine.version + 1, cached="recompute")
        await ask(trunk, [9])
        return before, engine.steps.programs()

    before, after = run(engine, work)
    assert before == after


def test_what_the_host_keeps_comes_back_bit_for_bit_after_a_restart(engine):
    """The engine may be left and entered again: sessions then begin anew from their tokens."""

    async def first(engine):
        session = engine.open_session()
        await ask(session, list(range(6, 30)), max_tokens=5)
        return session

    session = run(engine, first)
    tokens = session.tokens
    out = run(engine, lambda engine: ask(session, [9], turn=1, max_tokens=4))
    assert session.tokens == (*tokens, 9, *out.tokens)
    session.close()
    assert nothing_leaked(engine)


def test_the_examples_of_the_readme_run():
    root = Path(__file__).parent.parent.parent
    text = (root / "jaxrl/engine/README.md").read_text()
    example, more = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # The second goes on where the first has its session.
    place = "        print(out.tokens, out.logprobs, out.finish)\n"
    assert place in example
    params = "params = engine.params\n"
    both = example.replace(place, place + textwrap.indent(params + more, " " * 8))
    script = "import contextlib\n" + both
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(("length", "stop")) and lines[-1].endswith(("length", "stop"))
    assert len(lines) > 3 and lines[1].endswith("None")
