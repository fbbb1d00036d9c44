"""How new weights reach the engine: on a drained engine, or while it generates for later steps."""

import asyncio
import time
from concurrent.futures import Executor
from typing import Literal

from flax import nnx

from jaxrl.engine.engine import Engine
from jaxrl.rl.learner import Learner


class WeightHandOver:
    """Publishes a learner's weights to an engine.

    Args:
        policy: None if no session is open then, as in synchronous training; the engine and the learner then
            share one copy of the weights. Otherwise the engine gets a copy of its own, since it goes on
            generating while the learner's next update overwrites its weights: "drain" lets running turns
            end first, "in_flight" swaps in the middle of them.
        device: the executor of device jobs.
    """

    def __init__(
        self,
        engine: Engine,
        learner: Learner,
        *,
        policy: Literal["drain", "in_flight"] | None,
        device: Executor,
    ) -> None:
        self._engine, self._learner, self._device = engine, learner, device
        self._policy: Literal["drain", "in_flight"] | None = policy

    async def publish(self) -> float:
        """Hands the weights over; returns the seconds until the engine uses them.

        Raises:
            EngineError: a session is open without a policy, or the engine stops meanwhile.
        """
        started, version = time.perf_counter(), self._learner.version
        if self._policy is None:
            self._engine.set_weights(nnx.state(self._learner.model()), version=version)
        else:
            loop = asyncio.get_running_loop()
            weights = await loop.run_in_executor(self._device, self._learner.snapshot)
            await self._engine.swap_weights(weights, version=version, policy=self._policy)
        return time.perf_counter() - started
