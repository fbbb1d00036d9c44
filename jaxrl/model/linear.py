"""Projections whose gradients XLA's CPU compiler computes as fast as their values."""

import jax
import jax.numpy as jnp
from jax import Array, lax


def unfused(x: Array) -> Array:
    """x, which XLA's CPU compiler is to compute by itself and not within what uses it."""
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


@jax.custom_vjp
def project(x_BD: Array, weight_DF: Array) -> Array:
    """x [..., D] @ weight [D, F].

    The gradients are written out for CPU's sake. A plain matmul's weight gradient is a transposed
    product of transposed copies there, and what computes the cotangent is fused into such a copy and so
    runs element by element across its rows: together several times slower than the products.
    """
    return _product(x_BD, weight_DF)


def _product(x_BD: Array, weight_DF: Array) -> Array:
    """One column goes as two: XLA's CPU product with a vector sums the last rows in another order than the
    others, and then what a row gives would depend on its place among them."""
    if weight_DF.shape[-1] > 1:
        return x_BD @ weight_DF
    return (x_BD @ jnp.pad(weight_DF, ((0, 0), (0, 1))))[..., :1]


def _forward(x_BD: Array, weight_DF: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x_BD, weight_DF), (x_BD, weight_DF)


def _backward(saved: tuple[Array, Array], dy_BF: Array) -> tuple[Array, Array]:
    x_BD, weight_DF = saved
    dy_BF = unfused(dy_BF)
    x_TD, dy_TF = (each.reshape(-1, each.shape[-1]) for each in (x_BD, dy_BF))
    dx_BD = lax.dot_general(dy_BF, weight_DF, (((dy_BF.ndim - 1,), (1,)), ((), ())))
    return dx_BD, lax.dot_general(x_TD, dy_TF, (((0,), (0,)), ((), ())))


project.defvjp(_forward, _backward)
