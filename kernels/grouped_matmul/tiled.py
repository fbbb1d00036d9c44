"""Expert layer for processors without a ragged matmul: a loop over small tiles of rows, each of one expert.

`lax.ragged_dot` is expanded on CPU to every expert on every row. Here the (token, expert) rows are
sorted by expert and each expert's rows are padded to whole tiles, so that at most E tiles are partly
empty. Gradients are written out: differentiating the loop would add a zero-padded copy of all weights
per tile. Letters: R = T X chosen pairs, P padded slots, Z tiles, F an expert's inner width.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class _Plan(NamedTuple):
    tiles: Array  # how many are in use
    expert_Z: Array
    slot_TX: Array  # where a pair lies
    pair_P: Array  # which pair lies there; R if none


def tiled(x_TD, combine_TE, gate_up_EDF, down_EFD, experts_per_token):
    """As the public op."""
    weight_TX, expert_TX = lax.top_k(combine_TE, experts_per_token)
    plan = _plan(expert_TX, combine_TE.shape[1])
    return _experts(x_TD, weight_TX.astype(x_TD.dtype), gate_up_EDF, down_EFD, plan)


def _tile_rows(pairs: int, experts: int) -> int:
    """A power of two near half an expert's share: little padding, yet whole matmuls."""
    return min(128, max(8, 1 << (pairs // (2 * experts)).bit_length()))


def _plan(expert_TX: Array, experts: int) -> _Plan:
    pairs = expert_TX.size
    rows = _tile_rows(pairs, experts)
    expert_R = expert_TX.reshape(-1)
    order_R = jnp.argsort(expert_R, stable=True)
    sizes_E = jnp.bincount(expert_R, length=experts)
    tiles_E = -(-sizes_E // rows)
    ends_E = jnp.cumsum(tiles_E)
    # A pair moves right by the padding of the experts before its own.
    shift_E = (ends_E - tiles_E) * rows - (jnp.cumsum(sizes_E) - sizes_E)
    slot_R = jnp.arange(pairs) + shift_E[expert_R[order_R]]
    most = pairs // rows + min(experts, pairs)
    return _Plan(
        tiles=ends_E[-1],
        expert_Z=jnp.searchsorted(ends_E, jnp.arange(most), side="right"),
        slot_TX=jnp.zeros(pairs, slot_R.dtype).at[order_R].set(slot_R).reshape(expert_TX.shape),
        pair_P=jnp.full(most * rows, pairs).at[slot_R].set(order_R),
    )


def _spread(values_TD: Array, plan: _Plan) -> Array:
    """[T, ...] -> [P, ...], each token's values in its slots and zeros in empty ones."""
    return values_TD.at[plan.pair_P // plan.slot_TX.shape[1]].get(mode="fill", fill_value=0)


def _swiglu(gate_up: Array) -> Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _each_tile(plan: _Plan, body, carry):
    """carry <- body(expert, read, write, carry) with `read` and `write` of this tile's rows."""
    rows = plan.pair_P.shape[0] // plan.expert_Z.shape[0]

    def step(z, carry):
        read = partial(lax.dynamic_slice_in_dim, start_index=z * rows, slice_size=rows)
        write = partial(lax.dynamic_update_slice_in_dim, start_index=z * rows, axis=0)
        return body(plan.expert_Z[z], read, write, carry)

    return lax.fori_loop(0, plan.tiles.astype(jnp.int32), step, carry)


@jax.custom_vjp
def _experts(x_TD, weight_TX, gate_up_EDF, down_EFD, plan):
    return _forward(x_TD, weight_TX, gate_up_EDF, down_EFD, plan)[0]


def _forward(x_TD, weight_TX, gate_up_EDF, down_EFD, plan):
    x_PD = _spread(x_TD, plan)

    def body(e, read, write, carry):
        gate_up_PF, out_PD = carry
        gate_up = read(x_PD) @ gate_up_EDF[e]
        return write(gate_up_PF, gate_up), write(out_PD, _swiglu(gate_up) @ down_EFD[e])

    empty_PF = jnp.zeros((x_PD.shape[0], gate_up_EDF.shape[2]), x_PD.dtype)
    gate_up_PF, out_PD = _each_tile(plan, body, (empty_PF, jnp.zeros_like(x_PD)))
    y_TD = jnp.einsum("txd,tx->td", out_PD[plan.slot_TX], weight_TX)
    return y_TD, (x_TD, weight_TX, gate_up_EDF, down_EFD, plan, gate_up_PF)


def _backward(saved, dy_TD):
    x_TD, weight_TX, gate_up_EDF, down_EFD, plan, gate_up_PF = saved
    x_PD, dy_PD = _spread(x_TD, plan), _spread(dy_TD, plan)
    weight_P = weight_TX.reshape(-1).at[plan.pair_P].get(mode="fill", fill_value=0)

    def body(e, read, write, carry):
        dx_PD, dweight_P, dgate_up_EDF, ddown_EFD = carry
        weight = read(weight_P)[:, None]
        inner, pull = jax.vjp(_swiglu, read(gate_up_PF))
        dinner = read(dy_PD) @ down_EFD[e].T
        (dgate_up,) = pull(dinner * weight)
        return (
            write(dx_PD, dgate_up @ gate_up_EDF[e].T),
            write(dweight_P, (dinner * inner).sum(-1)),
            dgate_up_EDF.at[e].add(read(x_PD).T @ dgate_up),
            ddown_EFD.at[e].add((inner * weight).T @ read(dy_PD)),
        )

    empty = (jnp.zeros_like(x) for x in (x_PD, weight_P, gate_up_EDF, down_EFD))
    dx_PD, dweight_P, dgate_up_EDF, ddown_EFD = _each_tile(plan, body, tuple(empty))
    no_plan = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), plan)
    return dx_PD[plan.slot_TX].sum(1), dweight_P[plan.slot_TX], dgate_up_EDF, ddown_EFD, no_plan


_experts.defvjp(_forward, _backward)
