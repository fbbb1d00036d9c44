"""The experts that the engine's tokens went to, all the way into the trainer's forward pass."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxrl.contracts import Outcome, SampleKey, Sampling, Trajectory, TrajectoryGroup
from jaxrl.engine.engine import Engine, EngineOptions
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer
from jaxrl.rl.examples import GroupOptions, group_examples
from jaxrl.rl.learner import Learner
from jaxrl.rl.loss import PolicyLoss
from jaxrl.rl.optimizer import OptimizerOptions
from jaxrl.rl.packing import Microbatch, pack
from jaxrl.rl.scoring import TransformerScorer
from jaxrl.rollout.transcript import Transcript

OPTIONS = EngineOptions(
    slots=4,
    context=64,
    page_size=8,
    prefill_rows=2,
    prefill_buckets=(16,),
    decode_steps=3,
    routed_experts=True,
)


def transformer(noise: float = 0.0) -> Transformer:
    """An untrained model of two layers, with noise on its routers."""
    spec = replace(PRESETS["quickstart"], vocab_size=32, layer_types=("linear_attention", "full_attention"))
    model, rng = Transformer(spec, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    layers: Any = model.layers
    for router in (layer.mlp.router for layer in layers):
        router[...] = router[...] + noise * rng.standard_normal(router.shape).astype(np.float32)
    return model


async def episode(engine: Engine, sample: int) -> Trajectory:
    """Two turns."""
    session, made = engine.open_session(), Transcript()
    for turn, given in enumerate(([5, 6, 7, 8, 9], [10 + sample, 11])):
        key = SampleKey(0, "t", 0, sample, turn)
        sampled = await session.generate(given, key=key, sampling=Sampling(), max_tokens=6 + sample)
        made.give(given, "tool" if turn else "prompt")
        made.sample(sampled)
    session.close()
    outcome = Outcome.RESOLVED if sample else Outcome.UNRESOLVED
    return made.trajectory(
        "t", epoch=0, sample=sample, outcome=outcome, reward=float(sample > 0), timings={}, detail=""
    )


@pytest.fixture(scope="module")
def batch() -> Microbatch:
    async def main() -> list[Trajectory]:
        async with Engine(transformer(), OPTIONS) as engine:
            return list(await asyncio.gather(*(episode(engine, sample) for sample in range(3))))

    group = TrajectoryGroup(task="t", epoch=0, trajectories=asyncio.run(main()))
    examples = group_examples(group, options=GroupOptions()).examples
    (made,) = pack(examples, rows=3, row_length=40)
    return made


def errors(batch: Microbatch, *, noise: float, replay: bool) -> np.ndarray:
    """|trainer - sampler| of every trained token."""
    learner = Learner(
        transformer(noise),
        score=TransformerScorer(replay=replay),
        loss=PolicyLoss(),
        options=OptimizerOptions(learning_rate=1e-3),
    )
    return np.abs(learner.logprobs(batch) - batch.sampler_logprobs_BT)[batch.weights_BT > 0]


def test_every_token_but_each_episodes_last_has_its_experts(batch):
    assert batch.routes_BTLX is not None
    known_BT = (batch.routes_BTLX >= 0).all((-1, -2))
    real_BT = batch.segment_ids_BT > 0
    assert real_BT.sum() - (known_BT & real_BT).sum() == 3 and not (known_BT & ~real_BT).any()
    chosen = np.sort(batch.routes_BTLX[known_BT], -1)
    assert (np.diff(chosen, axis=-1) > 0).all() and chosen.max() < 8


def test_trainer_and_sampler_agree_when_replayed(batch):
    assert errors(batch, noise=0.0, replay=True).max() <= 1e-5


def test_a_drifted_router_is_nearer_to_the_sampler_with_its_experts_replayed(batch):
    replayed, free = (errors(batch, noise=0.3, replay=replay).mean() for replay in (True, False))
    assert 0 < replayed < free
