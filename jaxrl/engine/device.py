"""What runs on the device thread: one job after another on the cache."""

import time

import jax
import numpy as np

from jaxrl.engine.costs import Costs
from jaxrl.engine.ops import Offload, Restore, apply
from jaxrl.engine.scheduler import Job
from jaxrl.engine.step import Emitted, Params, Steps

Result = Emitted | np.ndarray | None


class Device:
    """Holds weights and cache. Its methods block; call them on the device thread only."""

    def __init__(self, steps: Steps, params: Params, *, costs: Costs | None):
        """`costs` learns how long copies and prefills take; None: nothing is measured, or waited for."""
        self.steps, self.params, self._costs = steps, params, costs
        self.cache = steps.init_cache()

    def reset(self) -> None:
        """An empty cache, after a program has failed."""
        self.cache = self.steps.init_cache()

    def warm_up(self) -> None:
        """Compiles all programs."""
        self.cache = self.steps.warm_up(self.params, self.cache)

    def run(self, job: Job) -> tuple[Result, float, float]:
        """Moves, then the program; its result, and when all that began and ended (`time.perf_counter`)."""
        started = time.perf_counter()
        self._move(job)
        result = self._run_program(job)
        return result, started, time.perf_counter()

    def _move(self, job: Job) -> None:
        started = time.perf_counter()
        self.cache = apply(job.ops, self.steps, self.cache)
        copied = sum(op.stored.nbytes for op in job.ops if isinstance(op, Offload | Restore))
        if self._costs and copied:
            jax.block_until_ready(self.cache)
            self._costs.copied(copied, time.perf_counter() - started)

    def _run_program(self, job: Job) -> Result:
        if job.state is not None:
            self.cache, emitted = self.steps.generate(self.params, self.cache, job.state)
            return jax.tree.map(np.asarray, emitted)
        if job.pieces:
            return self._prefill(job)
        return None

    def _prefill(self, job: Job) -> np.ndarray | None:
        started = time.perf_counter()
        self.cache, routes = self.steps.prefill(self.params, self.cache, job.pieces, bucket=job.bucket)
        if self._costs:
            jax.block_until_ready(self.cache)
            tokens = sum(len(piece.tokens) for piece in job.pieces)
            self._costs.prefilled(tokens, time.perf_counter() - started)
        return np.asarray(routes) if self.steps.sizes.routed_experts else None
