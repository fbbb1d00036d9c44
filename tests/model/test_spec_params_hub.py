"""Sizes, declarations, initialisation and files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxrl.model.hub import load_hub, save_hub
from jaxrl.model.params import all_weights, parameter_count
from jaxrl.model.presets import PRESETS
from jaxrl.model.spec import ModelSpec, hybrid_layers
from jaxrl.model.transformer import Transformer

QUICKSTART = PRESETS["quickstart"]
SMALL = dataclasses.replace(
    QUICKSTART, vocab_size=20, hidden_size=16, layer_types=("linear_attention", "full_attention")
)
SMALL_DENSE = ModelSpec(
    **{name: getattr(SMALL, name) for name in ("vocab_size", "hidden_size", "layer_types", "rope_theta")},
    **{name: getattr(SMALL, name) for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")},
    **{name: getattr(SMALL, name) for name in ("gdn_key_heads", "gdn_value_heads", "gdn_key_dim")},
    gdn_value_dim=24,
    mlp_dim=40,
    tie_embeddings=True,
    dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3.5-0.8b", 0.752),
        ("qwen3.5-2b", 1.882),
        ("qwen3.5-4b", 4.206),
        ("qwen3.5-9b", 8.954),
        ("qwen3.5-27b", 26.896),
        ("qwen3.5-35b-a3b", 34.661),
        ("qwen3.5-122b-a10b", 122.112),
        ("qwen3.5-397b-a17b", 396.346),
    ],
)
def test_published_parameter_counts(name, billions):
    spec = PRESETS[name]
    model = nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0)))
    held = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert held == parameter_count(spec) and round(held / 1e9, 3) == billions


def test_quickstart_parameter_count():
    assert parameter_count(QUICKSTART) == 960_908


@pytest.mark.parametrize("spec", [QUICKSTART, SMALL_DENSE], ids=["moe", "dense"])
def test_table_and_model_agree(spec):
    model = nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0)))
    held = dict(nnx.to_flat_state(nnx.state(model)))
    table = all_weights(spec)
    assert held.keys() == table.keys()
    for path, weight in table.items():
        assert (held[path].shape, held[path].dtype) == (weight.shape, jnp.dtype(weight.dtype)), path
        assert held[path].get_metadata()["axes"] == weight.axes
        assert len(weight.axes) == len(weight.shape)


def test_initialisation():
    state = nnx.state(Transformer(QUICKSTART, rngs=nnx.Rngs(0)))
    flat = {path: np.asarray(variable[...]) for path, variable in nnx.to_flat_state(state)}
    gdn = {path[-1]: x for path, x in flat.items() if path[:3] == ("layers", 0, "mixer")}
    assert (gdn["dt_bias"] == 1).all() and (gdn["norm"] == 1).all()
    assert (np.exp(gdn["A_log"]) >= 0.01).all() and (np.exp(gdn["A_log"]) <= 16).all()
    assert (flat["layers", 3, "mixer_norm"] == 0).all()
    np.testing.assert_allclose(gdn["out"].std(), 128**-0.5, rtol=0.05)
    np.testing.assert_allclose(flat["layers", 1, "mlp", "down"].std(), 32**-0.5, rtol=0.05)
    assert not np.array_equal(flat["layers", 0, "mixer", "qkv"], flat["layers", 1, "mixer", "qkv"])


@pytest.mark.parametrize("name", PRESETS)
def test_config_round_trip(name):
    spec = PRESETS[name]
    config = json.loads(json.dumps(spec.to_hub_config()))
    assert ModelSpec.from_hub_config(config) == spec
    assert ModelSpec.from_hub_config({"text_config": config}, dtype="float32").dtype == "float32"


def test_config_details():
    config = PRESETS["qwen3.5-397b-a17b"].to_hub_config()
    assert config["rope_parameters"]["mrope_section"] == [11, 11, 10]
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.25
    config.pop("layer_types")
    spec = ModelSpec.from_hub_config(config | {"full_attention_interval": 4})
    assert spec.layer_types == hybrid_layers(60) and spec.layer_types[3::4] == ("full_attention",) * 15
    config.pop("rope_parameters")
    with pytest.raises(KeyError, match="rope_parameters"):
        ModelSpec.from_hub_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads to be a multiple of 3; got 4"),
        ({"mlp_dim": 64}, "either mlp_dim or all of"),
        ({"expert_dim": None}, "either mlp_dim or all of"),
        ({"rotary_dim": 34}, "rotary_dim <= head_dim 32; got 34"),
        ({"layer_types": ("mamba",)}, r"got \['mamba'\]"),
    ],
)
def test_specs_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(QUICKSTART, **change)


@pytest.mark.parametrize("spec", [SMALL, SMALL_DENSE], ids=["moe", "dense"])
def test_hub_round_trip(tmp_path, spec):
    model = Transformer(spec, rngs=nnx.Rngs(1))
    save_hub(model, tmp_path)
    loaded = load_hub(tmp_path)
    assert loaded.spec == spec and sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, loaded)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (not spec.tie_embeddings)
    conv = tensors["model.language_model.layers.0.linear_attn.conv1d.weight"]
    assert conv.shape == (spec.gdn_qkv_dim, 1, 4)


def test_damaged_files_are_refused(tmp_path):
    save_hub(Transformer(SMALL_DENSE, rngs=nnx.Rngs(1)), tmp_path)
    file = tmp_path / "model.safetensors"
    whole, norm = load_file(file), "model.language_model.norm.weight"
    save_file({name: x for name, x in whole.items() if name != norm}, file)
    with pytest.raises(ValueError, match=norm):
        load_hub(tmp_path)
    save_file(whole | {norm: whole[norm][:3]}, file)
    with pytest.raises(ValueError, match=r"expected shape \(16,\); got \(3,\)"):
        load_hub(tmp_path)
    save_file(whole | {"model.language_model.extra": whole[norm]}, file)
    with pytest.raises(ValueError, match="extra"):
        load_hub(tmp_path)
    save_file(whole | {"mtp.norm.weight": whole[norm], "model.visual.x": whole[norm]}, file)
    assert load_hub(tmp_path).spec == SMALL_DENSE


def test_text_only_names_load(tmp_path):
    save_hub(Transformer(SMALL_DENSE, rngs=nnx.Rngs(1)), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name.replace(".language_model", ""): x for name, x in tensors.items()}, file)
    np.testing.assert_array_equal(
        load_hub(tmp_path).embed[...], tensors["model.language_model.embed_tokens.weight"]
    )
