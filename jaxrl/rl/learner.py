"""Holds the weights being trained, and turns microbatches into updates.

Gradients are summed, unnormalised, as microbatches arrive; `apply` divides once by the batch's
denominator and makes one optimizer update. That equals the gradient of the whole batch, however
it was cut into microbatches. Reinforcement learning and supervised training differ only in the
loss they pass.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from jaxrl.rl.loss import Loss, Scores
from jaxrl.rl.optimizer import OptimizerOptions, learning_rate_schedule, optimizer, optimizer_shardings
from jaxrl.rl.packing import Microbatch
from jaxrl.rl.parameters import Direct, Parametrisation
from jaxrl.rl.step import SKIP_REASONS, Accumulator, accumulate_step, apply_step, empty_accumulator

type Scorer = Callable[[Any, Microbatch], Scores]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where arrays live. `parameters` is a tree of shardings like the model's whole nnx state."""

    mesh: Mesh
    parameters: Any
    batch: PartitionSpec


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """One call of `Learner.apply`.

    `skipped` says why nothing was updated, and is empty otherwise. `version` is the version of
    the weights after the call. Metrics are numbers of the step; see `jaxrl.rl.step.apply_step`.
    """

    applied: bool
    skipped: str
    version: int
    metrics: Mapping[str, float]


