"""Runs the decoder layers one after another, or as a scan over the periods in which their kinds repeat."""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.model.block import Block, Packing
from jaxrl.model.moe import RouterStats

Sums = tuple[Array, Array] | None


def run_layers(
    blocks: Sequence[Block], x_BTD: Float[Array, "B T D"], *, packing: Packing, remat: bool, scan: bool
) -> tuple[Float[Array, "B T D"], RouterStats | None]:
    """The residual stream behind the last layer and the routers' sums, None for dense layers.

    Args:
      remat: keep only each layer's input for the backward pass.
      scan: one loop body of a period's layers, over weights that are stacked here.
    """
    split = [nnx.split(block) for block in blocks]
    graphs, states = [graph for graph, _ in split], [state for _, state in split]
    run = _scanned if scan else _unrolled
    x_BTD, sums = run(graphs, states, x_BTD, packing, remat)
    if sums is None:
        return x_BTD, None
    counts_LE, probability_LE = sums
    return x_BTD, RouterStats(counts_LE, probability_LE, packing.valid_BT.sum().astype(probability_LE.dtype))


def period(kinds: Sequence[Hashable]) -> int:
    """The fewest layers of which the whole is a repetition: 4 in the published models."""
    layers = len(kinds)
    sizes = (size for size in range(1, layers + 1) if layers % size == 0)
    return next(size for size in sizes if tuple(kinds[:size]) * (layers // size) == tuple(kinds))


def _unrolled(graphs, states, x_BTD, packing, remat) -> tuple[Array, Sums]:
    sums = []
    for graph, state in zip(graphs, states, strict=True):
        x_BTD, layer_sums = _layer(graph, state, x_BTD, packing, remat)
        sums.append(layer_sums)
    return x_BTD, _stacked(sums)


def _scanned(graphs, states, x_BTD, packing, remat) -> tuple[Array, Sums]:
    size = period([jax.tree.structure(state) for state in states])
    stacks = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *states[i::size]) for i in range(size)]

    def body(x_BTD, states):
        return _unrolled(graphs[:size], states, x_BTD, packing, remat)

    x_BTD, sums = jax.lax.scan(body, x_BTD, stacks)
    if sums is None:
        return x_BTD, None
    counts, probability = (each.reshape(-1, each.shape[-1]) for each in sums)
    return x_BTD, (counts, probability)


def _layer(graph, state, x_BTD, packing, remat) -> tuple[Array, Sums]:
    def run(state, x_BTD, packing):
        return nnx.merge(graph, state)(x_BTD, packing)

    return (jax.checkpoint(run) if remat else run)(state, x_BTD, packing)


def _stacked(sums: Sequence[Sums]) -> Sums:
    if sums[0] is None:
        return None
    counts_LE, probability_LE = (jnp.stack(part) for part in zip(*sums, strict=True))
    return counts_LE, probability_LE
