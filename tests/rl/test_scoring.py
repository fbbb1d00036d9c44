"""The learner with the real transformer: dense float64 oracle, packing, parameter names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rl_helpers import random_examples

from jaxrl.model.moe import balancing_loss
from jaxrl.model.spec import ModelSpec
from jaxrl.model.transformer import Transformer
from jaxrl.rl.learner import Learner
from jaxrl.rl.loss import PolicyLoss
from jaxrl.rl.optimizer import OptimizerOptions, decays
from jaxrl.rl.packing import pack
from jaxrl.rl.scoring import TransformerScorer
from jaxrl.rl.trees import flat

SPEC = ModelSpec(
    vocab_size=11,
    hidden_size=16,
    layer_types=("linear_attention", "full_attention"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rotary_dim=4,
    rope_theta=1e4,
    gdn_key_heads=1,
    gdn_value_heads=2,
    gdn_key_dim=8,
    gdn_value_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_dim=8,
    shared_expert_dim=8,
)


@pytest.fixture(scope="module")
def model():
    return Transformer(SPEC, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def batch():
    (packed,) = pack(random_examples(6, longest=8), rows=3, row_length=16)
    return packed


@pytest.fixture(scope="module")
def scores(model, batch):
    return jax.jit(lambda batch: TransformerScorer(temperature=0.7, chunk=5)(model, batch))(batch)


def where(batch):
    return {
        "segment_ids_BT": jnp.asarray(batch.segment_ids_BT),
        "positions_BT": jnp.asarray(batch.positions_BT),
    }


def dense(model, batch, temperature):
    """Log-probs, entropy in float64 from whole logits."""
    hidden_BTD = model(jnp.asarray(batch.tokens_BT), **where(batch))
    logits_BTV = np.asarray(model.logits(hidden_BTD), np.float64) / temperature
    logits_BTV -= logits_BTV.max(-1, keepdims=True)
    logprobs_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    targets_BT1 = batch.targets_BT[..., None]
    entropy_BT = -(np.exp(logprobs_BTV) * logprobs_BTV).sum(-1)
    return np.take_along_axis(logprobs_BTV, targets_BT1, -1)[..., 0], entropy_BT


def test_scores_equal_the_dense_softmax_at_the_samplers_temperature(model, batch, scores):
    logprobs_BT, entropy_BT = dense(model, batch, 0.7)
    np.testing.assert_allclose(scores.logprobs_BT, logprobs_BT, atol=2e-5)
    np.testing.assert_allclose(scores.entropy_BT, entropy_BT, atol=2e-5)


def test_aux_is_the_routers_balancing_loss_over_real_tokens(model, batch, scores):
    _, router = model.with_router(jnp.asarray(batch.tokens_BT), **where(batch))
    assert float(router.tokens) == (batch.segment_ids_BT > 0).sum()
    assert float(scores.aux) == pytest.approx(float(balancing_loss(router)), rel=1e-5)
    assert float(scores.aux) > 0


def test_weight_decay_follows_the_models_parameter_kinds(model):
    parameters = flat(nnx.state(model, nnx.Param))
    kinds = {name: decays(name.split("/")) for name in parameters}
    assert {name for name, leaf in parameters.items() if leaf.ndim == 1} == {
        n for n, d in kinds.items() if not d
    }
    assert {"layers/0/mixer/A_log", "layers/0/mixer/dt_bias", "layers/1/mixer/q_norm", "norm"} <= kinds.keys()


def test_first_update_is_on_policy_and_finite(batch):
    learner = Learner(
        Transformer(SPEC, rngs=nnx.Rngs(0)),
        score=TransformerScorer(),
        loss=PolicyLoss(aux_coefficient=1e-3),
        options=OptimizerOptions(learning_rate=1e-3),
    )
    own = batch._replace(sampler_logprobs_BT=learner.logprobs(batch))
    report = learner.update([own])
    assert report.applied
    assert report.metrics["logprob_error_max"] <= 1e-5
    assert report.metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert 0 < report.metrics["grad_norm"] < np.inf
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner.snapshot()))
