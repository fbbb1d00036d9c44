"""Causal convolution as a sum of shifted products, which XLA fuses into one pass."""

import jax.numpy as jnp


def causal_conv1d(x_BTD, weight_WD, segment_ids_BT, taps_BXD, counts_B):
    """As the public op."""
    B, T, D = x_BTD.shape
    past = weight_WD.shape[0] - 1
    if taps_BXD is None:
        taps_BXD = jnp.zeros((B, past, D), x_BTD.dtype)
    full_BUD = jnp.concatenate([taps_BXD.astype(x_BTD.dtype), x_BTD], axis=1)
    y_BTD = x_BTD * weight_WD[past]
    for i in range(past):
        shifted_BTD = full_BUD[:, i : i + T]
        if segment_ids_BT is not None:
            same_BT = _shift_right(segment_ids_BT, past - i) == segment_ids_BT
            shifted_BTD = jnp.where(same_BT[..., None], shifted_BTD, 0)
        y_BTD = y_BTD + shifted_BTD * weight_WD[i]
    return y_BTD, _last_inputs(full_BUD, past, counts_B).astype(taps_BXD.dtype)


def _shift_right(segment_ids_BT, steps):
    T = segment_ids_BT.shape[1]
    return jnp.pad(segment_ids_BT, ((0, 0), (steps, 0)), mode="edge")[:, :T]


def _last_inputs(full_BUD, past, counts_B):
    if counts_B is None:
        return full_BUD[:, full_BUD.shape[1] - past :]
    if full_BUD.shape[1] == past + 1:
        return jnp.where((counts_B > 0)[:, None, None], full_BUD[:, 1:], full_BUD[:, :-1])
    index_BX = counts_B[:, None] + jnp.arange(past)
    return jnp.take_along_axis(full_BUD, index_BX[..., None], axis=1)
