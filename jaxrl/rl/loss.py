"""Losses as sums, so that microbatches add up to exactly the batch's gradient. Pure JAX.

A loss returns a numerator and a denominator. The learner adds both over the microbatches of a
step and divides once; nothing is ever averaged per microbatch. Arrays are aligned with
predictions, as in `jaxrl.rl.packing.Microbatch`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxrl.rl.packing import Microbatch


class Scores(NamedTuple):
    """What a model says about a microbatch's targets.

    `aux` is a scalar that the loss may add, such as the router's load-balancing loss; it must be
    a mean per token of the microbatch. 0 where there is none.
    """

    logprobs_BT: Float[Array, "B T"]
    entropy_BT: Float[Array, "B T"]
    norm_BT: Float[Array, "B T"]  # log-normaliser of the softmax
    aux: Float[Array, ""]


class LossSums(NamedTuple):
    """Sums over one microbatch; adding them over microbatches gives the batch's.

    The loss is numerator / denominator; `means` and `tokens` (trained tokens) are reported as
    means / tokens, `counts` as they are; `maxima` combine by maximum.
    """

    numerator: Float[Array, ""]
    denominator: Float[Array, ""]
    tokens: Float[Array, ""]
    means: Mapping[str, Float[Array, ""]]
    counts: Mapping[str, Float[Array, ""]]
    maxima: Mapping[str, Float[Array, ""]]


type Loss = Callable[[Scores, Microbatch], LossSums]


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Weighted next-token cross-entropy, normalised by the sum of weights.

    z_coefficient: weight of the squared log-normaliser (the z-loss of PaLM, arXiv:2204.02311, section 5).
        It leaves probabilities free and keeps logits small, hence exact: a logit of 20 holds a
        log-probability only to 2e-6 in float32.
    """

    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0

    def __call__(self, scores: Scores, batch: Microbatch) -> LossSums:
        """Numerator: -sum of weight * log-prob. `batch` supplies the weights."""
        weights_BT = jnp.asarray(batch.weights_BT)
        denominator = weights_BT.sum()
        numerator = -_masked_sum(weights_BT, scores.logprobs_BT)
        numerator += self.z_coefficient * _masked_sum(weights_BT, scores.norm_BT**2)
        numerator += self.aux_coefficient * scores.aux * denominator
        trained_BT = weights_BT > 0
        tokens = _count(trained_BT)
        means = _model_means(scores, trained_BT)
        return LossSums(numerator, denominator, tokens, means, counts={}, maxima={})


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The clipped policy-gradient loss of PPO with the corrections that GRPO variants add.

    ratio: what the policy is compared with. `on_policy` pins the ratio to 1 (its gradient is the
        plain policy gradient, clipping is inert); `sampler` takes the log-probs that the sampler
        returned; `recomputed` takes `old_logprobs_BT`, the trainer's own before the first update.
    importance: weight of a token for the gap between sampler and trainer. `truncated` is
        min(w, importance_max); `sequence_mask` leaves w untruncated and drops sequences whose
        geometric mean of w is outside [importance_min, importance_max]. Dropped sequences stay
        in the denominator.
    normalisation: `token` divides by the number of trained tokens, `sequence` averages over each
        sequence first, `constant` divides the sum by `constant_length` per sequence (Dr.GRPO).
    z_coefficient: weight of the squared log-normaliser, as in `CrossEntropy`.
    sequence_error_limit: sequences whose mean exp|sampler - trainer| exceeds it are dropped from
        numerator and denominator. None: no limit.
    """

    ratio: Literal["on_policy", "sampler", "recomputed"] = "sampler"
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance: Literal["none", "truncated", "sequence_mask"] = "none"
    importance_min: float = 0.0
    importance_max: float = 2.0
    normalisation: Literal["token", "sequence", "constant"] = "token"
    constant_length: int | None = None
    sequence_error_limit: float | None = None
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if self.ratio == "sampler" and self.importance != "none":
            raise ValueError(
                f"expected importance none with ratio sampler, got {self.importance!r}: that ratio "
                "already holds the correction; choose ratio on_policy or recomputed"
            )
        if (self.normalisation == "constant") != (self.constant_length is not None):
            raise ValueError(
                f"expected constant_length exactly with normalisation constant, got "
                f"{self.normalisation!r} and {self.constant_length}"
            )

    def __call__(self, scores: Scores, batch: Microbatch) -> LossSums:
        """Numerator: the negative surrogate objective of the trained tokens, summed."""
        batch = Microbatch(*map(jnp.asarray, batch))
        logprobs_BT = scores.logprobs_BT
        trainer_BT = self._trainer_logprobs(logprobs_BT, batch)
        kept_BT = batch.weights_BT * self._within_error_limit(trainer_BT, batch)
        surrogate_BT, clipped = self._surrogate(logprobs_BT, kept_BT, batch)
        importance_BT = self._importance(trainer_BT, kept_BT, batch)
        scaled_BT, denominator = self._normalised(kept_BT, batch)
        numerator = -_masked_sum(scaled_BT * importance_BT, surrogate_BT)
        numerator += self.z_coefficient * _masked_sum(scaled_BT, scores.norm_BT**2)
        numerator += self.aux_coefficient * scores.aux * denominator
        trained_BT = kept_BT > 0
        error_BT = jnp.where(trained_BT, jnp.abs(stop_gradient(logprobs_BT) - batch.sampler_logprobs_BT), 0.0)
        means = (
            _model_means(scores, trained_BT)
            | clipped
            | {
                "logprob_error": error_BT.sum(),
                "importance_zero_share": _count(trained_BT & (importance_BT == 0)),
            }
        )
        counts = {"dropped_tokens": _count((batch.weights_BT > 0) & ~trained_BT)}
        maxima = {"logprob_error_max": error_BT.max()}
        return LossSums(numerator, denominator, _count(trained_BT), means, counts, maxima)

    def _old_logprobs(self, logprobs_BT: Array, batch: Microbatch) -> Array:
        match self.ratio:
            case "on_policy":
                return stop_gradient(logprobs_BT)
            case "sampler":
                return jnp.asarray(batch.sampler_logprobs_BT)
            case "recomputed":
                return jnp.asarray(batch.old_logprobs_BT)

    def _trainer_logprobs(self, logprobs_BT: Array, batch: Microbatch) -> Array:
        """The trainer's log-probs under the weights that the ratio starts from."""
        if self.ratio == "recomputed":
            return jnp.asarray(batch.old_logprobs_BT)
        return stop_gradient(logprobs_BT)

    def _surrogate(
        self, logprobs_BT: Array, kept_BT: Array, batch: Microbatch
    ) -> tuple[Array, dict[str, Array]]:
        trained_BT = kept_BT > 0
        log_ratio_BT = jnp.where(trained_BT, logprobs_BT - self._old_logprobs(logprobs_BT, batch), 0.0)
        ratio_BT = jnp.exp(log_ratio_BT)
        advantages_BT = jnp.asarray(batch.advantages_BT)
        bounded_BT = jnp.clip(ratio_BT, 1 - self.clip_low, 1 + self.clip_high)
        surrogate_BT = jnp.minimum(ratio_BT * advantages_BT, bounded_BT * advantages_BT)
        low_BT = (ratio_BT < 1 - self.clip_low) & (advantages_BT < 0)
        high_BT = (ratio_BT > 1 + self.clip_high) & (advantages_BT > 0)
        clipped = {
            "clip_low_share": _count(low_BT & trained_BT),
            "clip_high_share": _count(high_BT & trained_BT),
            "ratio": _masked_sum(trained_BT, stop_gradient(ratio_BT)),
        }
        return surrogate_BT, clipped

    def _importance(self, trainer_BT: Array, kept_BT: Array, batch: Microbatch) -> Array:
        gap_BT = jnp.where(kept_BT > 0, trainer_BT - batch.sampler_logprobs_BT, 0.0)
        if self.importance == "none":
            return jnp.ones_like(gap_BT)
        if self.importance == "truncated":
            return jnp.minimum(jnp.exp(gap_BT), self.importance_max)
        geometric_BT = jnp.exp(_sequence_mean(gap_BT, kept_BT, batch))
        inside_BT = (geometric_BT >= self.importance_min) & (geometric_BT <= self.importance_max)
        weight_BT = jnp.exp(gap_BT)
        return jnp.where(inside_BT & jnp.isfinite(weight_BT), weight_BT, 0.0)

    def _within_error_limit(self, trainer_BT: Array, batch: Microbatch) -> Array:
        if self.sequence_error_limit is None:
            return jnp.ones_like(trainer_BT)
        trained_BT = jnp.asarray(batch.weights_BT) > 0
        gap_BT = jnp.where(trained_BT, trainer_BT - batch.sampler_logprobs_BT, 0.0)
        error_BT = _sequence_mean(jnp.exp(jnp.abs(gap_BT)), batch.weights_BT, batch)
        # `not >` instead of `<=`: a NaN must reach the gradient check, not vanish as a masked sequence.
        return jnp.where(error_BT > self.sequence_error_limit, 0.0, 1.0)

    def _normalised(self, kept_BT: Array, batch: Microbatch) -> tuple[Array, Array]:
        """Token weights of the numerator, and the microbatch's share of the denominator."""
        if self.normalisation == "token":
            return kept_BT, kept_BT.sum()
        count_BT = _sequence_sum(kept_BT, batch)
        sequences = _count(_segment_sums(kept_BT, batch)[:, 1:] > 0)
        if self.normalisation == "sequence":
            return kept_BT / jnp.where(count_BT > 0, count_BT, 1.0), sequences
        assert self.constant_length is not None
        return kept_BT / self.constant_length, sequences


