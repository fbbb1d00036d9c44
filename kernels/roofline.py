"""How much work an op needs at least, and how fast a machine could at best do it.

FLOPs count the products an op is defined by, two per multiply-add, whatever an implementation does
in fact: one that does more (masked experts, chunk-internal products, whole score matrices) reaches a
smaller fraction. Bytes count every input and every output once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Each product of the forward has two in the backward: one per factor's gradient.
FORWARD_AND_BACKWARD = 3


class Work(NamedTuple):
    """What an op needs at least: FLOPs and bytes through main memory."""

    flops: int
    bytes: int


class Bound(NamedTuple):
    """The least seconds that some work takes on a machine, and what limits it."""

    seconds: float
    limit: str


@dataclass(frozen=True)
class Peak:
    """Best rates of one device, and where the figures are from."""

    flops_per_s: float
    bytes_per_s: float
    source: str
    measured: bool = False

    def bound(self, work: Work) -> Bound:
        """Time if arithmetic and memory traffic overlapped perfectly."""
        compute, memory = work.flops / self.flops_per_s, work.bytes / self.bytes_per_s
        return Bound(compute, "compute") if compute >= memory else Bound(memory, "memory")


_CLOUD_TPU = "docs.cloud.google.com/tpu/docs/tpu7x, v5p, v6e and v5e, per chip"
# jax.Device.device_kind -> dense bfloat16 peak of what JAX calls one device.
DATASHEET = {
    "NVIDIA H100 80GB HBM3": Peak(989e12, 3.35e12, "NVIDIA H100 SXM datasheet"),
    "NVIDIA H200": Peak(989e12, 4.8e12, "NVIDIA H200 SXM datasheet"),
    "NVIDIA B200": Peak(2.25e15, 7.7e12, "NVIDIA HGX B200 datasheet"),
    "NVIDIA GB200": Peak(2.5e15, 8e12, "NVIDIA GB200 NVL72 datasheet, a 72nd"),
    "NVIDIA GB300": Peak(2.5e15, 8e12, "NVIDIA GB300 NVL72 datasheet, a 72nd"),
    "TPU v5 lite": Peak(197e12, 819e9, _CLOUD_TPU),
    "TPU v5": Peak(459e12, 2765e9, _CLOUD_TPU),
    "TPU v6 lite": Peak(918e12, 1638e9, _CLOUD_TPU),
    "TPU7x": Peak(2307e12 / 2, 7380e9 / 2, _CLOUD_TPU + "; two devices a chip"),
}


def datasheet(device_kind: str) -> Peak:
    """The published peak of an accelerator.

    Raises:
      ValueError: no entry for `device_kind`.
    """
    if device_kind not in DATASHEET:
        known = ", ".join(repr(name) for name in DATASHEET)
        raise ValueError(
            f"roofline: expected a device among {known}; got {device_kind!r}; "
            "add its peak and the source to DATASHEET in kernels/roofline.py"
        )
    return DATASHEET[device_kind]


def gated_delta_rule_flops(*, B: int, T: int, N: int, H: int, J: int) -> int:
    """Recall k^T S, write k delta^T, read S^T q: three products with the H x J state per head and token."""
    return 3 * 2 * B * T * N * H * J


def causal_conv1d_flops(*, B: int, T: int, D: int, W: int) -> int:
    """W multiply-adds per channel and token."""
    return 2 * B * T * D * W


def expert_mlp_flops(*, T: int, D: int, F: int, experts_per_token: int) -> int:
    """Gate, up and down of the chosen experts only."""
    return 3 * 2 * T * experts_per_token * D * F


def attention_flops(*, pairs: int, N: int, H: int) -> int:
    """q k^T and weights v for the (query, key) pairs that the mask allows, counted over all rows."""
    return 2 * 2 * pairs * N * H


def bytes_once(run: Callable[..., Any], *args: Any) -> int:
    """Bytes of all arguments and of all results of `run`, which is only traced."""
    leaves = jax.tree.leaves((args, jax.eval_shape(run, *args)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


class Probe(NamedTuple):
    """A call whose time shows one of a machine's two rates; `amount` is in FLOPs or bytes."""

    run: Callable[[], Any]
    amount: int


def matmul_probe(dtype: Any, *, size: int) -> Probe:
    """A square matmul, size x size, on the default device."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    product = jax.jit(lambda a, b: a @ b)
    return Probe(lambda: product(a, b), 2 * size**3)


def copy_probe(*, size: int) -> Probe:
    """Scales `size` float32 values in place: each is read once and written once."""
    scale = jax.jit(lambda x: x * 0.999, donate_argnums=0)
    held = [jnp.ones(size, jnp.float32)]

    def run() -> Any:
        held[0] = scale(held[0])
        return held[0]

    return Probe(run, 2 * 4 * size)
