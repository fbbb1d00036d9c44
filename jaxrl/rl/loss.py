"""Losses as sums, so that microbatches add up to exactly the batch's gradient. Pure JAX.

A loss returns a numerator and a denominator. The learner adds both over the microbatches of a
step and divides once; nothing is ever averaged per microbatch. Arrays are aligned with
predictions, as in `jaxrl.rl.packing.Microbatch`. The pieces that a loss is made of are in
`jaxrl.rl.losses`, one idea a file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxrl.rl.losses import importance, surrogate
from jaxrl.rl.losses.kl import KLEstimator, kl_estimate
from jaxrl.rl.losses.normalisation import Normalisation, normalised
from jaxrl.rl.losses.segments import count, masked_sum
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
        numerator = -masked_sum(weights_BT, scores.logprobs_BT)
        numerator += self.z_coefficient * masked_sum(weights_BT, scores.norm_BT**2)
        numerator += self.aux_coefficient * scores.aux * denominator
        trained_BT = weights_BT > 0
        means = _model_means(scores, trained_BT)
        return LossSums(numerator, denominator, count(trained_BT), means, counts={}, maxima={})


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The policy-gradient losses of PPO's family. Formulas and sources: `jaxrl/rl/README.md`.

    objective: `ppo` clips each token's ratio, `gspo` one ratio per sequence, `gspo_token` the same with
        each token's own gradient, `cispo` bounds the ratio as a weight of log-probs.
    ratio: what the policy is compared with. `on_policy` pins the ratio to 1 (its gradient is the
        plain policy gradient, clipping is inert); `sampler` takes the log-probs that the sampler
        returned; `recomputed` takes `old_logprobs_BT`, the trainer's own before the first update.
    clip_c: bound of dual clip on the ratio where the advantage is negative, above 1. None: no bound.
    importance: weight of a token for the gap between sampler and trainer. `truncated` is
        min(w, importance_max); `sequence_mask` leaves w untruncated and drops sequences whose
        geometric mean of w is outside [importance_min, importance_max]. Dropped sequences stay
        in the denominator.
    normalisation: `token` divides by the number of trained tokens, `sequence` averages over each
        sequence first, `constant` divides the sum by `constant_length` per sequence (Dr.GRPO).
    kl_coefficient: weight of the estimated distance to the reference, whose log-probs are
        `reference_logprobs_BT`; importance weights do not apply to it.
    z_coefficient: weight of the squared log-normaliser, as in `CrossEntropy`.
    sequence_error_limit: sequences whose mean exp|sampler - trainer| exceeds it are dropped from
        numerator and denominator. None: no limit.

    Raises:
        ValueError: settings that contradict one another.
    """

    objective: Literal["ppo", "gspo", "gspo_token", "cispo"] = "ppo"
    ratio: Literal["on_policy", "sampler", "recomputed"] = "sampler"
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_c: float | None = None
    importance: Literal["none", "truncated", "sequence_mask"] = "none"
    importance_min: float = 0.0
    importance_max: float = 2.0
    normalisation: Normalisation = "token"
    constant_length: int | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    sequence_error_limit: float | None = None
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for fits, words in self._rules():
            if not fits:
                raise ValueError(f"expected {words}")

    def _rules(self) -> list[tuple[bool, str]]:
        """(whether it holds, what was expected and got instead)."""
        return [
            (
                self.ratio != "sampler" or self.importance == "none",
                f"importance none with ratio sampler, got {self.importance!r}: that ratio already holds "
                "the correction; choose ratio on_policy or recomputed",
            ),
            (
                (self.normalisation == "constant") == (self.constant_length is not None),
                f"constant_length exactly with normalisation constant, got {self.normalisation!r} and "
                f"{self.constant_length}",
            ),
            (
                not self.objective.startswith("gspo") or self.normalisation == "sequence",
                f"normalisation sequence with objective {self.objective}, whose ratio is a sequence's, got "
                f"{self.normalisation!r}",
            ),
            (
                self.clip_c is None or (self.objective == "ppo" and self.clip_c > 1),
                f"clip_c above 1, and only with objective ppo, got {self.clip_c} with {self.objective}",
            ),
            (
                self.importance_min <= self.importance_max,
                f"importance_min of at most importance_max, got {self.importance_min} and "
                f"{self.importance_max}",
            ),
        ]

    def __call__(self, scores: Scores, batch: Microbatch) -> LossSums:
        """Numerator: the negative surrogate objective of the trained tokens, summed, and what is added."""
        batch = jax.tree.map(jnp.asarray, batch)
        trainer_BT = self._trainer_logprobs(scores.logprobs_BT, batch)
        kept_BT = batch.weights_BT * self._within_error_limit(trainer_BT, batch)
        trained_BT = kept_BT > 0
        made = self._surrogate(scores.logprobs_BT, kept_BT, batch)
        importance_BT = self._importance(trainer_BT, kept_BT, batch)
        scaled_BT, denominator = normalised(
            kept_BT,
            segment_ids_BT=batch.segment_ids_BT,
            normalisation=self.normalisation,
            constant_length=self.constant_length,
        )
        numerator = -masked_sum(scaled_BT * importance_BT, made.value_BT)
        numerator += self.z_coefficient * masked_sum(scaled_BT, scores.norm_BT**2)
        numerator += self.aux_coefficient * scores.aux * denominator
        means = _model_means(scores, trained_BT) | _ratio_means(made, trained_BT)
        if self.kl_coefficient:
            kl_BT = self._kl(scores.logprobs_BT, trained_BT, batch)
            numerator += self.kl_coefficient * masked_sum(scaled_BT, kl_BT)
            means["kl"] = masked_sum(trained_BT, stop_gradient(kl_BT))
        error_BT = jnp.abs(_gap(stop_gradient(scores.logprobs_BT), trained_BT, batch.sampler_logprobs_BT))
        means["logprob_error"] = error_BT.sum()
        means["importance_zero_share"] = count(trained_BT & (importance_BT == 0))
        counts = {"dropped_tokens": count((batch.weights_BT > 0) & ~trained_BT)}
        maxima = {"logprob_error_max": error_BT.max()}
        return LossSums(numerator, denominator, count(trained_BT), means, counts, maxima)

    def _trainer_logprobs(self, logprobs_BT: Array, batch: Microbatch) -> Array:
        """The trainer's log-probs under the weights that the ratio starts from."""
        return batch.old_logprobs_BT if self.ratio == "recomputed" else stop_gradient(logprobs_BT)

    def _surrogate(self, logprobs_BT: Array, kept_BT: Array, batch: Microbatch) -> surrogate.Surrogate:
        old_BT = {
            "on_policy": stop_gradient(logprobs_BT),
            "sampler": batch.sampler_logprobs_BT,
            "recomputed": batch.old_logprobs_BT,
        }[self.ratio]
        trained_BT, segments_BT = kept_BT > 0, batch.segment_ids_BT
        log_ratio_BT = _gap(logprobs_BT, trained_BT, old_BT)
        advantages_BT = jnp.where(trained_BT, batch.advantages_BT, 0.0)
        clip = surrogate.Clip(self.clip_low, self.clip_high, self.clip_c)
        match self.objective:
            case "cispo":
                logprobs_BT = jnp.where(trained_BT, logprobs_BT, 0.0)
                return surrogate.cispo(log_ratio_BT, advantages_BT, logprobs_BT=logprobs_BT, clip=clip)
            case "gspo":
                by_sequence = surrogate.sequence_log_ratio
                log_ratio_BT = by_sequence(log_ratio_BT, kept_BT, segment_ids_BT=segments_BT)
            case "gspo_token":
                by_token = surrogate.sequence_log_ratio_by_token
                log_ratio_BT = by_token(log_ratio_BT, kept_BT, segment_ids_BT=segments_BT)
            case "ppo":
                pass
        return surrogate.clipped(log_ratio_BT, advantages_BT, clip=clip)

    def _importance(self, trainer_BT: Array, kept_BT: Array, batch: Microbatch) -> Array:
        gap_BT = _gap(trainer_BT, kept_BT > 0, batch.sampler_logprobs_BT)
        match self.importance:
            case "none":
                return jnp.ones_like(gap_BT)
            case "truncated":
                return importance.truncated_weight(gap_BT, high=self.importance_max)
            case "sequence_mask":
                return importance.sequence_masked_weight(
                    gap_BT,
                    kept_BT,
                    segment_ids_BT=batch.segment_ids_BT,
                    low=self.importance_min,
                    high=self.importance_max,
                )

    def _within_error_limit(self, trainer_BT: Array, batch: Microbatch) -> Array:
        if self.sequence_error_limit is None:
            return jnp.ones_like(trainer_BT)
        gap_BT = _gap(trainer_BT, batch.weights_BT > 0, batch.sampler_logprobs_BT)
        return importance.within_error_limit(
            gap_BT,
            batch.weights_BT,
            segment_ids_BT=batch.segment_ids_BT,
            limit=self.sequence_error_limit,
        )

    def _kl(self, logprobs_BT: Array, trained_BT: Array, batch: Microbatch) -> Array:
        log_ratio_BT = _gap(logprobs_BT, trained_BT, batch.reference_logprobs_BT)
        return kl_estimate(log_ratio_BT, estimator=self.kl_estimator)


def _gap(logprobs_BT: Array, trained_BT: Array, other_BT: Array) -> Array:
    """Difference of log-probs; 0 where nothing is trained, whatever stands there."""
    return jnp.where(trained_BT, logprobs_BT - other_BT, 0.0)


def _ratio_means(made: surrogate.Surrogate, trained_BT: Array) -> dict[str, Array]:
    return {
        "clip_low_share": count(made.low_BT & trained_BT),
        "clip_high_share": count(made.high_BT & trained_BT),
        "clip_c_share": count(made.dual_BT & trained_BT),
        "ratio": masked_sum(trained_BT, stop_gradient(made.ratio_BT)),
    }


def _model_means(scores: Scores, trained_BT: Array) -> dict[str, Array]:
    scores = stop_gradient(scores)
    return {
        "entropy": masked_sum(trained_BT, scores.entropy_BT),
        "aux_loss": scores.aux * count(trained_BT),
    }
