"""Loads a synthetic hub checkpoint over 8 virtual CPU devices and prints the peak of host memory.

    python tools/bench_load.py [--gigabytes 2.2] [--experts fused|one-by-one] [--expert 1|2|4]

The claim: at no time does loading hold more than the parameters and one tensor, the largest. Memory is the
process's resident set, sampled each millisecond and checked against the kernel's own peak, less what the
process held before loading. The files are written to a temporary folder and removed. Exit status 1 if the
claim fails.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxrl.mesh import make_mesh
from jaxrl.model.hub import hub_name, load_hub
from jaxrl.model.hub_files import Outgoing, read_directory, write_directory
from jaxrl.model.hub_layout import hub_order
from jaxrl.model.params import all_weights, parameter_count
from jaxrl.model.presets import PRESETS
from jaxrl.model.spec import ModelSpec, hybrid_layers

DEVICES = 8
FLAG = f"--xla_force_host_platform_device_count={DEVICES}"
PAGE = resource.getpagesize()
MIB = 2**20
SHARD_BYTES = 5 * 10**8
BLOCK = np.random.default_rng(0).normal(size=MIB // 2).astype(np.float32).view(np.uint32) >> 16


def synthetic_spec(gigabytes: float) -> ModelSpec:
    """A narrow 35B-A3B with as many layers as the size needs."""
    small = {"vocab_size": 65_536, "hidden_size": 1024, "num_experts": 64, "expert_dim": 256}
    layers, spec = 0, PRESETS["qwen3.5-35b-a3b"]
    while layers == 0 or 2 * parameter_count(spec) < gigabytes * 1e9:
        layers += 4
        spec = replace(PRESETS["qwen3.5-35b-a3b"], layer_types=hybrid_layers(layers), **small)
    return spec


def noise(nbytes: int) -> Iterator[bytes]:
    """A megabyte of normal bfloat16 values, over and over."""
    block = BLOCK.astype(np.uint16).tobytes()
    for start in range(0, nbytes, len(block)):
        yield block[: nbytes - start]


def synthetic_tensors(spec: ModelSpec, *, one_by_one: bool) -> Iterator[Outgoing]:
    """The published layout, or that with one tensor per expert and matrix; all bfloat16."""
    for path, weight in all_weights(spec).items():
        name, shape = hub_name(path, weight), hub_order(weight, weight.shape, 1)
        head, experts, matrix = name.partition(".experts.")
        if not (one_by_one and experts):
            yield _tensor(name, shape)
            continue
        kinds = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
        for e in range(shape[0]):
            for kind in kinds:
                yield _tensor(f"{head}.experts.{e}.{kind}.weight", (shape[1] // len(kinds), shape[2]))


def _tensor(name: str, shape: tuple[int, ...]) -> Outgoing:
    return Outgoing(name, "BF16", shape, partial(noise, 2 * int(np.prod(shape))))


def resident() -> int:
    """Bytes of this process in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def high_water() -> int:
    """The kernel's record of the highest resident set of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


class Peak:
    """The highest resident set while the context is open, in bytes above that at its start."""

    def __enter__(self) -> "Peak":
        self.bytes, self._base, self._done = 0, resident(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, resident() - self._base)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        # The kernel's peak covers what happens between two samples.
        self.bytes = max(self.bytes, high_water() - self._base)


def measure(directory: Path, expert: int) -> bool:
    """Loads, prints, and says whether the claim holds."""
    mesh = make_mesh(fsdp=DEVICES // 2 // expert, tensor=2, expert=expert)
    jax.block_until_ready([jax.device_put(np.zeros(8), device) for device in jax.devices()])
    started = time.perf_counter()
    with Peak() as peak:
        leaves = jax.tree.leaves(nnx.state(load_hub(directory, mesh=mesh)))
    seconds = time.perf_counter() - started
    placed = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    whole, largest = sum(leaf.nbytes for leaf in leaves), max(leaf.nbytes for leaf in leaves)
    files = sum(entry.nbytes for entry in read_directory(directory).values())
    print(f"files {files / MIB:.0f} MiB, mesh {dict(mesh.shape)}, {seconds:.1f} s")
    print(f"parameters {whole / MIB:.1f} MiB, with replicas {placed / MIB:.1f} MiB")
    print(f"largest tensor {largest / MIB:.1f} MiB")
    print(f"peak host memory {peak.bytes / MIB:.1f} MiB; allowed {(placed + largest) / MIB:.1f} MiB")
    print(f"beyond the parameters {(peak.bytes - placed) / MIB:.1f} MiB")
    return peak.bytes <= placed + largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--experts", choices=("fused", "one-by-one"), default="fused")
    parser.add_argument("--expert", type=int, choices=(1, 2, 4), default=1, help="size of the expert axis")
    parser.add_argument("--directory", type=Path, help="where to put the temporary folder")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        sys.exit(0 if measure(given.measure, given.expert) else 1)
    spec = synthetic_spec(given.gigabytes)
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        tensors = list(synthetic_tensors(spec, one_by_one=given.experts == "one-by-one"))
        write_directory(Path(folder), tensors, shard_bytes=SHARD_BYTES)
        Path(folder, "config.json").write_text(json.dumps(spec.to_hub_config()))
        # A process of its own: what writing the files took must not count, nor hide a peak.
        environment = os.environ | {"XLA_FLAGS": FLAG, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, "--measure", folder, "--expert", str(given.expert)]
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
