"""Against golden traces of Hugging Face transformers, made by tools/hf_reference.py."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.model.hub import hub_name, load_hub
from jaxrl.model.logprob import target_logprobs
from jaxrl.model.moe import balancing_loss
from jaxrl.model.norms import rope_angles
from jaxrl.model.params import all_weights
from jaxrl.model.transformer import Packing, Transformer, packed_mask

DATA = Path(__file__).parents[1] / "data" / "hf"
KINDS = ("moe", "dense")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def trace(kind):
    return np.load(DATA / kind / "trace.npz")


def packed(ids_BT, mask_BT):
    positions = np.broadcast_to(np.arange(ids_BT.shape[1]), ids_BT.shape)
    return jnp.asarray(ids_BT), jnp.asarray(mask_BT, jnp.int32), jnp.asarray(positions)


def forward(model, ids_BT, mask_BT):
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, ids, segments, positions):
        model = nnx.merge(graph, state)
        return model.logits(model(ids, segment_ids_BT=segments, positions_BT=positions))

    return np.asarray(run(state, *packed(ids_BT, mask_BT)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "gate"), [("float64", 1e-9), ("float32", 5e-5)])
def test_logits(kind, dtype, gate):
    golden = trace(kind)
    logits = forward(load_hub(DATA / kind, dtype=dtype), golden["ids_BT"], golden["mask_BT"])
    assert logits.dtype == np.dtype(dtype)
    np.testing.assert_allclose(logits[0], golden["logits.f64"], rtol=0, atol=gate)
    np.testing.assert_allclose(logits[1, :9], golden["short.f64"], rtol=0, atol=gate)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer(kind):
    golden = trace(kind)
    model = load_hub(DATA / kind, dtype="float64")
    ids, segments, positions = packed(golden["ids_BT"][:1], golden["mask_BT"][:1])
    packing = Packing(segments, packed_mask(segments), rope_angles(positions, model.spec))
    x = model.embed[...][ids]
    for layer, block in enumerate(model.layers):
        x, _ = jax.jit(lambda x, block=block: block(x, packing))(x)
        np.testing.assert_allclose(x[0], golden["hidden.f64"][layer], rtol=0, atol=1e-10)


def losses(model: Transformer, ids, segments, positions):
    hidden, router = model.with_router(ids, segment_ids_BT=segments, positions_BT=positions)
    logprob, *_ = target_logprobs(hidden[:, :-1], model.head_weight(), targets_B=ids[:, 1:], chunk=32)
    real = segments[:, 1:] != 0
    ce = -jnp.where(real, logprob, 0).sum() / real.sum()
    aux = jnp.zeros(()) if router is None else balancing_loss(router)
    return ce + 0.01 * aux, (ce, aux)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients(kind):
    golden = trace(kind)
    model = load_hub(DATA / kind, dtype="float64")
    graph, state = nnx.split(model)
    run = jax.jit(jax.value_and_grad(lambda s, *xs: losses(nnx.merge(graph, s), *xs), has_aux=True))
    (_, (ce, aux)), gradient = run(state, *packed(golden["ids_BT"], golden["mask_BT"]))
    np.testing.assert_allclose(ce, golden["ce"], rtol=1e-12)
    if kind == "moe":
        np.testing.assert_allclose(aux, golden["aux"], rtol=1e-12)
    table = all_weights(model.spec)
    values: dict[Any, Any] = dict(nnx.to_flat_state(gradient))
    for path, value in values.items():
        hub = table[path].to_hub(np.asarray(value[...]))
        probe = (hub * np.cos(np.arange(hub.size)).reshape(hub.shape)).sum()
        expected = golden[f"probe.{hub_name(path, table[path])}"]
        np.testing.assert_allclose(probe, expected, rtol=1e-8, atol=1e-11, err_msg=str(path))