class Learner[M: nnx.Module]:
    """Trains a Flax NNX module.

    Args:
        model: its variables move into the learner; `snapshot` gives them back. A model of shapes with
            shardings (`nnx.eval_shape`) makes a learner that can do nothing but `lowered`.
        score: log-probs and entropy of a microbatch's targets under a model.
        loss: what to minimise.
        options: the optimizer's settings.
        parameters: what is trained of the model. Default: every `nnx.Param`.
        reference: the whole nnx state of a like model, which stays as it is: each microbatch that is
            accumulated gets this model's log-probs, without gradient. Default: none.
        placement: mesh and shardings. Default: JAX's default device.
    """

    def __init__(
        self,
        model: M,
        *,
        score: Scorer,
        loss: Loss,
        options: OptimizerOptions,
        parameters: Parametrisation | None = None,
        reference: Any = None,
        placement: Placement | None = None,
    ) -> None:
        self.version = 0
        self._placement = placement
        self._optimizer = optimizer(options)
        self._schedule = learning_rate_schedule(options)
        self._parameters = parameters or Direct()
        if placement is not None and not _is_abstract(nnx.state(model)):
            nnx.update(model, jax.device_put(nnx.state(model), placement.parameters))
            reference = None if reference is None else jax.device_put(reference, placement.parameters)
        self._graph, state = nnx.split(model)
        self._params, self._rest = self._parameters.split(state)
        self._reference = reference
        self._opt_state = self._placed_optimizer_state()
        self._accumulator: Accumulator | None = None
        self._pending = 0
        self._compile(self._graph, score, loss)

    def accumulate(self, batch: Microbatch) -> None:
        """Adds the gradient and metric sums of one microbatch, without waiting for the device."""
        batch = self._placed_batch(batch)
        if self._reference is not None:
            reference_BT = self._reference_logprobs(self._reference, batch)
            batch = batch._replace(reference_logprobs_BT=reference_BT)
        if self._accumulator is None:
            sums = jax.eval_shape(self._evaluate, self._params, self._rest, batch)
            self._accumulator = empty_accumulator(self._params, sums)
        self._accumulator = self._accumulate(self._params, self._rest, self._accumulator, batch)
        self._pending += 1

    def apply(self) -> UpdateReport:
        """Divides by the batch's denominator, clips, updates, and clears what was accumulated.

        With no trained tokens, or a gradient that is not finite, the weights, the optimizer and
        its schedule stay as they were and the report says so. Waits for the device.
        """
        if self._accumulator is None or self._pending == 0:
            return UpdateReport(
                applied=False, skipped=SKIP_REASONS[1], version=self.version, metrics={"tokens": 0.0}
            )
        learning_rate = np.asarray(self._schedule(self.version)).item()
        self._params, self._opt_state, self._accumulator, outcome = self._apply(
            self._params, self._opt_state, self._accumulator
        )
        self._pending = 0
        metrics = {name: float(value) for name, value in jax.device_get(outcome).items()}
        skipped = SKIP_REASONS[int(metrics.pop("skip_reason"))]
        self.version += not skipped
        metrics["learning_rate"] = learning_rate
        return UpdateReport(applied=not skipped, skipped=skipped, version=self.version, metrics=metrics)

    def update(self, batches: Iterable[Microbatch]) -> UpdateReport:
        """`accumulate` for each microbatch, then `apply`."""
        for batch in batches:
            self.accumulate(batch)
        return self.apply()

    def logprobs(self, batch: Microbatch) -> Float[np.ndarray, "B T"]:
        """The current weights' log-probs of the targets, float32; meaningless where weight is 0."""
        return np.asarray(self._logprobs(self._params, self._rest, self._placed_batch(batch)))

    def with_old_logprobs(self, batch: Microbatch) -> Microbatch:
        """The batch with `old_logprobs_BT` from the current weights, for the ratio `recomputed`."""
        return batch._replace(old_logprobs_BT=self.logprobs(batch))

    def snapshot(self) -> Any:
        """A copy of the model's whole `nnx.State`, which later updates leave alone."""
        return jax.tree.map(jnp.copy, self._parameters.merge(self._params, self._rest))

    def model(self) -> M:
        """The module with the current weights, which the next `apply` consumes."""
        return nnx.merge(self._graph, self._parameters.merge(self._params, self._rest))

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint needs, as a tree of live arrays: valid until the next `apply`."""
        rest = self._parameters.saved(self._rest)
        return {"params": self._params, "rest": rest, "optimizer": self._opt_state}

    def load(self, state: Mapping[str, Any], *, version: int) -> None:
        """Takes over a tree like that of `state()`; what was accumulated is dropped.

        Raises:
            ValueError: it belongs to another model's weights.
        """
        self._rest = self._parameters.restored(state["rest"], self._rest)
        self._params, self._opt_state = state["params"], state["optimizer"]
        self.version = version
        self._accumulator, self._pending = None, 0

    def lowered(self, batch: Microbatch) -> dict[str, Any]:
        """`accumulate` for microbatches like `batch` and `apply`, lowered for the placement; nothing is run.

        Leaves of `batch` need only shape and dtype.
        """
        assert self._placement is not None, "lowering is for a placed learner"
        place = NamedSharding(self._placement.mesh, self._placement.batch)
        batch = jax.tree.map(lambda leaf: _shape_at(leaf, place), batch)
        sums = jax.eval_shape(self._evaluate, self._params, self._rest, batch)
        total = jax.eval_shape(lambda params: empty_accumulator(params, sums), self._params)
        places = jax.tree.map(lambda _: self._everywhere(), total)
        places = places._replace(gradients=jax.tree.map(lambda leaf: leaf.sharding, self._params))
        total = jax.tree.map(_shape_at, total, places)
        return {
            "accumulate": self._accumulate.lower(self._params, self._rest, total, batch),
            "apply": self._apply.lower(self._params, self._opt_state, total),
        }

    def _compile(self, graph: Any, score: Scorer, loss: Loss) -> None:
        merge = self._parameters.merge

        def scores(params: Any, rest: Any, batch: Microbatch) -> Scores:
            return score(nnx.merge(graph, merge(params, rest)), batch)

        def evaluate(params: Any, rest: Any, batch: Microbatch) -> Any:
            return loss(scores(params, rest, batch), batch)

        constrain = self._constraint()
        self._evaluate = evaluate
        self._logprobs = jax.jit(lambda *args: scores(*args).logprobs_BT)
        self._reference_logprobs = jax.jit(
            lambda state, batch: score(nnx.merge(graph, state), batch).logprobs_BT
        )
        self._accumulate = jax.jit(accumulate_step(evaluate, constrain), donate_argnums=2)
        self._apply = jax.jit(apply_step(self._optimizer, constrain), donate_argnums=(0, 1, 2))

    def _constraint(self) -> Callable[[Any], Any]:
        """Keeps parameter-shaped trees on the parameters' shardings inside a compiled step."""
        if self._placement is None:
            return lambda tree: tree
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._params)
        return lambda tree: jax.lax.with_sharding_constraint(tree, shardings)

    def _placed_optimizer_state(self) -> Any:
        if self._placement is None:
            return jax.jit(self._optimizer.init)(self._params)
        state = jax.eval_shape(self._optimizer.init, self._params)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._params)
        places = optimizer_shardings(self._optimizer, state, shardings, replicated=self._everywhere())
        if _is_abstract(self._params):
            return jax.tree.map(_shape_at, state, places)
        # Placed as they are made: no device could hold the moments of a large model for a moment.
        return jax.jit(self._optimizer.init, out_shardings=places)(self._params)

    def _everywhere(self) -> NamedSharding:
        assert self._placement is not None
        return NamedSharding(self._placement.mesh, PartitionSpec())

    def _placed_batch(self, batch: Microbatch) -> Microbatch:
        if self._placement is None:
            return batch
        return jax.device_put(batch, NamedSharding(self._placement.mesh, self._placement.batch))


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _shape_at(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
