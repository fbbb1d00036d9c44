"""AdamW with warm-up, decay of weight matrices only, and clipping of the global gradient norm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from jaxrl.rl.trees import path_names

UNDECAYED_NAMES = ("A_log", "dt_bias", "bias")


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Settings of `optimizer`.

    The learning rate rises linearly over `warmup_steps` updates (the first update already
    moves: it uses 1 / warmup_steps of the peak), then stays, or falls along a cosine to
    `final_learning_rate` at update `total_steps`.
    """

    learning_rate: float
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final_learning_rate: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.schedule == "cosine" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"expected total_steps above warmup_steps ({self.warmup_steps}) with schedule cosine, "
                f"got {self.total_steps}"
            )


def learning_rate_schedule(options: OptimizerOptions) -> optax.Schedule:
    """Learning rate as a function of the number of updates already made."""
    peak, warmup = options.learning_rate, options.warmup_steps
    if options.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        assert options.total_steps is not None
        after = optax.cosine_decay_schedule(
            peak, options.total_steps - warmup, alpha=options.final_learning_rate / peak
        )
    if warmup == 0:
        return after
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def optimizer(options: OptimizerOptions) -> optax.GradientTransformation:
    """Clipping, then AdamW."""
    adamw = optax.adamw(
        learning_rate_schedule(options),
        b1=options.b1,
        b2=options.b2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        mask=decay_mask,
    )
    if options.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(options.clip_norm), adamw)


def decay_mask(params: Any) -> Any:
    """Tree of booleans like `params`: True where weight decay applies."""
    return jax.tree_util.tree_map_with_path(lambda path, _: decays(path_names(path)), params)


def decays(names: Sequence[str]) -> bool:
    """Whether the parameter with this path is decayed: not norms, `A_log`, `dt_bias` or biases.

    By name and not by rank, since stacking the layers of a model adds an axis to every parameter.
    """
    return not any(name in UNDECAYED_NAMES or "norm" in name for name in names)


def optimizer_shardings(
    transformation: optax.GradientTransformation, state: Any, shardings: Any, *, replicated: Any
) -> Any:
    """Tree of shardings for an optimizer state: moments like their parameters, counters replicated."""
    return optax.tree_utils.tree_map_params(
        transformation,
        lambda _, sharding: sharding,
        state,
        shardings,
        transform_non_params=lambda _: replicated,
    )
