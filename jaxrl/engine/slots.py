"""Decoding for callers that keep their own slots: compute a prefix, insert it into a slot, sample behind it.

The device programs of `jaxrl.engine.step` in the functional form of JetStream's interface: no queue, no
sharing, no host copy per token. Slot s owns the same pages for good. See `jaxrl.engine.jetstream`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxrl.contracts import SampleKey, Sampling
from jaxrl.engine.cache import EngineCache, Sizes
from jaxrl.engine.sampling import SamplingParams, key_words
from jaxrl.engine.step import MOST_STOP_IDS, Emitted, Params, Piece, SlotState, Steps, idle_state
from jaxrl.model.transformer import Transformer

_GREEDY = Sampling(temperature=0)


@dataclass(frozen=True, kw_only=True)
class SlotOptions:
    """Sizes, and how every request is sampled."""

    slots: int = 16  # sequences decoded together
    context: int = 1024  # most tokens of a sequence
    prefill_length: int = 512  # most tokens of a prompt
    page_size: int = 32  # tokens whose keys and values lie together
    prefill_buckets: tuple[int, ...] = (16, 64)  # tokens of a piece, ascending; the last one is the chunk
    sampling: Sampling = _GREEDY
    seed: int = 0  # of sampled tokens; requests are numbered as they are inserted
    stop_ids: tuple[int, ...] = ()  # a sequence ends behind one of them


class Prefix(NamedTuple):
    """A prompt that has been run through the model; a cache of one slot."""

    cache: EngineCache
    length: Int[Array, ""]  # tokens in the cache
    last: Int[Array, ""]  # the prompt's last token, which the first decode step feeds
    usable: Bool[Array, ""]  # whether anything may be sampled behind it


class DecodeState(NamedTuple):
    """All slots; given up for the next state by every call that takes it."""

    cache: EngineCache
    slots: SlotState
    sampled_B: Int[Array, " B"]  # tokens sampled for the slot's present prompt


class Sampled(NamedTuple):
    """One token per slot."""

    token_B: Int[Array, " B"]
    valid_B: Bool[Array, " B"]  # False: the slot is empty, or its sequence had ended before
    sampled_B: Int[Array, " B"]  # tokens so far, this one included


class Slots:
    """Prefill, insert and generate for one model."""

    def __init__(self, model: Transformer, options: SlotOptions):
        """Raises `ValueError` for sizes that do not fit together."""
        if options.prefill_length > options.context:
            raise ValueError(
                f"expected prefill_length of at most the context, {options.context}; "
                f"got {options.prefill_length}"
            )
        if len(options.stop_ids) > MOST_STOP_IDS:
            raise ValueError(f"expected at most {MOST_STOP_IDS} stop_ids; got {len(options.stop_ids)}")
        self.options, self._inserted = options, 0
        self._steps = Steps(model, _sizes(options, slots=options.slots, tokens=options.context))
        self._prefiller = Steps(model, _sizes(options, slots=1, tokens=options.prefill_length))
        self._insert = jax.jit(self._insert_fn, donate_argnums=0)
        self._occupy, self._advance = jax.jit(_occupy), jax.jit(_advance)

    @property
    def params(self) -> Params:
        """The weights that the model came with."""
        return self._steps.params

    def init_state(self) -> DecodeState:
        """Every slot is empty."""
        sizes, options = self._steps.sizes, self.options
        state = idle_state(sizes)
        state.stop_BI[:, : len(options.stop_ids)] = options.stop_ids
        state.pages_BX[...] = np.arange(sizes.pages).reshape(sizes.slots, sizes.slot_pages)
        _set_sampling(state.sampling, options.sampling)
        slots = jax.tree.map(jnp.array, state)
        return DecodeState(self._steps.init_cache(), slots, jnp.zeros(sizes.slots, jnp.int32))

    def prefill(self, params: Params, tokens: Sequence[int], *, after: Prefix | None = None) -> Prefix:
        """Runs all tokens but the last; `after` continues an earlier prefix, which stays as it is.

        Raises:
            ValueError: no token, one outside the vocabulary, or more than `prefill_length` in all.
        """
        held = 0 if after is None else int(after.length) + 1
        self._check(tokens, held)
        cache, start, feed = self._prefiller.init_cache(), 0, list(tokens)
        if after is not None:
            cache, start, feed = jax.tree.map(jnp.copy, after.cache), held - 1, [int(after.last), *tokens]
        pages = range(self._prefiller.sizes.pages)
        end = start + len(feed) - 1
        while start < end:
            size, bucket = self._piece(start, end)
            piece = Piece(slot=0, start=start, tokens=feed[:size], pages=pages)
            cache, _ = self._prefiller.prefill(params, cache, [piece], bucket=bucket)
            feed, start = feed[size:], start + size
        return Prefix(cache, jnp.int32(end), jnp.int32(feed[0]), jnp.bool_(True))

    def refused(self) -> Prefix:
        """A prefix behind which nothing is sampled, for a request that cannot be served."""
        return Prefix(self._prefiller.init_cache(), jnp.int32(0), jnp.int32(0), jnp.bool_(False))

    def insert(self, prefix: Prefix, state: DecodeState, *, slot: int) -> DecodeState:
        """Puts a prefix into a slot, whatever that held; the prefix may be inserted again elsewhere.

        Raises:
            ValueError: there is no such slot.
        """
        if not 0 <= slot < self.options.slots:
            raise ValueError(f"expected a slot of 0..{self.options.slots - 1}; got {slot}")
        words = key_words(SampleKey(self.options.seed, "slots", 0, self._inserted, 0))
        self._inserted += 1
        cache = self._insert(state.cache, prefix.cache, slot)
        room = jnp.where(prefix.usable, self.options.context - prefix.length - 1, 0)
        slots = self._occupy(state.slots, slot, prefix.length, prefix.last, room, words)
        return DecodeState(cache, slots, _put(state.sampled_B, slot, 0))

    def generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, Sampled]:
        """One token for every slot whose sequence has neither ended nor filled its context."""
        cache, emitted = self._steps.generate(params, state.cache, state.slots)
        slots, sampled = self._advance(state.slots, state.sampled_B, emitted)
        return DecodeState(cache, slots, sampled.sampled_B), sampled

    def free(self, state: DecodeState, *, slots: Sequence[int]) -> DecodeState:
        """Nothing more is sampled for `slots` until a prefix is inserted."""
        remaining_B = state.slots.remaining_B
        for slot in slots:
            remaining_B = _put(remaining_B, slot, 0)
        return state._replace(slots=state.slots._replace(remaining_B=remaining_B))

    def _insert_fn(self, cache: EngineCache, prefix: EngineCache, slot: Array) -> EngineCache:
        first = slot * self._steps.sizes.slot_pages

        def put_pages(pool, pages):
            return jax.lax.dynamic_update_slice_in_dim(pool, pages, first, axis=0)

        live = jax.tree.map(lambda rows, row: rows.at[slot].set(row[0]), cache.live, prefix.live)
        return cache._replace(live=live, kv=jax.tree.map(put_pages, cache.kv, prefix.kv))

    def _piece(self, start: int, end: int) -> tuple[int, int]:
        """(tokens, bucket) of the next piece; pieces end at multiples of the chunk, as the engine's do."""
        buckets = self.options.prefill_buckets
        size = min(end - start, buckets[-1] - start % buckets[-1])
        return size, next(bucket for bucket in buckets if bucket >= size)

    def _check(self, tokens: Sequence[int], held: int) -> None:
        vocab, most = self._steps.spec.vocab_size, self.options.prefill_length
        if not tokens:
            raise ValueError("expected at least one token; got an empty prompt")
        if held + len(tokens) > most:
            raise ValueError(f"expected a prompt of at most {most} tokens; got {held + len(tokens)}")
        bad = next((token for token in tokens if not 0 <= token < vocab), None)
        if bad is not None:
            raise ValueError(f"expected token ids of 0..{vocab - 1}; got {bad}")


