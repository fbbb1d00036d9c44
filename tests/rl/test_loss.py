"""Losses against a float64 reference in NumPy that walks over unpacked sequences token by token."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_helpers import random_examples

from jaxrl.rl.loss import CrossEntropy, PolicyLoss, Scores
from jaxrl.rl.packing import Microbatch, pack


def numbers(batch, *, seed=1):
    """Stand-ins for a model's output: scores, and log-probs of an older policy near the sampler's."""
    rng = np.random.default_rng(seed)
    shape = batch.tokens_BT.shape
    near = batch.sampler_logprobs_BT + rng.normal(0, 0.25, shape).astype(np.float32)
    old = batch.sampler_logprobs_BT + rng.normal(0, 0.1, shape).astype(np.float32)
    entropy = rng.random(shape).astype(np.float32)
    norm = rng.normal(0, 2, shape).astype(np.float32)
    scores = Scores(
        jnp.asarray(near), jnp.asarray(entropy), jnp.asarray(norm), jnp.asarray(0.37, jnp.float32)
    )
    return scores, batch._replace(old_logprobs_BT=old, reference_logprobs_BT=near - old)


def packed(examples):
    (batch,) = pack(examples, rows=max(len(examples), 1), row_length=16)
    return numbers(batch)


def sequences(scores, batch):
    """Per document: (weight, advantage, log-prob, sampler's, old, log-normaliser) of its trained tokens."""
    columns = [batch.weights_BT, batch.advantages_BT, scores.logprobs_BT]
    columns += [batch.sampler_logprobs_BT, batch.old_logprobs_BT, scores.norm_BT]
    columns = [np.asarray(column, np.float64) for column in columns]
    for row, segments in enumerate(batch.segment_ids_BT):
        for segment in range(1, segments.max(initial=0) + 1):
            places = [t for t in np.flatnonzero(segments == segment) if columns[0][row, t] > 0]
            yield [tuple(float(c[row, t]) for c in columns) for t in places]


def reference(loss, scores, batch):
    """(numerator, denominator, clipped low, clipped high, tokens) of a PolicyLoss."""
    numerator = denominator = 0.0
    low = high = tokens = 0
    for sequence in sequences(scores, batch):
        trainer = [old if loss.ratio == "recomputed" else lp for _, _, lp, _, old, _ in sequence]
        gaps = [t - s for t, (_, _, _, s, _, _) in zip(trainer, sequence, strict=True)]
        if not sequence:
            continue
        if loss.sequence_error_limit is not None:
            error = sum(math.exp(abs(gap)) for gap in gaps) / len(gaps)
            if error > loss.sequence_error_limit:
                continue
        geometric = math.exp(sum(gaps) / len(gaps))
        total = 0.0
        for (weight, advantage, lp, sampler, old, norm), gap in zip(sequence, gaps, strict=True):
            base = {"on_policy": lp, "sampler": sampler, "recomputed": old}[loss.ratio]
            ratio = math.exp(lp - base)
            bounded = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            importance = {
                "none": 1.0,
                "truncated": min(math.exp(gap), loss.importance_max),
                "sequence_mask": math.exp(gap)
                if loss.importance_min <= geometric <= loss.importance_max
                else 0.0,
            }[loss.importance]
            total += weight * importance * min(ratio * advantage, bounded * advantage)
            total -= loss.z_coefficient * weight * norm**2
            low += advantage < 0 and ratio < 1 - loss.clip_low
            high += advantage > 0 and ratio > 1 + loss.clip_high
            tokens += 1
        weights = sum(weight for weight, *_ in sequence)
        numerator -= {
            "token": total,
            "sequence": total / weights,
            "constant": total / (loss.constant_length or 1),
        }[loss.normalisation]
        denominator += weights if loss.normalisation == "token" else 1.0
    numerator += loss.aux_coefficient * float(scores.aux) * denominator
    return numerator, denominator, low, high, tokens


def gradient_reference(loss, scores, batch):
    """Central differences of the reference's numerator, with what is held constant held constant."""
    step, gradient = 1e-6, np.zeros(batch.tokens_BT.shape)
    base = np.asarray(scores.logprobs_BT, np.float64)
    frozen = _frozen(loss, scores, batch)
    for place in zip(*np.nonzero(batch.weights_BT), strict=True):
        values = []
        for sign in (1, -1):
            moved = base.copy()
            moved[place] += sign * step
            values.append(frozen(moved))
        gradient[place] = (values[0] - values[1]) / (2 * step)
    return gradient


def _frozen(loss, scores, batch):
    """Numerator as a function of the log-probs in which importance weights and masks do not move."""
    weights = np.asarray(batch.weights_BT, np.float64)
    lp0 = np.asarray(scores.logprobs_BT, np.float64)
    base = {"on_policy": lp0, "sampler": batch.sampler_logprobs_BT, "recomputed": batch.old_logprobs_BT}[
        loss.ratio
    ]
    scale = _token_scale(loss, scores, batch)
    advantages = np.asarray(batch.advantages_BT, np.float64)

    def value(lp):
        ratio = np.exp(np.where(weights > 0, lp - base, 0.0))
        bounded = np.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
        return -(scale * np.minimum(ratio * advantages, bounded * advantages)).sum()

    return value


def _token_scale(loss, scores, batch):
    """Factor of each token's surrogate, read off the reference by giving all others weight 0."""
    scale = np.zeros(batch.tokens_BT.shape)
    trainer = np.asarray(
        batch.old_logprobs_BT if loss.ratio == "recomputed" else scores.logprobs_BT, np.float64
    )
    for row, segments in enumerate(batch.segment_ids_BT):
        for segment in range(1, segments.max(initial=0) + 1):
            places = np.flatnonzero((segments == segment) & (batch.weights_BT[row] > 0))
            if not len(places):
                continue
            gaps = trainer[row, places] - np.asarray(batch.sampler_logprobs_BT, np.float64)[row, places]
            if loss.sequence_error_limit is not None and np.exp(abs(gaps)).mean() > loss.sequence_error_limit:
                continue
            inside = loss.importance_min <= math.exp(gaps.mean()) <= loss.importance_max
            importance = {
                "none": np.ones_like(gaps),
                "truncated": np.minimum(np.exp(gaps), loss.importance_max),
                "sequence_mask": np.exp(gaps) * inside,
            }[loss.importance]
            count = {"token": 1.0, "sequence": len(places), "constant": loss.constant_length}[
                loss.normalisation
            ]
            scale[row, places] = importance / count
    return scale


IMPORTANCE = [
    {"importance": "none"},
    {"importance": "truncated", "importance_max": 1.1},
    {"importance": "sequence_mask", "importance_min": 0.93, "importance_max": 1.08},
]
NORMALISATION = [
    {"normalisation": "token"},
    {"normalisation": "sequence"},
    {"normalisation": "constant", "constant_length": 7},
]
SETTINGS: list[dict[str, Any]] = [
    {
        "ratio": ratio,
        "clip_low": 0.1,
        "clip_high": 0.15,
        "sequence_error_limit": limit,
        "aux_coefficient": 0.5,
        "z_coefficient": 0.01,
    }
    | importance
    | normalisation
    for ratio, importance, normalisation, limit in itertools.product(
        ["on_policy", "sampler", "recomputed"], IMPORTANCE, NORMALISATION, [None, 1.3]
    )
    if ratio != "sampler" or importance["importance"] == "none"
]
VARIANTS = [PolicyLoss(**settings) for settings in SETTINGS]


@pytest.mark.parametrize("loss", VARIANTS, ids=range(len(VARIANTS)))
def test_value_counts_and_gradient_equal_the_reference(loss):
    scores, batch = packed(random_examples(24, seed=3))
    sums = loss(scores, batch)
    numerator, denominator, low, high, tokens = reference(loss, scores, batch)
    assert float(sums.numerator) == pytest.approx(numerator, rel=2e-5, abs=1e-5)
    assert float(sums.denominator) == pytest.approx(denominator, rel=1e-6)
    assert float(sums.tokens) == tokens
    assert (float(sums.means["clip_low_share"]), float(sums.means["clip_high_share"])) == (low, high)

    gradient = jax.grad(lambda lp: loss(scores._replace(logprobs_BT=lp), batch).numerator)(scores.logprobs_BT)
    np.testing.assert_allclose(gradient, gradient_reference(loss, scores, batch), rtol=1e-4, atol=1e-5)


def test_the_variants_exercise_every_mask():
    """The random batch has clipped tokens, sequences outside the importance bounds and beyond the limit."""
    scores, batch = packed(random_examples(24, seed=3))
    sampler = PolicyLoss(clip_low=0.1, clip_high=0.15, sequence_error_limit=1.3)(scores, batch)
    assert float(sampler.means["clip_low_share"]) > 0 and float(sampler.means["clip_high_share"]) > 0
    assert float(sampler.counts["dropped_tokens"]) > 0 and float(sampler.tokens) > 0
    masked = PolicyLoss(ratio="on_policy", **IMPORTANCE[2])(scores, batch)  # pyright: ignore[reportArgumentType]
    assert 0 < float(masked.means["importance_zero_share"]) < float(masked.tokens)


def test_sequences_dropped_by_importance_stay_in_the_denominator():
    scores, batch = packed(random_examples(24, seed=3))
    strict = PolicyLoss(ratio="on_policy", importance="sequence_mask", importance_min=5.0, importance_max=6.0)
    loose = PolicyLoss(ratio="on_policy", importance="sequence_mask", importance_min=0.0, importance_max=1e9)
    assert float(strict(scores, batch).numerator) == 0.0 != float(loose(scores, batch).numerator)
    assert float(strict(scores, batch).denominator) == float(loose(scores, batch).denominator) > 0


def test_gspo_by_token_gives_each_token_its_own_advantage():
    scores, batch = packed(random_examples(12, seed=3))
    rng = np.random.default_rng(0)
    mixed_BT = rng.normal(size=batch.advantages_BT.shape).astype(np.float32)
    settings: dict[str, Any] = {"normalisation": "sequence", "clip_low": 0.9, "clip_high": 9.0}

    def slope(objective, advantages_BT):
        loss, held = PolicyLoss(objective=objective, **settings), batch._replace(advantages_BT=advantages_BT)
        return jax.grad(lambda lp: loss(scores._replace(logprobs_BT=lp), held).numerator)(scores.logprobs_BT)

    equal = [np.asarray(slope(name, batch.advantages_BT)) for name in ("gspo", "gspo_token")]
    np.testing.assert_allclose(*equal, rtol=1e-4, atol=1e-6)
    whole, own = (np.asarray(slope(name, mixed_BT)) for name in ("gspo", "gspo_token"))
    for row, segments in enumerate(batch.segment_ids_BT):
        for segment in range(1, segments.max(initial=0) + 1):
            places = np.flatnonzero((segments == segment) & (batch.weights_BT[row] > 0))
            if not len(places):
                continue
            gaps = np.asarray(scores.logprobs_BT)[row, places] - batch.sampler_logprobs_BT[row, places]
            s = math.exp(gaps.astype(np.float64).mean())
            wanted = -s * mixed_BT[row, places] / len(places)
            np.testing.assert_allclose(own[row, places], wanted, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(whole[row, places], wanted.mean(), rtol=1e-4, atol=1e-6)


def test_masked_rows_leave_the_loss_of_the_kept_rows_alone():
    examples = random_examples(10, seed=5)
    masked = random_examples(10, seed=6, trained=False)
    kept_scores, kept = packed(examples)
    mixed = [e for pair in zip(examples, masked, strict=True) for e in pair]
    (batch,) = pack(mixed, rows=20, row_length=16)
    # The model's scores of a token do not depend on where it was packed.
    table = {}
    for row, place in zip(*np.nonzero(kept.weights_BT), strict=True):
        table[float(kept.sampler_logprobs_BT[row, place])] = float(kept_scores.logprobs_BT[row, place])
    lookup = np.vectorize(lambda lp: table.get(float(lp), 0.0), otypes=[np.float32])
    scores = Scores(
        jnp.asarray(lookup(batch.sampler_logprobs_BT)),
        jnp.zeros((20, 16)),
        jnp.zeros((20, 16)),
        jnp.zeros(()),
    )
    for loss in (PolicyLoss(), PolicyLoss(normalisation="sequence"), CrossEntropy()):
        alone, together = loss(kept_scores._replace(aux=jnp.zeros(())), kept), loss(scores, batch)
        assert float(together.numerator) == pytest.approx(float(alone.numerator), rel=1e-5)
        assert float(together.denominator) == float(alone.denominator)


def test_cross_entropy_weighs_tokens():
    examples = random_examples(8, seed=2)
    scaled = [type(e)(tokens_T=e.tokens_T, weights_T=e.weights_T * np.float32(0.3)) for e in examples[:4]]
    scores, batch = packed(scaled + examples[4:])
    sums = CrossEntropy(aux_coefficient=0.1, z_coefficient=0.01)(scores, batch)
    tokens = [token for sequence in sequences(scores, batch) for token in sequence]
    denominator = sum(w for w, *_ in tokens)
    numerator = sum(w * (0.01 * norm**2 - lp) for w, _, lp, _, _, norm in tokens) + 0.1 * 0.37 * denominator
    assert float(sums.numerator) == pytest.approx(numerator, rel=1e-5)
    assert float(sums.denominator) == pytest.approx(denominator, rel=1e-5)
    assert float(sums.tokens) == len(tokens)


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        PolicyLoss(ratio="recomputed", importance="sequence_mask", sequence_error_limit=5.0),
        PolicyLoss(ratio="on_policy", kl_coefficient=0.1),
        PolicyLoss(objective="gspo", normalisation="sequence", clip_high=4.0),
        PolicyLoss(objective="gspo_token", normalisation="sequence", clip_high=4.0),
        PolicyLoss(objective="cispo"),
        PolicyLoss(clip_c=3.0),
    ],
)
def test_garbage_at_untrained_positions_reaches_neither_value_nor_gradient(loss):
    scores, batch = packed(random_examples(6, seed=4))
    hole_BT = np.asarray(batch.weights_BT) == 0
    bad = Microbatch(
        *batch[:5],
        advantages_BT=np.where(hole_BT, np.nan, batch.advantages_BT).astype(np.float32),
        sampler_logprobs_BT=np.where(hole_BT, np.inf, batch.sampler_logprobs_BT).astype(np.float32),
        old_logprobs_BT=np.where(hole_BT, np.nan, batch.old_logprobs_BT).astype(np.float32),
        reference_logprobs_BT=np.where(hole_BT, np.nan, batch.reference_logprobs_BT).astype(np.float32),
    )
    dirty = scores._replace(
        logprobs_BT=jnp.where(hole_BT, -jnp.inf, scores.logprobs_BT),
        entropy_BT=jnp.where(hole_BT, jnp.nan, scores.entropy_BT),
    )
    clean, noisy = loss(scores, batch), loss(dirty, bad)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(noisy), strict=True):
        assert float(a) == float(b)
    gradient = jax.grad(lambda lp: loss(dirty._replace(logprobs_BT=lp), bad).numerator)(dirty.logprobs_BT)
    assert bool(jnp.isfinite(gradient).all()) and float(jnp.abs(gradient).max()) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": "sampler", "importance": "truncated"},
        {"normalisation": "constant"},
        {"normalisation": "token", "constant_length": 3},
        {"objective": "gspo"},
        {"objective": "gspo_token", "normalisation": "constant", "constant_length": 3},
        {"clip_c": 1.0},
        {"clip_c": 3.0, "objective": "cispo"},
        {"importance_min": 2.1},
    ],
)
def test_contradictory_settings_are_refused(settings):
    with pytest.raises(ValueError, match="expected"):
        PolicyLoss(**settings)
