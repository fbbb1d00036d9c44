"""Prints the parameters of every preset, by abstract evaluation of the model: nothing is allocated.

python tools/parameter_counts.py
"""

import math
import time

import jax
from flax import nnx

from jaxrl.model.presets import PRESETS
from jaxrl.model.spec import ModelSpec
from jaxrl.model.transformer import Transformer


def count(spec: ModelSpec) -> int:
    """Parameters of the model that the spec builds, a tied head counted once."""
    model = nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def main() -> None:
    """The command."""
    start, cpu = time.perf_counter(), time.process_time()
    for name, spec in PRESETS.items():
        print(f"{name:20} {count(spec):>15,}")
    print(f"{time.perf_counter() - start:.1f} s, {time.process_time() - cpu:.1f} s of CPU time")


if __name__ == "__main__":
    main()
