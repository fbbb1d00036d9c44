"""Hub repositories in and out: every layout, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import hub_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hub_cases import assert_same_bytes, read, write
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.mesh import make_mesh
from jaxrl.model.hub import HubError, load_hub, save_hub
from jaxrl.model.moe import MoE
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer


@settings(max_examples=10, report_multiple_bugs=False, deadline=None, derandomize=True)
@given(
    moe=st.booleans(),
    tied=st.booleans(),
    experts=st.sampled_from(["fused", "one by one"]),
    names=st.sampled_from(["published", "text-only"]),
    mtp_fused=st.booleans(),
    exact=st.sampled_from(["F32", "BF16"]),
    files=st.integers(1, 3),
    shard_bytes=st.sampled_from([1000, 10**9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_keeps_every_byte(
    tmp_path_factory, moe, tied, experts, names, mtp_fused, exact, files, shard_bytes, seed
):
    root = tmp_path_factory.mktemp("hub")
    published = hub_cases.text_tensors(moe=moe, tied=tied, seed=seed, exact=exact)
    text = hub_cases.one_by_one(published) if experts == "one by one" else published
    text = hub_cases.text_only(text) if names == "text-only" else text
    carried = hub_cases.carried_tensors(fused=mtp_fused, seed=seed)
    config = hub_cases.config(moe=moe, tied=tied, nested=names == "published")
    source = write(root / "source", text | carried, config, files=files)
    model = load_hub(source)
    save_hub(model, root / "hub", source=source, shard_bytes=shard_bytes)
    assert_same_bytes(read(root / "hub"), published | carried)
    save_hub(model, root / "as_it_was", source=source, layout="source", shard_bytes=shard_bytes)
    assert_same_bytes(read(root / "as_it_was"), text | carried)
    assert (root / "hub" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    again = load_hub(root / "hub", mesh=make_mesh(devices=jax.devices()[:1]))
    for a, b in zip(*(jax.tree.leaves(nnx.state(each)) for each in (model, again)), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def moe_source(directory: Path, *, carried: bool = True) -> Path:
    tensors = hub_cases.text_tensors(moe=True, tied=False, seed=3)
    extra = hub_cases.carried_tensors(fused=False, seed=3) if carried else {}
    return write(directory, tensors | extra, hub_cases.config(moe=True, tied=False))


def test_experts_stored_one_by_one_are_stacked_gate_first(tmp_path):
    fused = hub_cases.text_tensors(moe=True, tied=False, seed=5)
    loose = hub_cases.one_by_one(fused)
    model = load_hub(write(tmp_path, loose, hub_cases.config(moe=True, tied=False)))
    at = f"{hub_cases.PREFIX}layers.1.mlp.experts.2."
    mlp = model.layers[1].mlp
    assert isinstance(mlp, MoE)
    gate_up = np.asarray(mlp.gate_up[...])[2]
    gate, up = np.split(gate_up, 2, axis=-1)
    assert gate.T.tobytes() == loose[f"{at}gate_proj.weight"].tobytes()
    assert up.T.tobytes() == loose[f"{at}up_proj.weight"].tobytes()
    down = np.asarray(mlp.down[...])[2]
    assert down.T.tobytes() == loose[f"{at}down_proj.weight"].tobytes()


def test_master_weights_go_back_to_the_source_dtypes(tmp_path):
    source = write(
        tmp_path / "source",
        {
            name: np.random.default_rng(len(name)).normal(size=value.shape).astype(value.dtype)
            for name, value in hub_cases.text_tensors(moe=True, tied=False, seed=1).items()
        },
        hub_cases.config(moe=True, tied=False),
    )
    model = load_hub(source, dtype="float32")
    assert model.embed[...].dtype == jnp.float32
    save_hub(model, tmp_path / "out", source=source)
    assert_same_bytes(read(tmp_path / "out"), read(source))
    model.embed[...] = model.embed[...] + 1
    save_hub(model, tmp_path / "trained", source=source)
    name = f"{hub_cases.PREFIX}embed_tokens.weight"
    expected = read(source)[name].astype(np.float32) + np.float32(1)
    np.testing.assert_array_equal(read(tmp_path / "trained")[name], expected.astype(jnp.bfloat16))


def test_export_may_replace_its_own_source(tmp_path):
    source = moe_source(tmp_path)
    before = read(source)
    save_hub(load_hub(source), source, source=source)
    assert_same_bytes(read(source), before)


def test_export_of_another_model_is_refused(tmp_path):
    source = moe_source(tmp_path / "source")
    with pytest.raises(HubError, match=r"another model's: vocab_size: expected 768; got 24"):
        save_hub(Transformer(PRESETS["quickstart"], rngs=nnx.Rngs(0)), tmp_path / "out", source=source)
    assert not (tmp_path / "out").exists()


def test_export_never_leaves_two_checkpoints_in_one_directory(tmp_path):
    source = moe_source(tmp_path / "source")
    model = load_hub(source)
    save_hub(model, tmp_path / "out", shard_bytes=1000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) == len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in read(tmp_path / "out").values())
    with pytest.raises(HubError, match="expected no sharded checkpoint here"):
        save_hub(model, tmp_path / "out")
    with pytest.raises(HubError, match="expected no sharded checkpoint here"):
        save_hub(model, source, shard_bytes=1000)


def test_failed_export_keeps_the_old_file(tmp_path, monkeypatch):
    source = moe_source(tmp_path)
    before, model = read(source), load_hub(source)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("jaxrl.model.hub._fetch", full)
    with pytest.raises(OSError, match="no space"):
        save_hub(model, source, source=source)
    assert_same_bytes(read(source), before)
    assert sorted(path.name for path in source.iterdir()) == ["config.json", "model.safetensors"]


def test_float64_needs_x64(tmp_path):
    with pytest.raises(ValueError, match="expected jax_enable_x64"):
        load_hub(moe_source(tmp_path), dtype="float64")


def test_mesh_that_does_not_divide_is_refused_before_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl.model.hub_files.Entry.map", None)
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 3, 1), ("data", "fsdp", "tensor", "expert", "context"))
    with pytest.raises(ValueError, match="'expert' to be a multiple of mesh axis expert=3; got 4"):
        load_hub(moe_source(tmp_path), mesh=cast(Any, mesh))


SHARDED = """
import sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
from jaxrl.mesh import make_mesh
from jaxrl.model import hub, hub_files

