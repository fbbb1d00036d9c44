"""Slots kept by the caller, against the training forward: every greedy token is the forward's best one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import forward_logits

from jaxrl.contracts import Sampling
from jaxrl.engine.slots import DecodeState, SlotOptions, Slots
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer

OPTIONS = SlotOptions(slots=4, context=40, prefill_length=32, page_size=8, prefill_buckets=(4, 16))
LENGTHS = (1, 2, 16, 17, 32)


@pytest.fixture(scope="module")
def model() -> Transformer:
    layers = ("linear_attention", "full_attention")
    return Transformer(replace(PRESETS["quickstart"], vocab_size=64, layer_types=layers), rngs=nnx.Rngs(3))


@pytest.fixture(scope="module")
def slots(model) -> Slots:
    return Slots(model, OPTIONS)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, length)).integers(0, 64, length).tolist()


def decode(slots: Slots, state: DecodeState, steps: int) -> tuple[DecodeState, list[list[int]]]:
    """`steps` steps; the valid tokens of each slot, whose count has to be what was reported."""
    made: list[list[int]] = [[] for _ in range(OPTIONS.slots)]
    before = np.asarray(state.sampled_B)
    for _ in range(steps):
        state, sampled = slots.generate(slots.params, state)
        for out, token, valid in zip(made, *map(np.asarray, sampled[:2]), strict=True):
            out += [int(token)] * bool(valid)
    assert [len(out) for out in made] == (np.asarray(state.sampled_B) - before).tolist()
    return state, made


def assert_greedy(model: Transformer, ids: list[int], made: list[int]) -> None:
    logits_TV = forward_logits(model, ids + made, context=OPTIONS.context)[len(ids) - 1 : -1]
    chosen_T = logits_TV[np.arange(len(made)), made]
    assert (chosen_T >= logits_TV.max(axis=-1) - 1e-4).all()
    assert np.ptp(logits_TV, axis=-1).min() > 0.1  # else any token would do


def poisoned(state: DecodeState) -> DecodeState:
    cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state.cache)
    return state._replace(cache=cache)


def test_tokens_are_the_forwards_whatever_was_in_the_slot(model, slots):
    state = poisoned(slots.init_state())
    for slot, length in enumerate(LENGTHS[:4]):
        state = slots.insert(slots.prefill(slots.params, prompt(length)), state, slot=slot)
    state, first = decode(slots, state, 5)
    state = slots.insert(slots.prefill(slots.params, prompt(32)), state, slot=2)
    state, second = decode(slots, state, 5)
    for slot, length in enumerate(LENGTHS[:4]):
        made = first[slot] if slot == 2 else first[slot] + second[slot]
        assert len(made) == (5 if slot == 2 else 10)
        assert_greedy(model, prompt(length), made)
    assert_greedy(model, prompt(32), second[2])


def test_empty_slots_sample_nothing(slots):
    state = slots.insert(slots.prefill(slots.params, prompt(3)), slots.init_state(), slot=1)
    _, made = decode(slots, state, 3)
    assert [len(out) for out in made] == [0, 3, 0, 0]


def test_a_prefix_goes_into_many_slots_and_stays_whole(slots):
    prefix = slots.prefill(slots.params, prompt(9))
    state = slots.insert(prefix, slots.init_state(), slot=0)
    state = slots.insert(prefix, state, slot=3)
    _, made = decode(slots, state, 6)
    again = slots.insert(prefix, slots.init_state(), slot=3)
    _, alone = decode(slots, again, 6)
    assert made[0] == made[3] == alone[3] and len(made[0]) == 6


def test_a_prefix_goes_on_from_another_which_stays_as_it_is(model, slots):
    ids = prompt(30)
    short = slots.prefill(slots.params, ids[:7])
    long = slots.prefill(slots.params, ids[7:], after=short)
    state = slots.insert(long, slots.init_state(), slot=0)
    state = slots.insert(short, state, slot=1)
    _, made = decode(slots, state, 6)
    assert_greedy(model, ids, made[0])
    assert_greedy(model, ids[:7], made[1])


def test_a_full_context_ends_a_sequence(model, slots):
    state = slots.insert(slots.prefill(slots.params, prompt(32)), slots.init_state(), slot=0)
    state, made = decode(slots, state, 12)
    assert len(made[0]) == OPTIONS.context - 32
    assert_greedy(model, prompt(32), made[0])


def test_stop_ids_end_a_sequence_and_are_its_last_token(model, slots):
    state = slots.insert(slots.prefill(slots.params, prompt(5)), slots.init_state(), slot=0)
    _, made = decode(slots, state, 8)
    stop = next(token for n, token in enumerate(made[0]) if token not in made[0][:n] and n)
    stopping = Slots(model, replace(OPTIONS, stop_ids=(stop,)))
    state = stopping.insert(stopping.prefill(slots.params, prompt(5)), stopping.init_state(), slot=0)
    _, stopped = decode(stopping, state, 8)
    assert stopped[0] == made[0][: made[0].index(stop) + 1]


def test_freed_slots_sample_nothing_until_the_next_insert(slots):
    prefix = slots.prefill(slots.params, prompt(4))
    state = slots.insert(prefix, slots.insert(prefix, slots.init_state(), slot=0), slot=1)
    state, _ = decode(slots, state, 2)
    state, made = decode(slots, slots.free(state, slots=[1]), 2)
    assert [len(out) for out in made] == [2, 0, 0, 0]
    _, made = decode(slots, slots.insert(prefix, state, slot=1), 2)
    assert [len(out) for out in made] == [2, 2, 0, 0]


def test_nothing_is_sampled_behind_a_refused_prefix(slots):
    state = slots.insert(slots.refused(), slots.init_state(), slot=2)
    assert decode(slots, state, 2)[1] == [[], [], [], []]


def test_requests_of_one_prompt_differ_when_sampled_and_a_seed_repeats_them(model):
    options = replace(OPTIONS, sampling=Sampling(temperature=1.0), seed=5)

    def sample() -> list[list[int]]:
        slots = Slots(model, options)
        prefix, state = slots.prefill(slots.params, prompt(4)), slots.init_state()
        for slot in range(4):
            state = slots.insert(prefix, state, slot=slot)
        return decode(slots, state, 12)[1]

    made = sample()
    assert len({tuple(out) for out in made}) == 4
    assert made == sample()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty prompt"),
        ([64], r"ids of 0\.\.63; got 64"),
        ([-1], "got -1"),
        ([1] * 33, "at most 32 tokens; got 33"),
    ],
)
def test_bad_prompts_say_why(slots, tokens, message):
    with pytest.raises(ValueError, match=message):
        slots.prefill(slots.params, tokens)


def test_a_prefix_may_not_outgrow_its_length(slots):
    prefix = slots.prefill(slots.params, prompt(30))
    with pytest.raises(ValueError, match="at most 32 tokens; got 33"):
        slots.prefill(slots.params, [1, 2, 3], after=prefix)


def test_bad_sizes_and_slots_say_why(model, slots):
    with pytest.raises(ValueError, match="prefill_length of at most the context, 40; got 64"):
        Slots(model, replace(OPTIONS, prefill_length=64))
    with pytest.raises(ValueError, match="at most 8 stop_ids; got 9"):
        Slots(model, replace(OPTIONS, stop_ids=tuple(range(9))))
    with pytest.raises(ValueError, match=r"a slot of 0\.\.3; got 4"):
        slots.insert(slots.refused(), slots.init_state(), slot=4)
