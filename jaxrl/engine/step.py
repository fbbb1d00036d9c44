"""The engine's device programs: prefill, insert and generate over a fixed set of slots.

JetStream's verbs (github.com/AI-Hypercomputer/JetStream, `engine_api.py`) on Qwen3.5's hybrid cache.
Every program has one shape per prefill bucket, so nothing recompiles while the engine runs. A slot's
row of the cache holds all its tokens but the last, which is fed by the next decode step; sampling
therefore happens in `generate` alone and every token passes the model exactly once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrl.engine.sampling import SamplingParams, sample
from jaxrl.model.transformer import Transformer

Cache = Any  # the model's cache pytree; the leading axis of every leaf is the slot
Params = Any  # nnx.State of the model


class SlotState(NamedTuple):
    """What `generate` carries for every slot B, beside the cache; NumPy arrays on the host."""

    lengths_B: Int[Array | np.ndarray, " B"]  # tokens in the cache
    last_B: Int[Array | np.ndarray, " B"]  # the next token to feed
    remaining_B: Int[Array | np.ndarray, " B"]  # tokens the turn may still sample; 0 when idle
    stop_BI: Int[Array | np.ndarray, "B I"]  # stop ids, padded with -1
    sampling: SamplingParams


class Emitted(NamedTuple):
    """Tokens of one dispatch, N steps by B slots; `valid_NB` marks those really sampled."""

    token_NB: Int[Array, "N B"]
    logprob_NB: Float[Array, "N B"]
    full_logprob_NB: Float[Array, "N B"]
    valid_NB: Bool[Array, "N B"]


class Steps:
    """Compiled programs for one model, slot count and context length."""

    def __init__(self, model: Transformer, *, slots: int, context: int, prefill_rows: int, decode_steps: int):
        self.graphdef, self.params = nnx.split(model)
        self.slots, self.context = slots, context
        self.prefill_rows, self.decode_steps = prefill_rows, decode_steps
        self.init_cache = partial(model.init_cache, slots, context)
        self._prefill = jax.jit(self._prefill_fn, donate_argnums=1)
        self._insert = jax.jit(_insert_fn, donate_argnums=0)
        self._fill = jax.jit(_fill_fn, donate_argnums=0)
        self._generate = jax.jit(self._generate_fn, donate_argnums=1)

    def prefill(self, params: Params, cache: Cache, pieces: "Sequence[Piece]", *, bucket: int) -> Cache:
        """Runs up to `prefill_rows` pieces of at most `bucket` tokens into their slots.

        A piece that starts at position 0 clears its slot first.
        """
        rows = self.prefill_rows
        tokens_RT = np.zeros((rows, bucket), np.int32)
        slots_R = np.full(rows, self.slots, np.int32)
        lengths_R, counts_R = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, piece in enumerate(pieces):
            tokens_RT[row, : len(piece.tokens)] = piece.tokens
            slots_R[row], lengths_R[row], counts_R[row] = piece.slot, piece.start, len(piece.tokens)
        return self._prefill(params, cache, tokens_RT, slots_R, lengths_R, counts_R)

    def insert(self, cache: Cache, *, sources: Sequence[int], slots: Sequence[int]) -> Cache:
        """Copies row `sources[i]` to `slots[i]`: one prefix into many slots."""
        source_B = np.zeros(self.slots, np.int32)
        slot_B = np.full(self.slots, self.slots, np.int32)
        source_B[: len(sources)], slot_B[: len(slots)] = sources, slots
        return self._insert(cache, source_B, slot_B)

    def fill(self, cache: Cache, *, slots: Sequence[int], value: float) -> Cache:
        """Overwrites whole rows with `value` (tests poison freed slots with NaN)."""
        slot_B = np.full(self.slots, self.slots, np.int32)
        slot_B[: len(slots)] = slots
        return self._fill(cache, slot_B, value)

    def generate(self, params: Params, cache: Cache, state: SlotState) -> tuple[Cache, Emitted]:
        """Up to `decode_steps` tokens for every slot with `remaining_B` > 0, in one dispatch."""
        return self._generate(params, cache, state)

    def _prefill_fn(self, params, cache, tokens_RT, slots_R, lengths_R, counts_R):
        model = nnx.merge(self.graphdef, params)
        rows = jax.tree.map(lambda leaf: leaf.at[slots_R].get(mode="clip"), cache)
        fresh_R = lengths_R == 0
        rows = jax.tree.map(lambda leaf: jnp.where(_like(fresh_R, leaf), jnp.zeros_like(leaf), leaf), rows)
        _, rows = model.extend(tokens_RT, rows, lengths_B=lengths_R, counts_B=counts_R)
        return jax.tree.map(lambda leaf, row: leaf.at[slots_R].set(row, mode="drop"), cache, rows)

    def _generate_fn(self, params, cache, state: SlotState):
        model = nnx.merge(self.graphdef, params)
        shape = (self.decode_steps, self.slots)
        emitted = Emitted(
            jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape, bool)
        )
        step = partial(_decode_step, model)
        carry = (jnp.int32(0), cache, state, emitted)
        _, cache, _, emitted = jax.lax.while_loop(self._busy, step, carry)
        return cache, emitted

    def _busy(self, carry) -> Array:
        step, _, state, _ = carry
        return (step < self.decode_steps) & jnp.any(state.remaining_B > 0)


class Piece(NamedTuple):
    """Part of a prompt: `tokens` for positions start.. of `slot`."""

    slot: int
    start: int
    tokens: Sequence[int]


def _decode_step(model: Transformer, carry):
    step, cache, state, emitted = carry
    active_B = state.remaining_B > 0
    hidden_BTD, cache = model.extend(
        state.last_B[:, None], cache, lengths_B=state.lengths_B, counts_B=active_B.astype(jnp.int32)
    )
    drawn = sample(model.logits(hidden_BTD[:, 0]), state.sampling, positions_B=state.lengths_B + 1)
    stopped_B = jnp.any(drawn.token_B[:, None] == state.stop_BI, axis=-1)
    emitted = jax.tree.map(
        lambda all_NB, one_B: all_NB.at[step].set(one_B), emitted, Emitted(*drawn, active_B)
    )
    state = state._replace(
        lengths_B=state.lengths_B + active_B,
        last_B=jnp.where(active_B, drawn.token_B, state.last_B),
        remaining_B=jnp.where(active_B & ~stopped_B, state.remaining_B - 1, 0),
    )
    return step + 1, cache, state, emitted


def _insert_fn(cache: Cache, source_B: Array, slot_B: Array) -> Cache:
    return jax.tree.map(lambda leaf: leaf.at[slot_B].set(leaf[source_B], mode="drop"), cache)


def _fill_fn(cache: Cache, slot_B: Array, value: Array) -> Cache:
    return jax.tree.map(lambda leaf: leaf.at[slot_B].set(value, mode="drop"), cache)


def _like(flags_R: Array, leaf: Array) -> Array:
    return flags_R.reshape(flags_R.shape + (1,) * (leaf.ndim - 1))
