"""Gated full attention with grouped kv heads, head norms and partial rotary positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrl.model.linear import project
from jaxrl.model.norms import apply_rope, rms_norm
from jaxrl.model.params import attention_weights, create
from jaxrl.model.spec import ModelSpec
from kernels.attention import attention

Rope = tuple[Array, Array]


class KvCache(NamedTuple):
    """Keys (rotated) and values of a row at positions 0 .. length - 1; what lies behind is ignored."""

    k_BSKH: Array
    v_BSKH: Array


class GatedAttention(nnx.Module):
    """The full-attention mixer."""

    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param
    out: nnx.Param

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        self.spec = spec
        create(self, attention_weights(spec), rngs)

    def init_cache(self, batch: int, context: int) -> KvCache:
        """An empty cache for `batch` rows of `context` positions."""
        spec = self.spec
        shape = (batch, context, spec.num_kv_heads, spec.head_dim)
        return KvCache(jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype))

    def __call__(
        self, x_BTD: Float[Array, "B T D"], *, rope: Rope, mask_BTS: Bool[Array, "B T S"]
    ) -> Float[Array, "B T D"]:
        """Mixes packed rows; `mask_BTS` says which keys each query sees."""
        q_BTNH, gate_BTD, k_BTKH, v_BTKH = self._project(x_BTD, rope)
        return self._attend(q_BTNH, gate_BTD, k_BTKH, v_BTKH, mask_BTS)

    def extend(
        self,
        x_BTD: Float[Array, "B T D"],
        cache: KvCache,
        *,
        rope: Rope,
        lengths_B: Int[Array, " B"],
        counts_B: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], KvCache]:
        """Writes the first `counts_B` tokens behind `lengths_B` cached ones and attends to all of them."""
        q_BTNH, gate_BTD, k_BTKH, v_BTKH = self._project(x_BTD, rope)
        T, S = x_BTD.shape[1], cache.k_BSKH.shape[1]
        source_BS = jnp.arange(S) - lengths_B[:, None]
        written_BS = (source_BS >= 0) & (source_BS < counts_B[:, None])
        cache = KvCache(
            *(
                _write(old, new, source_BS, written_BS)
                for old, new in zip(cache, (k_BTKH, v_BTKH), strict=True)
            )
        )
        query_BT = jnp.where(jnp.arange(T) < counts_B[:, None], lengths_B[:, None] + jnp.arange(T), -1)
        mask_BTS = jnp.arange(S) <= query_BT[..., None]
        return self._attend(q_BTNH, gate_BTD, *cache, mask_BTS), cache

    def _project(self, x_BTD: Array, rope: Rope) -> tuple[Array, Array, Array, Array]:
        spec, (B, T, _) = self.spec, x_BTD.shape
        query_gate = project(x_BTD, self.q[...]).reshape(B, T, spec.num_heads, 2 * spec.head_dim)
        q_BTNH, gate_BTNH = jnp.split(query_gate, 2, axis=-1)
        k_BTKH, v_BTKH = (project(x_BTD, w[...]).reshape(B, T, -1, spec.head_dim) for w in (self.k, self.v))
        q_BTNH = apply_rope(rms_norm(q_BTNH, self.q_norm[...], eps=spec.norm_eps), rope)
        k_BTKH = apply_rope(rms_norm(k_BTKH, self.k_norm[...], eps=spec.norm_eps), rope)
        return q_BTNH, gate_BTNH.reshape(B, T, -1), k_BTKH, v_BTKH

    def _attend(self, q_BTNH: Array, gate_BTD: Array, k: Array, v: Array, mask_BTS: Array) -> Array:
        scale = self.spec.head_dim**-0.5
        out_BTNH = attention(q_BTNH, k, v_BSKH=v, mask_BTS=mask_BTS, scale=scale)
        return project(out_BTNH.reshape(gate_BTD.shape) * jax.nn.sigmoid(gate_BTD), self.out[...])


def _write(cache_BSKH: Array, new_BTKH: Array, source_BS: Array, written_BS: Array) -> Array:
    """A select over the whole cache: on CPU much cheaper than a scatter, elsewhere done in place."""
    if new_BTKH.shape[1] > 1:
        index_BS = jnp.clip(source_BS, 0, new_BTKH.shape[1] - 1)
        new_BTKH = jnp.take_along_axis(new_BTKH, index_BS[..., None, None], axis=1)
    return jnp.where(written_BS[..., None, None], new_BTKH, cache_BSKH)
