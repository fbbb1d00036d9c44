"""A learner spread over four devices makes the update of one device, and keeps its shardings."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

PROGRAM = """
import jax, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from rl_helpers import random_examples, score, tiny_model
from jaxrl.mesh import make_mesh
from jaxrl.rl.learner import Learner, Placement
from jaxrl.rl.loss import PolicyLoss
from jaxrl.rl.optimizer import OptimizerOptions
from jaxrl.rl.packing import pack
from jaxrl.rl.trees import flat

mesh = make_mesh(data=2, fsdp=2)

def sharding(leaf):
    return NamedSharding(mesh, P("fsdp") if leaf.shape[0] % 2 == 0 else P())

model = tiny_model()
parameters = jax.tree.map(sharding, nnx.state(model))
placement = Placement(mesh=mesh, parameters=parameters, batch=P(("data", "fsdp")))
options = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1)
settings = dict(score=score, loss=PolicyLoss(), options=options)
spread, single = Learner(model, placement=placement, **settings), Learner(tiny_model(), **settings)
batches = list(pack(random_examples(20), rows=4, row_length=16))
for _ in range(2):
    left, right = spread.update(batches), single.update(batches)
    for name, value in right.metrics.items():
        np.testing.assert_allclose(left.metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)

one = flat(single.state())
for name, leaf in flat(spread.state()).items():
    np.testing.assert_allclose(leaf, one[name], rtol=1e-4, atol=1e-5, err_msg=name)
    if leaf.ndim and not name.startswith("rest"):
        assert leaf.sharding.is_equivalent_to(sharding(leaf), leaf.ndim), (name, leaf.sharding)
np.testing.assert_allclose(spread.logprobs(batches[0]), single.logprobs(batches[0]), atol=1e-4)
print("equal")
"""


def test_spread_learner_equals_a_single_device():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-4000:]