def _sizes(options: SlotOptions, *, slots: int, tokens: int) -> Sizes:
    pages = -(-tokens // options.page_size)
    return Sizes(
        slots=slots,
        context=pages * options.page_size,
        page_size=options.page_size,
        pages=slots * pages,
        prefill_rows=1,
        prefill_buckets=options.prefill_buckets,
        decode_steps=1,
    )


def _set_sampling(params: SamplingParams, wanted: Sampling) -> None:
    params.temperature_B[...] = wanted.temperature
    params.top_p_B[...] = wanted.top_p
    params.top_k_B[...] = wanted.top_k
    params.min_p_B[...] = wanted.min_p


def _put(all_B: Array | np.ndarray, slot: int | Array, value: int | Array) -> Array:
    return jnp.asarray(all_B).at[slot].set(value)


def _occupy(slots: SlotState, slot: Array, length: Array, last: Array, room: Array, words_2: Array):
    return slots._replace(
        lengths_B=_put(slots.lengths_B, slot, length),
        last_B=_put(slots.last_B, slot, last),
        remaining_B=_put(slots.remaining_B, slot, room),
        sampling=slots.sampling._replace(key_B2=_put(slots.sampling.key_B2, slot, words_2)),
    )


def _advance(slots: SlotState, sampled_B: Array, emitted: Emitted) -> tuple[SlotState, Sampled]:
    """What `Steps.generate` did to the slots inside, for the next call: no token visits the host."""
    token_B, valid_B = emitted.token_NB[0], emitted.valid_NB[0]
    stopped_B = jnp.any(token_B[:, None] == slots.stop_BI, axis=-1)
    after = slots._replace(
        lengths_B=slots.lengths_B + valid_B,
        last_B=jnp.where(valid_B, token_B, slots.last_B),
        remaining_B=jnp.where(valid_B & ~stopped_B, slots.remaining_B - 1, 0),
    )
    return after, Sampled(token_B, valid_B, sampled_B + valid_B)
