"""Gated full attention with grouped kv heads, head norms and partial rotary positions."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxrl.model.linear import project
from jaxrl.model.norms import apply_rope, rms_norm
from jaxrl.model.params import attention_weights, create
from jaxrl.model.spec import ModelSpec
from kernels.attention import attention, paged_attention, write_pages

Rope = tuple[Array, Array]


class PagedKv(NamedTuple):
    """Keys (rotated) and values in pages of S positions; which row a page belongs to is not known here."""

    k_PSKH: Array
    v_PSKH: Array

    @classmethod
    def empty(cls, spec: ModelSpec, *, pages: int, page_size: int) -> "PagedKv":
        """Zeros."""
        shape = (pages, page_size, spec.num_kv_heads, spec.head_dim)
        return cls(jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype))


class Rows(NamedTuple):
    """What the rows of a cache hold, and how many of T new tokens each takes."""

    lengths_B: Array
    counts_B: Array
    pages_BX: Array  # page ids in order; behind a row's end they are not read


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

    def __call__(
        self, x_BTD: Float[Array, "B T D"], *, rope: Rope, mask_BTS: Bool[Array, "B T S"]
    ) -> Float[Array, "B T D"]:
        """Mixes packed rows; `mask_BTS` says which keys each query sees."""
        q_BTNH, gate_BTD, k_BTKH, v_BTKH = self._project(x_BTD, rope)
        scale = self.spec.head_dim**-0.5
        out_BTNH = attention(q_BTNH, k_BTKH, v_BSKH=v_BTKH, mask_BTS=mask_BTS, scale=scale)
        return self._output(out_BTNH, gate_BTD)

    def extend(
        self, x_BTD: Float[Array, "B T D"], cache: PagedKv, *, rope: Rope, rows: Rows
    ) -> tuple[Float[Array, "B T D"], PagedKv]:
        """Writes each row's new tokens into its pages and attends to all of the row."""
        q_BTNH, gate_BTD, k_BTKH, v_BTKH = self._project(x_BTD, rope)
        write = partial(write_pages, **rows._asdict())
        cache = PagedKv(write(cache.k_PSKH, k_BTKH), write(cache.v_PSKH, v_BTKH))
        scale = self.spec.head_dim**-0.5
        out_BTNH = paged_attention(q_BTNH, cache.k_PSKH, v_PSKH=cache.v_PSKH, scale=scale, **rows._asdict())
        return self._output(out_BTNH, gate_BTD), cache

    def _project(self, x_BTD: Array, rope: Rope) -> tuple[Array, Array, Array, Array]:
        spec, (B, T, _) = self.spec, x_BTD.shape
        query_gate = project(x_BTD, self.q[...]).reshape(B, T, spec.num_heads, 2 * spec.head_dim)
        q_BTNH, gate_BTNH = jnp.split(query_gate, 2, axis=-1)
        k_BTKH, v_BTKH = (project(x_BTD, w[...]).reshape(B, T, -1, spec.head_dim) for w in (self.k, self.v))
        q_BTNH = apply_rope(rms_norm(q_BTNH, self.q_norm[...], eps=spec.norm_eps), rope)
        k_BTKH = apply_rope(rms_norm(k_BTKH, self.k_norm[...], eps=spec.norm_eps), rope)
        return q_BTNH, gate_BTNH.reshape(B, T, -1), k_BTKH, v_BTKH

    def _output(self, out_BTNH: Array, gate_BTD: Array) -> Array:
        return project(out_BTNH.reshape(gate_BTD.shape) * jax.nn.sigmoid(gate_BTD), self.out[...])
