"""Weights in and out of Orbax, and the converter."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import hub_cases
import jax
import numpy as np
import pytest
from flax import nnx
from hub_cases import assert_same_bytes, read, write

from jaxrl.mesh import make_mesh
from jaxrl.model.hub import HubError, load_hub
from jaxrl.model.hub_orbax import load_orbax, save_orbax

SMALL = Path(__file__).parents[1] / "data" / "hf" / "small" / "moe_hub"
TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"


def source(directory: Path) -> Path:
    tensors = hub_cases.text_tensors(moe=True, tied=False, seed=2)
    loose = hub_cases.one_by_one(tensors) | hub_cases.carried_tensors(fused=True, seed=2)
    write(directory, loose, hub_cases.config(moe=True, tied=False))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def assert_same_weights(a, b):
    for x, y in zip(*(jax.tree.leaves(nnx.state(model)) for model in (a, b)), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_round_trip(tmp_path):
    model = load_hub(source(tmp_path / "hub"))
    save_orbax(model, tmp_path / "orbax")
    assert_same_weights(model, load_orbax(tmp_path / "orbax"))
    mesh = make_mesh(devices=jax.devices()[:1])
    placed = load_orbax(tmp_path / "orbax", mesh=mesh)
    assert_same_weights(model, placed)
    assert placed.embed[...].sharding.mesh == mesh
    with pytest.raises(FileExistsError, match="expected no weights yet"):
        save_orbax(model, tmp_path / "orbax")


def test_the_prediction_block_is_saved_and_loaded_on_demand(tmp_path):
    model = load_hub(SMALL, mtp=True)
    save_orbax(model, tmp_path)
    assert_same_weights(model, load_orbax(tmp_path, mtp=True))
    assert_same_weights(load_hub(SMALL), load_orbax(tmp_path))
    save_orbax(load_hub(SMALL), tmp_path / "without")
    with pytest.raises(ValueError, match="expected mtp_num_hidden_layers = 1"):
        load_orbax(tmp_path / "without", mtp=True)


def test_another_models_weights_are_refused(tmp_path):
    save_orbax(load_hub(source(tmp_path / "hub")), tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a folder params of Orbax"):
        load_orbax(tmp_path / "hub")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 25}))
    with pytest.raises(HubError, match=r"tensor embed: expected shape \(25, 16\); got \(24, 16\)"):
        load_orbax(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(HubError, match="tensor head: expected only"):
        load_orbax(tmp_path)


def convert(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name="__main__")


def test_converter_goes_there_and_back(tmp_path, monkeypatch, capsys):
    hub = source(tmp_path / "hub")
    convert(monkeypatch, hub, tmp_path / "orbax", "--to", "orbax")
    options = ("--to", "hub", "--source", hub, "--layout", "source")
    convert(monkeypatch, tmp_path / "orbax", tmp_path / "back", *options)
    assert_same_bytes(read(tmp_path / "back"), read(hub))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    shutil.rmtree(tmp_path / "orbax" / "params")
    with pytest.raises(SystemExit, match="1"):
        convert(monkeypatch, tmp_path / "orbax", tmp_path / "again", "--to", "hub")
    assert "expected model.safetensors" in capsys.readouterr().err
