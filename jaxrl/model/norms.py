"""Norms and rotary positions. Each computes in at least float32 and returns its input's dtype."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.model.params import accumulation_dtype
from jaxrl.model.spec import ModelSpec


def rms_norm(x_D: Float[Array, "*B D"], weight_D: Float[Array, " D"], *, eps: float) -> Float[Array, "*B D"]:
    """Zero-centred RMS norm: x / rms(x) * (1 + w), cast only at the end."""
    dtype = accumulation_dtype(x_D.dtype)
    normed = _unit_rms(x_D.astype(dtype), eps)
    return (normed * (1 + weight_D.astype(dtype))).astype(x_D.dtype)


def gated_rms_norm(
    x_H: Float[Array, "*B H"], weight_H: Float[Array, " H"], *, gate_H: Float[Array, "*B H"], eps: float
) -> Float[Array, "*B H"]:
    """RMS norm with a plain weight, then times silu(gate): the output norm of a GDN layer."""
    dtype = accumulation_dtype(x_H.dtype)
    normed = _unit_rms(x_H.astype(dtype), eps).astype(gate_H.dtype) * weight_H.astype(gate_H.dtype)
    return (normed.astype(dtype) * jax.nn.silu(gate_H.astype(dtype))).astype(gate_H.dtype)


def l2_norm(x_H: Float[Array, "*B H"], *, eps: float = 1e-6) -> Float[Array, "*B H"]:
    """x / |x| in at least float32. `eps` is inside the root, so that a zero row has a finite gradient."""
    x_H = x_H.astype(accumulation_dtype(x_H.dtype))
    return x_H * jax.lax.rsqrt((x_H * x_H).sum(-1, keepdims=True) + eps)


def rope_angles(
    positions_BT: Int[Array, "B T"], spec: ModelSpec
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Cosines and sines of the rotary_dim / 2 angles, in the model's dtype."""
    dtype = accumulation_dtype(spec.dtype)
    exponents = jnp.arange(0, spec.rotary_dim, 2, dtype=dtype) / spec.rotary_dim
    angles_BTR = positions_BT[..., None].astype(dtype) / spec.rope_theta**exponents
    return jnp.cos(angles_BTR).astype(spec.dtype), jnp.sin(angles_BTR).astype(spec.dtype)


def apply_rope(
    x_BTNH: Float[Array, "B T N H"], rope: tuple[Float[Array, "B T R"], Float[Array, "B T R"]]
) -> Float[Array, "B T N H"]:
    """Rotates the first 2 R channels of each head as two halves; the others pass."""
    cos, sin = (part[:, :, None] for part in rope)
    half = cos.shape[-1]
    first, second, rest = jnp.split(x_BTNH, (half, 2 * half), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _unit_rms(x: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)
