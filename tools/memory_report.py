"""Compiles the programs of a configuration for as many devices as its mesh has, and prints bytes per device.

    python -m tools.memory_report configs/qwen3_5_0_8b.yaml [section.key=value ...]

Shapes only: no weight is read or allocated, and the devices are those that XLA makes of this machine's CPU.
Arguments (weights, moments, gradients, cache) are what a GPU would hold, too; temporaries are the CPU
compiler's and differ there. The sizes come from `model.preset`, since the checkpoint need not be here.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.config import Config, ConfigError, explained, from_command_line

COMMAND = "python -m tools.memory_report"
GB = 1e9


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    config = from_command_line(argv, command=COMMAND)
    devices = math.prod(config.mesh.model_dump().values())
    with explained(COMMAND):
        if devices == 1:
            raise ConfigError("mesh: expected axes for more than one device, got all 1")
    # Before JAX is loaded: it asks once. Unoptimised code is enough, and compiled several times as fast.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    with explained(COMMAND):
        for line in report(config):
            print(line, flush=True)


def report(config: Config) -> Iterator[str]:
    """A line per program, as it is compiled, then what a run needs at once. Raises `ConfigError`."""
    held, temporary = {}, 0.0
    for name, lower in programs(config).items():
        started = time.perf_counter()
        for part, lowered in lower().items():
            made = lowered.compile().memory_analysis()
            held[part], temporary = made.argument_size_in_bytes, max(temporary, made.temp_size_in_bytes)
            seconds, started = time.perf_counter() - started, time.perf_counter()
            yield (
                f"{name} {part:10}  arguments {made.argument_size_in_bytes / GB:7.2f} GB"
                f"  temporary {made.temp_size_in_bytes / GB:7.2f} GB  (compiled in {seconds:.0f} s)"
            )
    yield total(config, held, temporary)


def total(config: Config, held: Mapping[str, int], temporary: float) -> str:
    """What a device holds at once: the update's arguments, the engine's cache, the largest temporaries."""
    weights = weight_bytes(config)
    cache = held["generate"] - weights
    sizes = {"weights": weights, "moments and gradients": held["apply"] - weights, "cache": cache}
    shown = ", ".join(f"{name} {size / GB:.1f}" for name, size in sizes.items())
    whole = sum(sizes.values()) + temporary
    return f"per device: {shown}, temporary {temporary / GB:.1f}; together {whole / GB:.1f} GB"


def weight_bytes(config: Config) -> int:
    """Bytes of the weights on one device."""
    import jax

    _, params, _ = _abstract(config)
    shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params))
    sizes = (leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return sum(math.prod(shape) * size for shape, size in zip(shards, sizes, strict=True))


def programs(config: Config) -> dict[str, Callable[[], Mapping[str, Any]]]:
    """The learner's and the engine's programs, to be lowered. Raises `ConfigError`."""
    from flax import nnx

    from jaxrl.algorithm import build_learner
    from jaxrl.assembly import check_sizes, engine_options
    from jaxrl.engine.step import Steps

    check_sizes(config)
    graph, params, mesh = _abstract(config)
    model = nnx.merge(graph, params)
    learner = build_learner(config, model, mesh=mesh)
    steps = Steps(model, engine_options(config).sizes(model.spec), mesh=mesh)
    return {
        "engine ": lambda: steps.lowered(nnx.state(model)),
        "learner": lambda: learner.lowered(_batch(config)),
    }


def _abstract(config: Config) -> tuple[Any, Any, Any]:
    """(graph, weights as shapes with shardings, mesh)."""
    import jax
    from flax import nnx

    from jaxrl.assembly import preset_spec
    from jaxrl.devices import build_mesh, place_learner
    from jaxrl.model.transformer import Transformer

    spec, mesh = preset_spec(config), build_mesh(config)
    model = nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0)))
    placement = place_learner(model, mesh)
    assert placement is not None
    graph, state = nnx.split(model)
    params = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        state,
        placement.parameters,
    )
    return graph, params, mesh


def _batch(config: Config) -> Any:
    """A microbatch of zeros in the configuration's shape."""
    import numpy as np

    from jaxrl.rl.packing import Microbatch

    shape = (config.rl.rows_per_microbatch, config.rl.row_length)
    floats = (
        "weights_BT",
        "advantages_BT",
        "sampler_logprobs_BT",
        "old_logprobs_BT",
        "reference_logprobs_BT",
    )
    fields = [name for name in Microbatch._fields if name != "routes_BTLX"]
    return Microbatch(**{n: np.zeros(shape, np.float32 if n in floats else np.int32) for n in fields})


if __name__ == "__main__":
    main(sys.argv[1:])
