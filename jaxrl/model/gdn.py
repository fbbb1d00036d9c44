"""Gated DeltaNet mixer: projections, short convolution, gated delta rule, gated norm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrl.model.linear import project, unfused
from jaxrl.model.norms import gated_rms_norm, l2_norm
from jaxrl.model.params import accumulation_dtype, create, gdn_weights
from jaxrl.model.spec import ModelSpec
from kernels.causal_conv1d import causal_conv1d
from kernels.gated_delta_rule import gated_delta_rule


class GdnCache(NamedTuple):
    """What a row of a GDN layer remembers; its size does not depend on the context."""

    taps_BXD: Array  # the last conv_kernel - 1 inputs of the convolution, in the model's dtype
    state_BNHJ: Array  # recurrent state, at least float32

    @classmethod
    def empty(cls, spec: ModelSpec, *, rows: int) -> "GdnCache":
        """Rows that have seen no token."""
        taps = jnp.zeros((rows, spec.conv_kernel - 1, spec.gdn_qkv_dim), spec.dtype)
        state_shape = (rows, spec.gdn_value_heads, spec.gdn_key_dim, spec.gdn_value_dim)
        return cls(taps, jnp.zeros(state_shape, accumulation_dtype(spec.dtype)))


class GatedDeltaNet(nnx.Module):
    """The linear-attention mixer."""

    qkv: nnx.Param
    z: nnx.Param
    b: nnx.Param
    a: nnx.Param
    conv: nnx.Param
    A_log: nnx.Param
    dt_bias: nnx.Param
    norm: nnx.Param
    out: nnx.Param

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        self.spec = spec
        create(self, gdn_weights(spec), rngs)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], *, segment_ids_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Mixes packed rows; state and taps start afresh in each segment, segment 0 is padding."""
        y_BTD, _ = self._mix(x_BTD, segment_ids_BT != 0, segment_ids_BT=segment_ids_BT)
        return y_BTD

    def extend(
        self, x_BTD: Float[Array, "B T D"], cache: GdnCache, *, counts_B: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], GdnCache]:
        """Continues each row by its first `counts_B` tokens; a row of count 0 keeps its cache."""
        valid_BT = jnp.arange(x_BTD.shape[1]) < counts_B[:, None]
        y_BTD, new = self._mix(x_BTD, valid_BT, cache=cache, counts_B=counts_B)
        return y_BTD, GdnCache(*(_where_rows(counts_B > 0, n, o) for n, o in zip(new, cache, strict=True)))

    def _mix(
        self,
        x_BTD: Array,
        valid_BT: Bool[Array, "B T"],
        *,
        segment_ids_BT: Array | None = None,
        cache: GdnCache | None = None,
        counts_B: Array | None = None,
    ) -> tuple[Array, GdnCache]:
        # Zero inputs keep the conv clean of padding; g = beta = 0 below keeps the state.
        x_BTD = jnp.where(valid_BT[..., None], x_BTD, 0)
        mixed_BTD, taps_BXD = causal_conv1d(
            project(x_BTD, self.qkv[...]),
            self.conv[...],
            segment_ids_BT=segment_ids_BT,
            taps_BXD=None if cache is None else cache.taps_BXD,
            counts_B=counts_B,
        )
        q_BTKH, k_BTKH, v_BTNJ = self._heads(jax.nn.silu(mixed_BTD))
        g_BTN, beta_BTN = self._gates(x_BTD, valid_BT)
        o_BTNJ, state_BNHJ = gated_delta_rule(
            q_BTKH,
            k_BTKH,
            v_BTNJ=v_BTNJ,
            g_BTN=g_BTN,
            beta_BTN=beta_BTN,
            segment_ids_BT=segment_ids_BT,
            initial_state_BNHJ=None if cache is None else cache.state_BNHJ,
        )
        # Two products with all between them in one fusion are slower on CPU than one after the other.
        z_BTNJ = unfused(project(x_BTD, self.z[...])).reshape(o_BTNJ.shape)
        o_BTNJ = gated_rms_norm(
            o_BTNJ.astype(x_BTD.dtype), self.norm[...], gate_H=z_BTNJ, eps=self.spec.norm_eps
        )
        y_BTD = project(unfused(o_BTNJ).reshape(*x_BTD.shape[:2], -1), self.out[...])
        return y_BTD, GdnCache(taps_BXD, state_BNHJ)

    def _heads(self, mixed_BTD: Array) -> tuple[Array, Array, Array]:
        spec, (B, T, _) = self.spec, mixed_BTD.shape
        key_dim = spec.gdn_key_heads * spec.gdn_key_dim
        q, k, v = jnp.split(mixed_BTD, (key_dim, 2 * key_dim), axis=-1)
        q_BTKH, k_BTKH = (l2_norm(x.reshape(B, T, -1, spec.gdn_key_dim)) for x in (q, k))
        return q_BTKH * spec.gdn_key_dim**-0.5, k_BTKH, v.reshape(B, T, -1, spec.gdn_value_dim)

    def _gates(self, x_BTD: Array, valid_BT: Array) -> tuple[Array, Array]:
        dtype = accumulation_dtype(x_BTD.dtype)
        a_BTN = project(x_BTD, self.a[...]).astype(dtype) + self.dt_bias[...].astype(dtype)
        g_BTN = -jnp.exp(self.A_log[...].astype(dtype)) * jax.nn.softplus(a_BTN)
        beta_BTN = jax.nn.sigmoid(project(x_BTD, self.b[...])).astype(dtype)
        return tuple(jnp.where(valid_BT[..., None], gate, 0) for gate in (g_BTN, beta_BTN))  # pyright: ignore


def _where_rows(rows_B: Array, new: Array, old: Array) -> Array:
    return jnp.where(rows_B.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
