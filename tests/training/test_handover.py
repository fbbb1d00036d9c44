"""Weights reach the engine: at once where it is drained, as a copy of their own where it generates."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxrl.engine.engine import EngineError
from jaxrl.handover import WeightHandOver


class Module(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))


class FakeLearner:
    def __init__(self) -> None:
        self.version, self.held = 7, Module()

    def model(self) -> Module:
        return self.held

    def snapshot(self) -> Any:
        return nnx.state(Module())


class FakeEngine:
    """Takes weights at once only when nothing is open."""

    def __init__(self, *, open_sessions: int = 0) -> None:
        self.open_sessions, self.got = open_sessions, []

    def set_weights(self, params, *, version: int) -> None:
        if self.open_sessions:
            raise EngineError("weights can be set on a drained engine only")
        self.got.append((params, version, None))

    async def swap_weights(self, params, *, version: int, policy: str) -> None:
        await asyncio.sleep(0.02)
        self.got.append((params, version, policy))


def published(engine: FakeEngine, policy) -> tuple[float, FakeLearner]:
    learner = FakeLearner()

    async def main() -> float:
        with ThreadPoolExecutor(1) as device:
            made: Any = WeightHandOver
            return await made(engine, learner, policy=policy, device=device).publish()

    return asyncio.run(main()), learner


def test_a_drained_engine_shares_the_learners_weights():
    engine = FakeEngine()
    _, learner = published(engine, None)
    [(params, version, policy)] = engine.got
    assert (version, policy) == (7, None)
    assert nnx.to_pure_dict(params)["w"] is nnx.to_pure_dict(nnx.state(learner.held))["w"]


def test_an_open_session_is_an_error_in_synchronous_training():
    with pytest.raises(EngineError, match="drained"):
        published(FakeEngine(open_sessions=1), None)


@pytest.mark.parametrize("policy", ["drain", "in_flight"])
def test_a_generating_engine_gets_a_copy_that_updates_leave_alone(policy):
    engine = FakeEngine(open_sessions=3)
    seconds, learner = published(engine, policy)
    [(params, version, used)] = engine.got
    assert (version, used) == (7, policy) and seconds >= 0.02
    assert nnx.to_pure_dict(params)["w"] is not nnx.to_pure_dict(nnx.state(learner.held))["w"]
