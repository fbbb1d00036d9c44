"""The chunked rule and the decode step against the float64 recurrence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.gated_delta_rule import gated_delta_rule, reference

B, K, N, H, J = 2, 2, 4, 8, 6
LENGTHS = (1, 2, 15, 31, 32, 33, 64, 65, 130)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def inputs(T, *, decay=1.0, correlated=False, seed=0, segments=False, state=True):
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((B, T, K, H)) for _ in range(2))
    if correlated:
        k = k[:, :1] + 0.3 * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    made: dict[str, np.ndarray] = {
        "q_BTKH": q * H**-0.5,
        "k_BTKH": k,
        "v_BTNJ": rng.standard_normal((B, T, N, J)),
        "g_BTN": -decay * rng.uniform(0, 1, (B, T, N)),
        "beta_BTN": 1 / (1 + np.exp(-rng.standard_normal((B, T, N)))),
    }
    if state:
        made["initial_state_BNHJ"] = rng.standard_normal((B, N, H, J))
    if segments:
        made["segment_ids_BT"] = np.cumsum(rng.uniform(size=(B, T)) < 0.08, axis=1).astype(np.int32)
    return made


# Compiled once per shape for the whole file: compiling is what takes time here.
@partial(jax.jit, static_argnames="implementation")
def compiled(arrays, implementation):
    rest = {name: x for name, x in arrays.items() if name not in ("q_BTKH", "k_BTKH")}
    return gated_delta_rule(arrays["q_BTKH"], arrays["k_BTKH"], **rest, implementation=implementation)


def run(made, implementation="xla"):
    return compiled({name: jnp.asarray(x) for name, x in made.items()}, implementation)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("segments", [False, True])
def test_values(T, segments):
    made = inputs(T, segments=segments)
    expected = reference.gated_delta_rule(**made)
    for got, want in zip(run(made), expected, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", [{"decay": 0.0}, {"decay": 90.0}, {"decay": 1000.0}, {"correlated": True}])
def test_hard_values(case):
    made = inputs(70, **case)
    for got, want in zip(run(made), reference.gated_delta_rule(**made), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def test_starts_from_zero_without_a_state():
    made = inputs(40, state=False)
    for got, want in zip(run(made), reference.gated_delta_rule(**made), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


@partial(jax.jit, static_argnames="implementation")
def compiled_gradients(floats, ints, implementation):
    def loss(floats):
        o, S = compiled(floats | ints, implementation)
        return (o * jnp.cos(jnp.arange(o.size)).reshape(o.shape)).sum() + (S * S).sum()

    return jax.grad(loss)(floats)


def gradients(made, implementation):
    ints = {name: jnp.asarray(x) for name, x in made.items() if name == "segment_ids_BT"}
    floats = {name: jnp.asarray(x) for name, x in made.items() if name not in ints}
    return compiled_gradients(floats, ints, implementation)


@pytest.mark.parametrize("T", [2, 33, 70])
@pytest.mark.parametrize("case", [{}, {"segments": True}, {"decay": 90.0}])
def test_gradients_equal_those_of_the_recurrence(T, case):
    made = inputs(T, **case)
    want = gradients(made, "recurrent")
    for name, got in gradients(made, "xla").items():
        np.testing.assert_allclose(got, want[name], rtol=0, atol=1e-10, err_msg=name)


def test_recurrent_form_equals_the_reference():
    made = inputs(50, segments=True)
    for got, want in zip(
        run(made, implementation="recurrent"), reference.gated_delta_rule(**made), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_idle_token_keeps_the_state_bit_for_bit():
    made = inputs(5)
    made["g_BTN"][:], made["beta_BTN"][:] = 0, 0
    np.testing.assert_array_equal(run(made)[1], made["initial_state_BNHJ"])


@pytest.mark.parametrize("first", [1, 7, 32, 50])
def test_state_carries_over_a_split(first):
    made = inputs(70)
    state = made.pop("initial_state_BNHJ")
    head = {name: x[:, :first] for name, x in made.items()} | {"initial_state_BNHJ": state}
    o_head, middle = run(head)
    o_tail, last = run({name: x[:, first:] for name, x in made.items()} | {"initial_state_BNHJ": middle})
    o, whole = reference.gated_delta_rule(**made, initial_state_BNHJ=state)
    np.testing.assert_allclose(np.concatenate([o_head, o_tail], 1), o, rtol=0, atol=1e-10)
    np.testing.assert_allclose(last, whole, rtol=0, atol=1e-10)


def test_second_document_does_not_see_the_first():
    made = inputs(70, state=False)
    made["segment_ids_BT"] = np.broadcast_to(np.where(np.arange(70) < 41, 1, 2), (B, 70)).astype(np.int32)
    other = {name: np.array(x, copy=True) for name, x in made.items()}
    for name in ("q_BTKH", "k_BTKH", "v_BTNJ", "g_BTN", "beta_BTN"):
        other[name][:, :41] *= 0.7
    np.testing.assert_array_equal(run(made)[0][:, 41:], run(other)[0][:, 41:])


def test_float32_error_is_small():
    made = inputs(130, correlated=True)
    want, _ = reference.gated_delta_rule(**made)
    got, _ = run({name: np.asarray(x, np.float32) for name, x in made.items()})
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_refuses_what_it_cannot_do():
    made = inputs(3)
    with pytest.raises(ValueError, match="implementation to be one of 'xla'"):
        run(made, implementation="triton")
    # Three heads in every array: their shapes agree, so the check of shapes lets them through.
    heads_axis = {"v_BTNJ": 2, "g_BTN": 2, "beta_BTN": 2, "initial_state_BNHJ": 1}
    odd = made | {name: made[name].take(range(3), axis) for name, axis in heads_axis.items()}
    with pytest.raises(ValueError, match="multiple of the 2 key heads; got 3"):
        run(odd)
