"""Runs the decoder layers one after another, or as a scan over the periods in which their kinds repeat."""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int16

from jaxrl.model.block import Block, Packing
from jaxrl.model.moe import RouterStats

Sums = tuple[Array, Array] | None


def run_layers(
    blocks: Sequence[Block],
    x_BTD: Float[Array, "B T D"],
    *,
    packing: Packing,
    remat: bool,
    scan: bool,
    routes_BTLX: Int16[Array, "B T L X"] | None = None,
) -> tuple[Float[Array, "B T D"], RouterStats | None]:
    """The residual stream behind the last layer and the routers' sums, None for dense layers.

    Args:
      remat: keep only each layer's input for the backward pass.
      scan: one loop body of a period's layers, over weights that are stacked here.
      routes_BTLX: experts that each layer is to use, see `MoE`.
    """
    split = [nnx.split(block) for block in blocks]
    graphs = [graph for graph, _ in split]
    inputs = [
        (state, None if routes_BTLX is None else routes_BTLX[:, :, layer])
        for layer, (_, state) in enumerate(split)
    ]
    run = _scanned if scan else _unrolled
    x_BTD, sums = run(graphs, inputs, x_BTD, packing, remat)
    if sums is None:
        return x_BTD, None
    counts_LE, probability_LE = sums
    return x_BTD, RouterStats(counts_LE, probability_LE, packing.valid_BT.sum().astype(probability_LE.dtype))


def period(kinds: Sequence[Hashable]) -> int:
    """The fewest layers of which the whole is a repetition: 4 in the published models."""
    layers = len(kinds)
    sizes = (size for size in range(1, layers + 1) if layers % size == 0)
    return next(size for size in sizes if tuple(kinds[:size]) * (layers // size) == tuple(kinds))


def _unrolled(graphs, inputs, x_BTD, packing, remat) -> tuple[Array, Sums]:
    """`inputs` has the weights of each layer and the experts that it is to use."""
    sums = []
    for graph, layer_inputs in zip(graphs, inputs, strict=True):
        x_BTD, layer_sums = _layer(graph, layer_inputs, x_BTD, packing, remat)
        sums.append(layer_sums)
    return x_BTD, _stacked(sums)


def _scanned(graphs, inputs, x_BTD, packing, remat) -> tuple[Array, Sums]:
    size = period([jax.tree.structure(each) for each in inputs])
    stacks = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs[i::size]) for i in range(size)]

    def body(x_BTD, inputs):
        return _unrolled(graphs[:size], inputs, x_BTD, packing, remat)

    x_BTD, sums = jax.lax.scan(body, x_BTD, stacks)
    if sums is None:
        return x_BTD, None
    counts, probability = (each.reshape(-1, each.shape[-1]) for each in sums)
    return x_BTD, (counts, probability)


def _layer(graph, inputs, x_BTD, packing, remat) -> tuple[Array, Sums]:
    def run(inputs, x_BTD, packing):
        state, routes_BTX = inputs
        return nnx.merge(graph, state)(x_BTD, packing, routes_BTX=routes_BTX)

    return (jax.checkpoint(run) if remat else run)(inputs, x_BTD, packing)


def _stacked(sums: Sequence[Sums]) -> Sums:
    if sums[0] is None:
        return None
    counts_LE, probability_LE = (jnp.stack(part) for part in zip(*sums, strict=True))
    return counts_LE, probability_LE