def _model_means(scores: Scores, trained_BT: Array) -> dict[str, Array]:
    scores = stop_gradient(scores)
    return {
        "entropy": _masked_sum(trained_BT, scores.entropy_BT),
        "aux_loss": scores.aux * _count(trained_BT),
    }


def _count(mask_BT: Array) -> Array:
    return mask_BT.sum().astype(jnp.float32)


def _masked_sum(weights_BT: Array, values_BT: Array) -> Array:
    """Sum of weight * value in which a value at weight 0 cannot make a NaN, nor its gradient."""
    weights_BT = jnp.asarray(weights_BT)
    return (weights_BT * jnp.where(weights_BT != 0, values_BT, 0.0)).sum()


def _segment_sums(values_BT: Array, batch: Microbatch) -> Array:
    """Sum of each row's values by segment, [B, T + 1]; column 0 is padding's."""
    length = values_BT.shape[1]

    def row(values_T: Array, segment_ids_T: Array) -> Array:
        return jax.ops.segment_sum(values_T, segment_ids_T, num_segments=length + 1)

    return jax.vmap(row)(values_BT, jnp.asarray(batch.segment_ids_BT))


def _sequence_sum(values_BT: Array, batch: Microbatch) -> Array:
    """Each token gets the sum over its own document."""
    sums_BT = _segment_sums(values_BT, batch)
    return jnp.take_along_axis(sums_BT, jnp.asarray(batch.segment_ids_BT), axis=1)


def _sequence_mean(values_BT: Array, weights_BT: Array, batch: Microbatch) -> Array:
    """Each token gets the mean over its document's tokens of weight > 0; 0 where there is none."""
    mask_BT = (jnp.asarray(weights_BT) > 0).astype(values_BT.dtype)
    count_BT = _sequence_sum(mask_BT, batch)
    return _sequence_sum(mask_BT * values_BT, batch) / jnp.maximum(count_BT, 1.0)
