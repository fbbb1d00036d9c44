"""Gumbel noise by counter: `jax.random`'s own, written so that XLA's CPU compiler makes one fused loop of it.

There `jax.random` runs the rounds of its generator in a loop of passes over all of the noise, which takes
several times as long.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def gumbel(
    key_B2: UInt32[Array, "B 2"], positions_B: Int[Array, " B"], *, size: int, dtype
) -> Float[Array, "B V"]:
    """Row b is `jax.random.gumbel(fold_in(key_b, position_b), (size,), dtype)`, bit for bit in float32."""
    zero_B = jnp.zeros_like(key_B2[:, 0])
    key_B2 = jnp.stack(_threefry(key_B2[:, 0], key_B2[:, 1], zero_B, positions_B.astype(jnp.uint32)), axis=1)
    if dtype != jnp.float32:
        keys_B = jax.random.wrap_key_data(key_B2, impl="threefry2x32")
        return jax.vmap(lambda key: jax.random.gumbel(key, (size,), dtype))(keys_B)
    counter_V = lax.iota(jnp.uint32, size)
    high_BV, low_BV = _threefry(key_B2[:, :1], key_B2[:, 1:], jnp.zeros_like(counter_V), counter_V)
    # 23 random bits behind the exponent of [1, 2); 0 is replaced, for its logarithm.
    mantissa_BV = ((high_BV ^ low_BV) >> 9) | jnp.uint32(0x3F800000)
    uniform_BV = lax.bitcast_convert_type(mantissa_BV, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform_BV, jnp.finfo(jnp.float32).tiny)))


def _threefry(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011) of the counter (x0, x1), elementwise."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_PARITY))
    x0, x1 = x0 + key0, x1 + key1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << rotation) | (x1 >> (32 - rotation)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
