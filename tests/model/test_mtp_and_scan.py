"""The multi-token-prediction block as part of a packed row and on disk; layers as a scan over periods."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxrl.model.hub import load_hub, save_hub
from jaxrl.model.layers import period
from jaxrl.model.params import all_weights, parameter_count
from jaxrl.model.presets import PRESETS
from jaxrl.model.spec import hybrid_layers
from jaxrl.model.transformer import Transformer

MOE = dataclasses.replace(
    PRESETS["quickstart"],
    vocab_size=30,
    hidden_size=16,
    layer_types=hybrid_layers(4, period=2),
    gdn_key_dim=6,
    gdn_value_dim=5,
    dtype="float64",
    mtp=True,
)
NO_EXPERTS = dict.fromkeys(("num_experts", "experts_per_token", "expert_dim", "shared_expert_dim"))
DENSE = dataclasses.replace(MOE, mlp_dim=24, tie_embeddings=True, **NO_EXPERTS)
SPECS = pytest.mark.parametrize("spec", [MOE, DENSE], ids=["moe", "dense"])


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def rows(first=0):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 30, (2, 40))
    tokens[0, :10] = (tokens[0, :10] + first) % 30
    segments = np.stack([np.repeat([1, 2, 0], [10, 20, 10]), np.repeat([1, 0], [33, 7])])
    positions = np.stack([np.r_[0:10, 0:20, 0:10], np.r_[0:33, 0:7]])
    return tuple(map(jnp.asarray, (tokens, segments, positions)))


def mtp_logits(model, tokens, segments, positions):
    at = {"segment_ids_BT": segments, "positions_BT": positions}
    return jax.jit(lambda tokens: model.mtp_logits(model(tokens, **at), tokens, **at))(tokens)


@SPECS
def test_mtp_of_packed_documents_is_independent_and_causal(spec):
    model = Transformer(spec, rngs=nnx.Rngs(0))
    tokens, segments, positions = rows()
    logits = mtp_logits(model, tokens, segments, positions)
    other = mtp_logits(model, rows(first=3)[0], segments, positions)
    assert logits.shape == (2, 40, 30) and not np.array_equal(logits[0, :9], other[0, :9])
    np.testing.assert_array_equal(logits[0, 10:30], other[0, 10:30])
    # At t the block has seen token t + 1 and nothing behind it.
    later = mtp_logits(model, tokens.at[1, 20].add(1) % 30, segments, positions)
    np.testing.assert_allclose(later[1, :19], logits[1, :19], rtol=0, atol=1e-12)
    assert not np.allclose(later[1, 19], logits[1, 19], rtol=0, atol=1e-6)


@SPECS
def test_block_travels_through_files(spec, tmp_path):
    spec = dataclasses.replace(spec, dtype="float32")
    model = Transformer(spec, rngs=nnx.Rngs(0))
    save_hub(model, tmp_path)
    loaded = load_hub(tmp_path, mtp=True)
    assert loaded.spec == spec
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, loaded)), strict=True):
        np.testing.assert_array_equal(a, b)
    without = load_hub(tmp_path)
    assert not hasattr(without, "mtp") and without.spec == dataclasses.replace(spec, mtp=False)
    with pytest.raises(ValueError, match="got mtp=False"):
        mtp_logits(without, *rows())


def test_experts_one_by_one_load_and_are_written_back_so(tmp_path):
    spec = dataclasses.replace(MOE, dtype="float32")
    save_hub(Transformer(spec, rngs=nnx.Rngs(0)), tmp_path)
    file, head = tmp_path / "model.safetensors", "mtp.layers.0.mlp.experts."
    fused = load_file(file)
    whole = load_hub(tmp_path, mtp=True)
    gate_up, down = fused.pop(f"{head}gate_up_proj"), fused.pop(f"{head}down_proj")
    for expert in range(8):
        gate, up = np.split(gate_up[expert], 2)
        for kind, value in (("gate", gate), ("up", up), ("down", down[expert])):
            fused[f"{head}{expert}.{kind}_proj.weight"] = np.ascontiguousarray(value)
    save_file(fused, file)
    loaded = load_hub(tmp_path, mtp=True)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (whole, loaded)), strict=True):
        np.testing.assert_array_equal(a, b)
    save_hub(loaded, tmp_path / "again", source=tmp_path)
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == fused.keys()
    for name, value in fused.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)


def test_a_config_without_the_block_is_refused(tmp_path):
    save_hub(Transformer(dataclasses.replace(DENSE, mtp=False, dtype="float32"), rngs=nnx.Rngs(0)), tmp_path)
    with pytest.raises(ValueError, match="expected mtp_num_hidden_layers = 1; got None"):
        load_hub(tmp_path, mtp=True)


def test_block_is_absent_by_default():
    assert parameter_count(PRESETS["quickstart"]) == 960_908
    spec = dataclasses.replace(PRESETS["qwen3.5-397b-a17b"], mtp=True)
    extra = parameter_count(spec) - parameter_count(PRESETS["qwen3.5-397b-a17b"])
    assert round(extra / 1e9, 2) == 6.60
    assert all(
        weight.hub.startswith("mtp.") for path, weight in all_weights(spec).items() if path[0] == "mtp"
    )


@SPECS
@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_periods_equals_the_unrolled_layers(spec, remat):
    graph, state = nnx.split(Transformer(dataclasses.replace(spec, mtp=False), rngs=nnx.Rngs(0)))
    tokens, segments, positions = rows()

    def run(scan):
        def loss(state):
            at = {"segment_ids_BT": segments, "positions_BT": positions, "remat": remat, "scan": scan}
            hidden, router = nnx.merge(graph, state).with_router(tokens, **at)
            return jnp.sin(hidden).sum(), (hidden, router)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(state)

    for a, b in zip(*map(jax.tree.leaves, (run(False), run(True))), strict=True):
        assert a.dtype == b.dtype
        # Relative to the largest entry: a sum of terms of size 1e3 leaves 1e-12 in an entry that cancels.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, float(jnp.abs(a).max())))


@pytest.mark.parametrize(
    ("kinds", "expected"), [(hybrid_layers(60), 4), (hybrid_layers(6), 6), ("aaa", 1), ("abab", 2), ("a", 1)]
)
def test_period(kinds, expected):
    assert period(kinds) == expected
