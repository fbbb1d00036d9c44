"""Projections: what a row gives does not depend on its place; gradients are those of the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.model.linear import project


@pytest.mark.parametrize("F", [1, 2, 3, 32])
@pytest.mark.parametrize("T", [1, 9, 13, 100])
def test_a_row_gives_the_same_bits_wherever_it_stands(T, F):
    rng = np.random.default_rng(0)
    weight_DF, product = rng.standard_normal((37, F), np.float32), jax.jit(project)
    for row_D in rng.standard_normal((20, 37), np.float32):
        out_TF = np.asarray(product(jnp.tile(row_D, (T, 1)), weight_DF))
        assert (out_TF == out_TF[0]).all()


@pytest.mark.parametrize("F", [1, 5])
def test_gradients_equal_those_of_the_plain_product(F):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x_BTD, weight_DF = (
            jnp.asarray(rng.standard_normal((2, 3, 4))),
            jnp.asarray(rng.standard_normal((4, F))),
        )

        def gradients(product):
            return jax.grad(lambda x, w: jnp.sin(product(x, w)).sum(), argnums=(0, 1))(x_BTD, weight_DF)

        for got, want in zip(gradients(project), gradients(jnp.matmul), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
