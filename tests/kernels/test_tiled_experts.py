"""The tiled expert layer, values and gradients, where tiles are full, partial, single or empty."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.grouped_matmul import expert_mlp, reference


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def routing(kind, T, E, X):
    rng = np.random.default_rng(T + E)
    combine = np.zeros((T, E))
    for t in range(T):
        chosen = {"random": rng.permutation(E)[:X], "one": np.arange(X), "last": E - 1 - np.arange(X)}[kind]
        combine[t, chosen] = rng.uniform(0.1, 1, X)
    return combine


def inputs(kind, T, E, X, D=5, F=3):
    rng = np.random.default_rng(0)
    shapes = ((T, D), (E, D, 2 * F), (E, F, D))
    x, gate_up, down = (rng.standard_normal(shape) for shape in shapes)
    return x, routing(kind, T, E, X), gate_up, down


@partial(jax.jit, static_argnames=("X", "implementation"))
def run(x, combine, gate_up, down, *, X, implementation="tiled"):
    return expert_mlp(
        x, combine, gate_up_EDF=gate_up, down_EFD=down, experts_per_token=X, implementation=implementation
    )


# (1, 9, 2): fewer pairs than experts; (40, 3, 1): several tiles each; (70, 4, 4): every expert.
SIZES = [(1, 9, 2), (40, 3, 1), (33, 8, 2), (70, 4, 4)]


@pytest.mark.parametrize("kind", ["random", "one", "last"])
@pytest.mark.parametrize(("T", "E", "X"), SIZES)
def test_values(kind, T, E, X):
    made = inputs(kind, T, E, X)
    want = reference.expert_mlp(made[0], made[1], gate_up_EDF=made[2], down_EFD=made[3])
    np.testing.assert_allclose(run(*map(jnp.asarray, made), X=X), want, rtol=0, atol=1e-12)


def test_fewer_choices_than_allowed():
    made = inputs("random", 20, 6, 2)
    made[1][::3] = 0
    want = reference.expert_mlp(made[0], made[1], gate_up_EDF=made[2], down_EFD=made[3])
    np.testing.assert_allclose(run(*map(jnp.asarray, made), X=3), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "T", "E", "X"), [("random", 33, 8, 2), ("one", 40, 3, 1)])
def test_gradients_equal_those_of_the_masked_form(kind, T, E, X):
    arrays = tuple(map(jnp.asarray, inputs(kind, T, E, X)))

    def gradients(implementation):
        def loss(*arrays):
            return jnp.sin(run(*arrays, X=X, implementation=implementation)).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays)

    # An entry that no token may use has a gradient in the masked form only.
    chosen = (1, arrays[1] > 0, 1, 1)
    for got, want, used in zip(gradients("tiled"), gradients("dense_masked"), chosen, strict=True):
        np.testing.assert_allclose(got, want * used, rtol=0, atol=1e-12)


def test_vmap_and_remat():
    made = [jnp.asarray(array) for array in inputs("random", 12, 4, 2)]
    rows = jnp.stack([made[0], 2 * made[0]])

    def summed(x):
        return jax.checkpoint(lambda x: run(x, *made[1:], X=2).sum())(x)

    got = jax.vmap(jax.grad(summed))(rows)
    for each, x in zip(got, rows, strict=True):
        np.testing.assert_allclose(each, jax.grad(summed)(x), rtol=0, atol=1e-12)
