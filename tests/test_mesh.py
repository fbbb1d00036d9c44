"""The mesh and its rules; a sharded model equals an unsharded one on eight CPU devices."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxrl.mesh import MESH_AXES, make_mesh, row_sharding, shardings
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer

SHARDED = """
import dataclasses
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jaxrl.mesh import make_mesh, row_sharding, shardings
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer

jax.config.update("jax_enable_x64", True)
layers = ("linear_attention", "full_attention")
spec = dataclasses.replace(PRESETS["quickstart"], layer_types=layers, dtype="float64")
graph, state = nnx.split(Transformer(spec, rngs=nnx.Rngs(0)))
tokens = jax.random.randint(jax.random.key(1), (4, 24), 0, 768)
ones, positions = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(24), tokens.shape)

@jax.jit
def gradient(state, tokens):
    def loss(state):
        hidden = nnx.merge(graph, state)(tokens, segment_ids_BT=ones, positions_BT=positions)
        return jnp.sin(hidden).mean()
    return jax.value_and_grad(loss)(state)

mesh = make_mesh(fsdp=2, tensor=2, expert=2)
placed = jax.device_put(state, shardings(state, mesh))
up = placed["layers"][0]["mlp"]["gate_up"][...]
assert up.addressable_shards[0].data.shape == (4, 64, 32), up.addressable_shards[0].data.shape
with mesh:
    sharded = gradient(placed, jax.device_put(tokens, row_sharding(mesh)))
for a, b in zip(jax.tree.leaves(gradient(state, tokens)), jax.tree.leaves(sharded), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)
"""


def test_wrong_product_is_refused():
    with pytest.raises(ValueError, match=f"{len(jax.devices())}, the number of devices; got data=1 .* = 6"):
        make_mesh(fsdp=2, tensor=3)


def test_every_parameter_gets_its_axes():
    mesh = make_mesh(devices=jax.devices()[:1])
    state = nnx.state(nnx.eval_shape(lambda: Transformer(PRESETS["quickstart"], rngs=nnx.Rngs(0))))
    flat = {path: v.get_value().spec for path, v in nnx.to_flat_state(shardings(state, mesh))}
    assert mesh.axis_names == MESH_AXES
    assert flat["layers", 0, "mlp", "gate_up"] == PartitionSpec("expert", "fsdp", "tensor")
    assert flat["embed",] == PartitionSpec("tensor", "fsdp")
    assert flat["layers", 3, "mixer_norm"] == PartitionSpec(None)
    assert row_sharding(mesh).spec == PartitionSpec(("data", "fsdp"))


def test_an_axis_that_does_not_divide_is_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 3, 1), MESH_AXES)
    state = nnx.State({"w": nnx.Param(np.zeros((8, 2, 2)), axes=("expert", None, None))})
    with pytest.raises(ValueError, match="'expert' to be a multiple of mesh axis expert=3; got 8"):
        shardings(state, mesh)


def test_sharded_equals_unsharded():
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
