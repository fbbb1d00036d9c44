"""Expert layers in plain JAX. F is an expert's inner width."""

import jax
import jax.numpy as jnp
from jax import lax


def dense_masked(x_TD, combine_TE, gate_up_EDF, down_EFD, experts_per_token):
    """Two plain matmuls over all experts; the weight is applied before `down`, which is linear."""
    del experts_per_token
    E, F, D = down_EFD.shape
    gate_up = x_TD @ gate_up_EDF.transpose(1, 0, 2).reshape(D, E * 2 * F)
    gate_TEF, up_TEF = jnp.split(gate_up.reshape(-1, E, 2 * F), 2, axis=-1)
    inner_TEF = jax.nn.silu(gate_TEF) * up_TEF * combine_TE.astype(x_TD.dtype)[..., None]
    return inner_TEF.reshape(-1, E * F) @ down_EFD.reshape(E * F, D)


def ragged(x_TD, combine_TE, gate_up_EDF, down_EFD, experts_per_token):
    """Each (token, expert) pair is a row; rows are sorted by expert."""
    (T, D), E = x_TD.shape, combine_TE.shape[1]
    weight_TX, expert_TX = lax.top_k(combine_TE, experts_per_token)
    expert_R = expert_TX.reshape(-1)
    order_R = jnp.argsort(expert_R, stable=True)
    sizes_E = jnp.bincount(expert_R, length=E).astype(jnp.int32)
    rows_RD = x_TD[order_R // experts_per_token]
    gate_RF, up_RF = jnp.split(lax.ragged_dot(rows_RD, gate_up_EDF, sizes_E), 2, axis=-1)
    out_RD = lax.ragged_dot(jax.nn.silu(gate_RF) * up_RF, down_EFD, sizes_E)
    out_RD = out_RD * weight_TX.reshape(-1)[order_R, None].astype(x_TD.dtype)
    return jnp.zeros_like(rows_RD).at[order_R].set(out_RD).reshape(T, -1, D).sum(1)
