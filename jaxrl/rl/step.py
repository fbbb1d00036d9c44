"""The two compiled halves of a training step: adding a microbatch, and applying the sum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl.rl.loss import LossSums
from jaxrl.rl.packing import Microbatch

SKIP_REASONS = ("", "no trained tokens", "gradient is not finite")


class Accumulator(NamedTuple):
    """What a step has gathered so far. Gradients are at least float32."""

    gradients: Any
    sums: LossSums
    filled: Float[Array, ""]  # positions that hold a token
    positions: Float[Array, ""]


def empty_accumulator(params: Any, sums: LossSums) -> Accumulator:
    """Zeros for parameters `params` and loss sums shaped like `sums`."""

    def zeros(leaf: Any) -> Array:
        return jnp.zeros_like(leaf, dtype=jnp.promote_types(leaf.dtype, jnp.float32))

    scalars = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums)
    return Accumulator(jax.tree.map(zeros, params), scalars, jnp.zeros(()), jnp.zeros(()))


def accumulate_step(
    evaluate: Callable[[Any, Any, Microbatch], LossSums], constrain: Callable[[Any], Any]
) -> Callable[[Any, Any, Accumulator, Microbatch], Accumulator]:
    """Returns (params, rest, accumulator, batch) -> accumulator with the batch's gradient added."""

    def numerator(params: Any, rest: Any, batch: Microbatch) -> tuple[Array, LossSums]:
        sums = evaluate(params, rest, batch)
        return sums.numerator, sums

    def step(params: Any, rest: Any, total: Accumulator, batch: Microbatch) -> Accumulator:
        gradients, sums = jax.grad(numerator, has_aux=True)(params, rest, batch)
        return Accumulator(
            constrain(jax.tree.map(jnp.add, total.gradients, gradients)),
            _combined(total.sums, sums),
            total.filled + (batch.segment_ids_BT > 0).sum(),
            total.positions + batch.segment_ids_BT.size,
        )

    return step


def apply_step(
    optimizer: optax.GradientTransformation, constrain: Callable[[Any], Any]
) -> Callable[[Any, Any, Accumulator], tuple[Any, Any, Accumulator, dict[str, Array]]]:
    """Returns (params, optimizer state, accumulator) -> (params, optimizer state, zeros, metrics).

    Metrics: loss, grad_norm (before clipping), update_norm, tokens (trained), denominator, fill
    (share of positions that held a token), skip_reason (index into `SKIP_REASONS`), and the
    loss's own means per trained token, counts and maxima.
    """

    def step(
        params: Any, opt_state: Any, total: Accumulator
    ) -> tuple[Any, Any, Accumulator, dict[str, Array]]:
        denominator = total.sums.denominator
        divisor = jnp.where(denominator > 0, denominator, 1.0)
        gradients = jax.tree.map(lambda g, p: (g / divisor).astype(p.dtype), total.gradients, params)
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(total.sums.numerator)
        reason = jnp.where(denominator > 0, jnp.where(finite, 0, 2), 1)
        updates, advanced = optimizer.update(gradients, opt_state, params)
        moved = optax.apply_updates(params, updates)
        params, opt_state = _where(reason == 0, (constrain(moved), advanced), (params, opt_state))
        metrics = _metrics(total, divisor) | {
            "grad_norm": norm,
            "update_norm": jnp.where(reason == 0, optax.tree.norm(updates), 0.0),
            "skip_reason": reason,
        }
        return params, opt_state, jax.tree.map(jnp.zeros_like, total), metrics

    return step


def _combined(total: LossSums, sums: LossSums) -> LossSums:
    added = jax.tree.map(jnp.add, total, sums)
    return added._replace(maxima=jax.tree.map(jnp.maximum, total.maxima, sums.maxima))


def _where(condition: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _metrics(total: Accumulator, divisor: Array) -> dict[str, Array]:
    sums = total.sums
    tokens = jnp.maximum(sums.tokens, 1.0)
    return {
        "loss": sums.numerator / divisor,
        "denominator": sums.denominator,
        "tokens": sums.tokens,
        "fill": total.filled / jnp.maximum(total.positions, 1.0),
        **{name: value / tokens for name, value in sums.means.items()},
        **sums.counts,
        **sums.maxima,
    }
