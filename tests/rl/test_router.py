"""Routers that are frozen, and routing that is replayed from the sampler."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rl_helpers import random_examples
from test_scoring import SPEC

from jaxrl.model.transformer import Transformer
from jaxrl.rl.learner import Learner
from jaxrl.rl.loss import PolicyLoss
from jaxrl.rl.optimizer import OptimizerOptions
from jaxrl.rl.packing import pack
from jaxrl.rl.parameters import Direct, without_router
from jaxrl.rl.scoring import TransformerScorer
from jaxrl.rl.trees import flat

OPTIONS = OptimizerOptions(learning_rate=1e-2)
REPLAY, FREE = TransformerScorer(replay=True), TransformerScorer()


def transformer(noise: float = 0.0) -> Transformer:
    """The tests' model, with noise on its routers."""
    model, rng = Transformer(SPEC, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    for router in routers(model):
        router[...] = router[...] + noise * rng.standard_normal(router.shape).astype(np.float32)
    return model


def routers(model: Any) -> list[nnx.Param]:
    return [layer.mlp.router for layer in model.layers]


def routes(model: Transformer, tokens_T: np.ndarray) -> np.ndarray:
    """What the engine's forward records: every token but the last, which is never fed."""
    count = len(tokens_T)
    padded_BT = np.zeros((1, 8), np.int32)
    padded_BT[0, :count] = tokens_T
    routes_TLX = np.array(recorded(model, jnp.asarray(padded_BT), jnp.full(1, count, jnp.int32))[0, :count])
    routes_TLX[-1] = -1
    return routes_TLX


@nnx.jit
def recorded(model: Transformer, tokens_BT, counts_B):
    """[B, T, L, X]."""
    cache = model.init_cache(1, 8, page_size=8)
    return model.extend_with_routes(tokens_BT, cache, lengths_B=jnp.zeros(1, jnp.int32), counts_B=counts_B)[2]


@pytest.fixture(scope="module")
def batch():
    """Documents with the routes of the model without noise."""
    model = transformer()
    examples = [
        replace(each, routes_TLX=routes(model, each.tokens_T)) for each in random_examples(6, longest=8)
    ]
    (packed,) = pack(examples, rows=3, row_length=16)
    return packed


def scored(model, batch, scorer) -> np.ndarray:
    learner = Learner(model, score=scorer, loss=PolicyLoss(), options=OPTIONS)
    return learner.logprobs(batch)[batch.weights_BT > 0]


def counts(model: Transformer, batch, *, replayed: bool) -> np.ndarray:
    """Tokens by layer and expert."""
    _, router = model.with_router(
        jnp.asarray(batch.tokens_BT),
        segment_ids_BT=jnp.asarray(batch.segment_ids_BT),
        positions_BT=jnp.asarray(batch.positions_BT),
        routes_BTLX=jnp.asarray(batch.routes_BTLX) if replayed else None,
    )
    assert router is not None
    return np.asarray(router.counts_LE)


def test_replay_under_the_same_weights_is_the_same_forward_by_the_bit(batch):
    np.testing.assert_array_equal(scored(transformer(), batch, REPLAY), scored(transformer(), batch, FREE))


def test_a_drifted_router_keeps_the_samplers_experts_only_when_they_are_replayed(batch):
    drifted = transformer(noise=0.5)
    known_BT = batch.routes_BTLX[..., 0, 0] >= 0
    recorded_LE = np.stack(
        [np.bincount(batch.routes_BTLX[known_BT][:, layer].ravel(), minlength=4) for layer in (0, 1)]
    )
    last_tokens = int((batch.segment_ids_BT > 0).sum() - known_BT.sum())  # routed by the model itself
    replayed, free = counts(drifted, batch, replayed=True), counts(drifted, batch, replayed=False)
    chosen = SPEC.experts_per_token
    assert chosen is not None
    assert (replayed >= recorded_LE).all()
    assert ((replayed - recorded_LE).sum(1) == chosen * last_tokens).all()
    assert np.abs(free - recorded_LE).sum() > 2 * chosen * last_tokens  # the control
    assert np.abs(scored(drifted, batch, REPLAY) - scored(drifted, batch, FREE)).max() > 1e-3


def test_weights_of_replayed_experts_are_the_trainers_own_and_renormalised(batch):
    """Against a layer written out token by token in float64."""
    layer: Any = transformer(noise=0.5).layers[0].mlp
    rng = np.random.default_rng(1)
    x_BTD = rng.standard_normal((1, 5, SPEC.hidden_size)).astype(np.float32)
    routes_BTX = np.array([[[3, 0], [1, 2], [2, 3], [0, 1], [3, 1]]], np.int16)
    got, _ = layer(jnp.asarray(x_BTD), jnp.ones((1, 5), bool), routes_BTX=jnp.asarray(routes_BTX))
    shared, _ = layer.shared(jnp.asarray(x_BTD))
    weights = {
        name: np.asarray(getattr(layer, name)[...], np.float64) for name in ("router", "gate_up", "down")
    }
    gate = np.asarray(layer.shared_gate[...], np.float64)
    for t, x in enumerate(x_BTD[0].astype(np.float64)):
        logits = x @ weights["router"]
        p = np.exp(logits - logits.max())
        p /= p.sum()
        wanted = np.asarray(shared[0, t], np.float64) / (1 + np.exp(-(x @ gate)))
        for expert in routes_BTX[0, t]:
            a, b = np.split(x @ weights["gate_up"][expert], 2)
            inner = a / (1 + np.exp(-a)) * b
            wanted = wanted + p[expert] / p[routes_BTX[0, t]].sum() * (inner @ weights["down"][expert])
        np.testing.assert_allclose(got[0, t], wanted, atol=1e-5)


def test_replay_goes_through_scan_and_remat(batch):
    model = transformer(noise=0.5)
    rows: dict[str, Any] = {
        "segment_ids_BT": jnp.asarray(batch.segment_ids_BT),
        "positions_BT": jnp.asarray(batch.positions_BT),
        "routes_BTLX": jnp.asarray(batch.routes_BTLX),
    }
    plain, _ = model.with_router(jnp.asarray(batch.tokens_BT), **rows)
    scanned, _ = model.with_router(jnp.asarray(batch.tokens_BT), scan=True, remat=True, **rows)
    real_BT = batch.segment_ids_BT > 0
    np.testing.assert_allclose(plain[real_BT], scanned[real_BT], atol=2e-5)


def test_a_router_learns_through_the_weights_of_replayed_experts(batch):
    model = transformer(noise=0.5)
    before = np.asarray(routers(model)[0][...]).copy()
    learner = Learner(model, score=REPLAY, loss=PolicyLoss(), options=OPTIONS)
    assert learner.update([batch]).applied
    assert np.abs(np.asarray(routers(learner.model())[0][...]) - before).max() > 1e-3


def test_routing_that_was_not_recorded_cannot_be_replayed(batch):
    learner = Learner(transformer(), score=REPLAY, loss=PolicyLoss(), options=OPTIONS)
    with pytest.raises(ValueError, match="sampler's experts in the batch, got none"):
        learner.accumulate(batch._replace(routes_BTLX=None))


def test_a_frozen_router_has_no_update_and_no_optimizer_state(batch):
    learner = Learner(
        transformer(), score=FREE, loss=PolicyLoss(), options=OPTIONS, parameters=Direct(without_router)
    )
    before = {name: np.asarray(leaf).copy() for name, leaf in flat(learner.snapshot()).items()}
    assert learner.update([batch]).applied
    after = flat(learner.snapshot())
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    routers = {name for name in before if name.endswith("/router")}
    assert len(routers) == 2 and not routers & moved and moved
    state = learner.state()
    assert not [name for name in (*flat(state["params"]), *flat(state["optimizer"])) if "router" in name]
    assert routers <= flat(state["rest"]).keys()
