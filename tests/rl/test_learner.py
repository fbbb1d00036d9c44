"""The learner: streamed sums equal the batch, skipped steps, masks, optimizer."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rl_helpers import random_examples, score, tiny_model

from jaxrl.rl.learner import Learner
from jaxrl.rl.loss import CrossEntropy, PolicyLoss
from jaxrl.rl.optimizer import OptimizerOptions
from jaxrl.rl.packing import pack
from jaxrl.rl.parameters import Direct

OPTIONS = OptimizerOptions(learning_rate=1e-2, b2=0.98, eps=1e-6, clip_norm=0.5)
LOSSES = {
    "cross_entropy": CrossEntropy(),
    "policy": PolicyLoss(),
    "policy_by_sequence": PolicyLoss(normalisation="sequence"),
    "dr_grpo": PolicyLoss(normalisation="constant", constant_length=9),
    "gspo": PolicyLoss(objective="gspo", normalisation="sequence", clip_low=0.1, clip_high=0.1),
    "gspo_token": PolicyLoss(objective="gspo_token", normalisation="sequence"),
    "cispo": PolicyLoss(objective="cispo", clip_high=1.0),
    "grpo_with_kl": PolicyLoss(normalisation="sequence", kl_coefficient=0.1),
    "mlperf": PolicyLoss(
        ratio="on_policy",
        importance="sequence_mask",
        importance_min=0.5,
        importance_max=1.5,
        sequence_error_limit=3.0,
    ),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def reference_of(loss):
    """Another model's weights, for a loss that has a reference policy."""
    return nnx.state(tiny_model(seed=1)) if getattr(loss, "kl_coefficient", 0) else None


@cache
def compiled(loss, options, twin):
    """Learners are reused, since compiling is what takes time; `twin` tells equal ones apart."""
    made = Learner(tiny_model(), score=score, loss=loss, options=options, reference=reference_of(loss))
    return made, jax.tree.map(jnp.copy, made.state())


def learner(loss=None, *, options=OPTIONS, twin=0):
    made, start = compiled(loss or PolicyLoss(), options, twin)
    made.load(jax.tree.map(jnp.copy, start), version=0)
    return made


def batches(examples, *, rows=3, row_length=16, **kwargs):
    return list(pack(examples, rows=rows, row_length=row_length, **kwargs))


def pure(state):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state))


def assert_close(left, right, *, relative):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.abs(a - b).max() <= relative * max(np.abs(a).max(), 1e-3)


def plain_gradient(loss, examples):
    """Gradient of the whole batch at once: one row per document, nothing packed or streamed."""
    (batch,) = batches(examples, rows=len(examples), row_length=64)
    return compiled_gradient(loss)(nnx.state(tiny_model()), batch)


@cache
def compiled_gradient(loss):
    graph, _ = nnx.split(tiny_model())
    reference = reference_of(loss)

    def value(params, batch):
        if reference is not None:
            others = score(nnx.merge(graph, reference), batch).logprobs_BT
            batch = batch._replace(reference_logprobs_BT=others)
        sums = loss(score(nnx.merge(graph, params), batch), batch)
        return sums.numerator / sums.denominator

    return jax.jit(jax.value_and_grad(value))


@every_loss
@pytest.mark.parametrize(("rows", "order"), [(1, "in_order"), (3, "first_fit_decreasing")])
def test_streamed_packed_gradient_is_the_plain_batch_gradient(loss, rows, order):
    examples = random_examples(20)
    subject = learner(loss)
    for batch in batches(examples, rows=rows, order=order):
        subject.accumulate(batch)
    total = subject._accumulator
    assert total is not None
    streamed = jax.tree.map(lambda g: g / total.sums.denominator, total.gradients)
    value, gradient = plain_gradient(loss, examples)
    assert_close(pure(gradient), pure(streamed), relative=1e-6)
    assert float(total.sums.numerator / total.sums.denominator) == pytest.approx(float(value), rel=1e-6)


@every_loss
def test_any_microbatch_size_gives_the_same_update(loss):
    examples = random_examples(20)
    results = []
    for rows in (1, 3):
        subject = learner(loss)
        report = subject.update(batches(examples, rows=rows))
        tokens = report.metrics["tokens"] + report.metrics.get("dropped_tokens", 0)
        results.append((pure(subject.snapshot()), report.metrics["grad_norm"], tokens))
    for params, norm, tokens in results[1:]:
        assert_close(results[0][0], params, relative=1e-5)
        assert norm == pytest.approx(results[0][1], rel=1e-5)
        assert tokens == results[0][2] == sum(int(e.weights_T.sum()) for e in examples)


def test_update_is_clipped_adamw():
    examples = random_examples(8)
    options = OptimizerOptions(learning_rate=1e-2, b1=0.8, b2=0.9, eps=1e-6, clip_norm=0.05, weight_decay=0.1)
    subject = learner(CrossEntropy(), options=options)
    before = pure(subject.snapshot())
    _, gradient = plain_gradient(CrossEntropy(), examples)
    gradient = pure(gradient)
    norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
    report = subject.update(batches(examples))
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0.05
    decay = jax.tree.map(lambda _: 0.1, before)
    decay["norm"]["scale"] = decay["head"]["bias"] = decay["hidden"]["bias"] = 0.0

    def expected(p, g, d):
        g = g * (0.05 / norm)
        return p - 1e-2 * (g / (np.abs(g) + 1e-6) + d * p)

    assert_close(jax.tree.map(expected, before, gradient, decay), pure(subject.snapshot()), relative=1e-5)