reads = []
real = hub.read_block
hub.read_block = lambda *given: reads.append(given) or real(*given)
for name in ("fused", "one_by_one"):
    source = Path(sys.argv[1], name)
    whole = jax.tree.leaves(nnx.state(hub.load_hub(source)))
    for sizes in ({"fsdp": 2, "tensor": 2, "expert": 2}, {"data": 2, "expert": 4}, {"tensor": 2, "data": 4}):
        reads.clear()
        model = hub.load_hub(source, mesh=make_mesh(**sizes))
        leaves = jax.tree.leaves(nnx.state(model))
        distinct = [{str(shard.index) for shard in leaf.addressable_shards} for leaf in leaves]
        assert len(reads) == sum(map(len, distinct)), "each distinct block is read once"
        for a, b in zip(whole, leaves, strict=True):
            assert b.sharding.mesh.shape == make_mesh(**sizes).shape
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        up = model.layers[0].mlp.gate_up[...]
        assert up.sharding.spec == jax.sharding.PartitionSpec("expert", "fsdp", "tensor"), up.sharding
        out = Path(sys.argv[1], name + "-".join(sizes))
        hub.save_hub(model, out, source=source, layout="source")
        mine, theirs = (hub_files.read_directory(each) for each in (out, source))
        assert {n: b"".join(e.chunks()) for n, e in mine.items()} == {
            n: b"".join(e.chunks()) for n, e in theirs.items()
        }
"""


def test_eight_devices_each_hold_their_block(tmp_path):
    tensors = hub_cases.text_tensors(moe=True, tied=False, seed=9)
    config = hub_cases.config(moe=True, tied=False)
    write(tmp_path / "fused", tensors, config, files=2)
    write(tmp_path / "one_by_one", hub_cases.one_by_one(tensors), config)
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
