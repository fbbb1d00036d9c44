"""Log-probabilities in chunks, routing and the balancing loss against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr

from jaxrl.model.logprob import target_logprobs
from jaxrl.model.moe import FEW_EXPERTS, RouterStats, balancing_loss, top_experts


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def inputs(tokens=(2, 11), D=6, V=17):
    rng = np.random.default_rng(0)
    return rng.standard_normal((*tokens, D)), rng.standard_normal((D, V)), rng.integers(0, V, tokens)


@pytest.mark.parametrize("chunk", [1, 5, 11, 22, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy(chunk, temperature):
    hidden, head, targets = inputs()
    logits = hidden @ head / temperature
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logprob, entropy, _ = target_logprobs(
        jnp.asarray(hidden),
        jnp.asarray(head),
        targets_B=jnp.asarray(targets),
        temperature=temperature,
        chunk=chunk,
    )
    np.testing.assert_allclose(logprob, np.take_along_axis(table, targets[..., None], -1)[..., 0], atol=1e-12)
    np.testing.assert_allclose(entropy, -(np.exp(table) * table).sum(-1), atol=1e-12)


@pytest.mark.parametrize("offset", [0.0, 40.0, -300.0])
def test_large_logits_cost_no_more_than_their_differences(offset):
    rng = np.random.default_rng(1)
    logits = (rng.integers(-64, 64, (50, 17)) / 8 + offset).astype(np.float32)  # exact, also at 300
    targets = rng.integers(0, 17, 50)
    table = logits.astype(np.float64) - offset
    table -= np.log(np.exp(table).sum(-1, keepdims=True))
    head = jnp.eye(17, dtype=jnp.float32)
    scores = target_logprobs(jnp.asarray(logits), head, targets_B=jnp.asarray(targets))
    np.testing.assert_allclose(scores.logprob_B, table[np.arange(50), targets], rtol=2e-7, atol=2e-7)
    np.testing.assert_allclose(scores.entropy_B, -(np.exp(table) * table).sum(-1), atol=2e-6)


def gradients(function):
    hidden, head, targets = map(jnp.asarray, inputs())

    def loss(hidden, head):
        logprob, entropy, norm = function(hidden, head, targets)
        return jnp.sin(logprob).sum() + 0.3 * jnp.cos(entropy).sum() + 0.1 * (norm**2).sum()

    return jax.grad(loss, argnums=(0, 1))(hidden, head)


def plain(hidden, head, targets):
    table = jax.nn.log_softmax(hidden @ head)
    logprob = jnp.take_along_axis(table, targets[..., None], -1)[..., 0]
    return logprob, -(jnp.exp(table) * table).sum(-1), jax.nn.logsumexp(hidden @ head, axis=-1)


def test_gradients_equal_those_of_the_plain_form():
    got = gradients(lambda h, w, t: target_logprobs(h, w, targets_B=t, chunk=5))
    for a, b in zip(got, gradients(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def sizes_in(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from sizes_in(getattr(inner, "jaxpr", inner))


def is_jaxpr(x):
    return isinstance(x, Jaxpr) or isinstance(getattr(x, "jaxpr", None), Jaxpr)  # open or closed


def test_the_backward_pass_never_holds_tokens_by_vocabulary():
    hidden, head, targets = (jnp.zeros((64, 4)), jnp.zeros((4, 500)), jnp.zeros(64, int))

    def loss(hidden, head):
        return target_logprobs(hidden, head, targets_B=targets, chunk=8)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, head).jaxpr
    assert max(sizes_in(jaxpr)) == 8 * 500


def test_float32_is_used_for_bfloat16_hidden_states():
    hidden, head, targets = inputs()
    logprob, entropy, _ = target_logprobs(
        jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16), targets_B=jnp.asarray(targets)
    )
    assert logprob.dtype == entropy.dtype == np.float32


@pytest.mark.parametrize("E", [8, FEW_EXPERTS + 1])
def test_top_experts(E):
    rng = np.random.default_rng(1)
    probability = rng.integers(0, 4, (50, E)) / 4.0
    marked = np.asarray(top_experts(jnp.asarray(probability), 3))
    order = np.argsort(-probability, axis=1, kind="stable")[:, :3]
    want = np.zeros_like(marked)
    np.put_along_axis(want, order, True, axis=1)
    np.testing.assert_array_equal(marked, want)


def test_balancing_loss_of_a_uniform_router_is_the_number_of_choices():
    stats = RouterStats(jnp.full((3, 8), 10.0), jnp.full((3, 8), 5.0), jnp.asarray(40.0))
    np.testing.assert_allclose(balancing_loss(stats), 2.0)
    nothing = RouterStats(jnp.zeros((3, 8)), jnp.zeros((3, 8)), jnp.asarray(0.0))
    assert balancing_loss(nothing) == 0