@every_loss
def test_step_without_trained_tokens_changes_nothing(loss):
    subject = learner(loss)
    subject.update(batches(random_examples(6)))
    before, optimizer = pure(subject.snapshot()), jax.tree.map(np.asarray, subject.state()["optimizer"])
    report = subject.update(batches(random_examples(6, trained=False)))
    assert (report.applied, report.skipped, report.version) == (False, "no trained tokens", 1)
    assert all(np.isfinite(value) for value in report.metrics.values())
    assert report.metrics["loss"] == report.metrics["tokens"] == report.metrics["update_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, before, pure(subject.snapshot()))
    jax.tree.map(
        np.testing.assert_array_equal, optimizer, jax.tree.map(np.asarray, subject.state()["optimizer"])
    )


def test_step_without_microbatches_is_skipped():
    report = learner().update([])
    assert (report.applied, report.skipped, report.version) == (False, "no trained tokens", 0)


def test_gradient_that_is_not_finite_is_skipped_and_the_next_step_is_clean():
    bad, clean = learner(), learner(twin=1)
    examples = random_examples(6)
    poisoned = [b._replace(advantages_BT=np.full_like(b.advantages_BT, np.inf)) for b in batches(examples)]
    report = bad.update(poisoned)
    assert (report.applied, report.skipped, report.version) == (False, "gradient is not finite", 0)
    for subject in (bad, clean):
        assert subject.update(batches(examples)).applied
    jax.tree.map(np.testing.assert_array_equal, pure(bad.snapshot()), pure(clean.snapshot()))


def test_old_logprobs_must_be_filled_for_the_recomputed_ratio():
    subject = learner(PolicyLoss(ratio="recomputed"))
    parts = batches(random_examples(6))
    assert subject.update(parts).skipped == "gradient is not finite"
    assert subject.update([subject.with_old_logprobs(part) for part in parts]).applied


def test_a_loss_with_a_reference_fails_visibly_without_one():
    loss = PolicyLoss(kl_coefficient=0.1)
    subject = Learner(tiny_model(), score=score, loss=loss, options=OPTIONS)
    assert subject.update(batches(random_examples(6))).skipped == "gradient is not finite"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_distance_to_the_reference_is_reported_and_is_that_of_the_two_models(estimator):
    loss = PolicyLoss(kl_coefficient=0.1, kl_estimator=estimator)
    (batch,) = batches(random_examples(6), rows=6)
    report = learner(loss).update([batch])
    own, other = (
        np.asarray(score(tiny_model(seed), batch).logprobs_BT, np.float64)[batch.weights_BT > 0]
        for seed in (0, 1)
    )
    d = own - other
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator].mean()
    assert report.metrics["kl"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert abs(expected) > 1e-4


def test_first_update_has_ratio_one_and_no_error_against_its_own_logprobs():
    subject = learner(PolicyLoss(ratio="sampler"))
    own = [part._replace(sampler_logprobs_BT=subject.logprobs(part)) for part in batches(random_examples(10))]
    first = subject.update(own).metrics
    assert first["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first["logprob_error_max"] <= 1e-6
    assert first["clip_low_share"] == first["clip_high_share"] == 0
    second = subject.update(own).metrics
    assert second["logprob_error_max"] > 1e-3


def test_frozen_parameters_stay_and_do_not_count_in_the_norm():
    def trainable(path, value):
        return "head" not in path

    subject, free = (
        Learner(
            tiny_model(), score=score, loss=CrossEntropy(), options=OPTIONS, parameters=Direct(trainable)
        ),
        learner(CrossEntropy()),
    )
    before = pure(subject.snapshot())
    parts = batches(random_examples(6))
    norm, whole = (s.update(parts).metrics["grad_norm"] for s in (subject, free))
    after = pure(subject.snapshot())
    jax.tree.map(np.testing.assert_array_equal, before["head"], after["head"])
    assert np.abs(before["hidden"]["kernel"] - after["hidden"]["kernel"]).max() > 0
    assert norm < whole


def test_supervised_training_learns():
    subject = learner(CrossEntropy())
    parts = batches(random_examples(4))
    losses = [subject.update(parts).metrics["loss"] for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    assert subject.version == 60


def test_snapshot_survives_later_updates():
    subject = learner()
    parts = batches(random_examples(6))
    subject.update(parts)
    snapshot = subject.snapshot()
    copied = pure(snapshot)
    subject.update(parts)
    jax.tree.map(np.testing.assert_array_equal, copied, pure(snapshot))


def test_state_round_trip_continues_bit_equal():
    first, second = learner(), learner(twin=1)
    parts = batches(random_examples(6))
    first.update(parts)
    saved = jax.tree.map(jnp.copy, first.state())
    first.update(parts)
    second.load(saved, version=1)
    second.update(parts)
    assert first.version == second.version == 2
    jax.tree.map(np.testing.assert_array_equal, pure(first.snapshot()), pure(second.snapshot()))


def test_compiles_once_per_function():
    subject = Learner(tiny_model(), score=score, loss=CrossEntropy(), options=OPTIONS)
    for step in range(3):
        subject.update(batches(random_examples(9, seed=step)))
    for function in (subject._accumulate, subject._apply):
        assert function._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_global_norm_of_metrics_matches_optax():
    subject = learner(CrossEntropy(), options=OptimizerOptions(learning_rate=1e-2, clip_norm=None))
    before = pure(subject.snapshot())
    report = subject.update(batches(random_examples(6)))
    moved = jax.tree.map(np.subtract, pure(subject.snapshot()), before)
    assert report.metrics["update_norm"] == pytest.approx(float(optax.tree.norm(moved)), rel=1e-4)
