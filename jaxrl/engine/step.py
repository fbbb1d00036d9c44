"""The engine's device programs over a fixed set of slots: prefill, generate, and moves within the cache.

JetStream's verbs (github.com/AI-Hypercomputer/JetStream, `engine_api.py`) on Qwen3.5's hybrid cache.
Every program has one shape (per prefill bucket), so nothing recompiles while the engine runs. A slot's
cache holds all its tokens but the last, which is fed by the next decode step; sampling therefore happens
in `generate` alone and every token passes the model exactly once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Int16

from jaxrl.engine.cache import EngineCache, Sizes, by_kind, layered
from jaxrl.engine.moves import Moves
from jaxrl.engine.sampling import SamplingParams, sample
from jaxrl.model.transformer import Transformer

Params = Any  # nnx.State of the model
MOST_STOP_IDS = 8  # of one slot


class Piece(NamedTuple):
    """Part of a prompt: `tokens` for positions start.. of `slot`, whose pages are `pages`, in order."""

    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]


class SlotState(NamedTuple):
    """What `generate` needs to know of every slot B, beside the cache; NumPy arrays on the host."""

    lengths_B: Int[Array | np.ndarray, " B"]  # tokens in the cache
    last_B: Int[Array | np.ndarray, " B"]  # the next token to feed
    remaining_B: Int[Array | np.ndarray, " B"]  # tokens the turn may still sample; 0 when idle
    stop_BI: Int[Array | np.ndarray, "B I"]  # stop ids, padded with -1
    pages_BX: Int[Array | np.ndarray, "B X"]  # page ids in order; unused entries are `sizes.pages`
    sampling: SamplingParams


class Emitted(NamedTuple):
    """Tokens of one dispatch, N steps by B slots; `valid_NB` marks those really sampled."""

    token_NB: Int[Array, "N B"]
    logprob_NB: Float[Array, "N B"]  # of the distribution that was sampled
    full_logprob_NB: Float[Array, "N B"]  # of softmax(logits)
    top_token_NBW: Int[Array, "N B W"]  # the W most likely tokens of softmax(logits)
    top_logprob_NBW: Float[Array, "N B W"]
    routes_NBLX: Int16[Array, "N B L X"]  # experts of the token that was fed; X = 0 when not recorded
    valid_NB: Bool[Array, "N B"]


class Steps(Moves):
    """Compiled programs for one model and one set of sizes."""

    def __init__(self, model: Transformer, sizes: Sizes, *, mesh: Mesh | None = None):
        """`mesh`: what the model's weights lie on; None for one device. The model may be one of shapes only,
        for `lowered`."""
        super().__init__(model.spec, sizes, mesh=mesh)
        self.graphdef, params = nnx.split(model)
        self.params: Params = params
        self._prefill = self.compiled(self._prefill_fn, donate_argnums=1)
        self._generate = self.compiled(self._generate_fn, donate_argnums=1)

    def prefill(
        self, params: Params, cache: EngineCache, pieces: Sequence[Piece], *, bucket: int
    ) -> tuple[EngineCache, Int16[Array, "R T L X"]]:
        """Runs up to `prefill_rows` pieces of at most `bucket` tokens into their slots and pages.

        A piece that starts at position 0 clears its slot's state first; one without tokens does no more.
        Returns before the device is done.

        Returns:
          The cache and the experts of each piece's tokens (X = 0 when not recorded).

        Raises:
          ValueError: a bucket that is not of `sizes`, too many pieces, or one that does not fit.
        """
        sizes = self.sizes
        if bucket not in sizes.prefill_buckets:
            raise ValueError(f"expected a bucket of {sizes.prefill_buckets}; got {bucket}")
        if len(pieces) > sizes.prefill_rows:
            raise ValueError(f"expected at most {sizes.prefill_rows} pieces; got {len(pieces)}")
        tokens_RT = np.zeros((sizes.prefill_rows, bucket), np.int32)
        slots_R = np.full(sizes.prefill_rows, sizes.slots, np.int32)
        lengths_R, counts_R = np.zeros((2, sizes.prefill_rows), np.int32)
        pages_RX = np.full((sizes.prefill_rows, sizes.slot_pages), sizes.pages, np.int32)
        for row, piece in enumerate(pieces):
            self._check(piece, bucket)
            tokens_RT[row, : len(piece.tokens)] = piece.tokens
            slots_R[row], lengths_R[row], counts_R[row] = piece.slot, piece.start, len(piece.tokens)
            pages_RX[row, : len(piece.pages)] = piece.pages
        held = (cache.live, cache.kv)
        (live, kv), routes = self._prefill(params, held, tokens_RT, slots_R, lengths_R, counts_R, pages_RX)
        return cache._replace(live=live, kv=kv), routes

    def generate(self, params: Params, cache: EngineCache, state: SlotState) -> tuple[EngineCache, Emitted]:
        """Up to `decode_steps` tokens for every slot with `remaining_B` > 0, in one dispatch.

        A slot ends early with a stop id or its budget. The caller sees to it that its pages hold what it
        may add.
        """
        (live, kv), emitted = self._generate(params, (cache.live, cache.kv), state)
        return cache._replace(live=live, kv=kv), emitted

    def lowered(self, params: Params) -> dict[str, Any]:
        """`prefill` of the largest bucket and `generate`, lowered for weights like `params`.

        Those may be shapes with shardings: to compile what no device here could hold.
        """
        sizes, rows = self.sizes, self.sizes.prefill_rows
        cache = jax.jit(self.init_cache).lower().compile()
        shapes = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            jax.eval_shape(self.init_cache),
            cache.output_shardings,
        )
        held = (shapes.live, shapes.kv)
        row_R = np.zeros(rows, np.int32)
        tokens_RT = np.zeros((rows, sizes.prefill_buckets[-1]), np.int32)
        pages_RX = np.zeros((rows, sizes.slot_pages), np.int32)
        return {
            "prefill": self._prefill.lower(params, held, tokens_RT, row_R, row_R, row_R, pages_RX),
            "generate": self._generate.lower(params, held, idle_state(sizes)),
        }

    def warm_up(self, params: Params, cache: EngineCache) -> EngineCache:
        """Runs every program there is on nothing, so that none compiles later; the cache stays as it is."""
        for bucket in self.sizes.prefill_buckets:
            cache, _ = self.prefill(params, cache, [], bucket=bucket)
        cache, _ = self.generate(params, cache, idle_state(self.sizes))
        return self.warm_up_moves(cache)

    def _check(self, piece: Piece, bucket: int) -> None:
        room = min(len(piece.pages), self.sizes.slot_pages) * self.sizes.page_size
        if not (len(piece.tokens) <= bucket and piece.start + len(piece.tokens) <= room):
            raise ValueError(
                f"slot {piece.slot}: expected at most {bucket} tokens that end within {room} positions, "
                f"{len(piece.pages)} pages; got {len(piece.tokens)} from position {piece.start}"
            )

    def _prefill_fn(self, params, held, tokens_RT, slots_R, lengths_R, counts_R, pages_RX):
        model, (live, kv) = nnx.merge(self.graphdef, params), held
        fresh_R = lengths_R == 0
        rows = jax.tree.map(lambda leaf: leaf.at[slots_R].get(mode="clip"), live)
        rows = jax.tree.map(lambda leaf: jnp.where(_like(fresh_R, leaf), jnp.zeros_like(leaf), leaf), rows)
        _, cache, routes_RTLX = model.extend_with_routes(
            tokens_RT,
            layered(self.spec, rows, kv),
            lengths_B=lengths_R,
            counts_B=counts_R,
            pages_BX=pages_RX,
        )
        rows, kv = by_kind(cache)
        live = jax.tree.map(lambda leaf, row: leaf.at[slots_R].set(row, mode="drop"), live, rows)
        return (live, kv), self._recorded(routes_RTLX)

    def _generate_fn(self, params, held, state: SlotState):
        model = nnx.merge(self.graphdef, params)
        shapes = jax.eval_shape(partial(self._decode_step, model), held, state)[2]
        emitted = jax.tree.map(lambda x: jnp.zeros((self.sizes.decode_steps, *x.shape), x.dtype), shapes)

        def busy(carry) -> Array:
            step, _, state, _ = carry
            return (step < self.sizes.decode_steps) & jnp.any(state.remaining_B > 0)

        def body(carry):
            step, held, state, emitted = carry
            held, state, new = self._decode_step(model, held, state)
            emitted = jax.tree.map(lambda all_NB, one_B: all_NB.at[step].set(one_B), emitted, new)
            return step + 1, held, state, emitted

        _, held, _, emitted = jax.lax.while_loop(busy, body, (jnp.int32(0), held, state, emitted))
        return held, emitted

    def _decode_step(self, model: Transformer, held, state):
        active_B = state.remaining_B > 0
        hidden_BTD, cache, routes_BTLX = model.extend_with_routes(
            jnp.asarray(state.last_B)[:, None],
            layered(self.spec, *held),
            lengths_B=state.lengths_B,
            counts_B=active_B.astype(jnp.int32),
            pages_BX=state.pages_BX,
        )
        drawn = sample(
            model.logits(hidden_BTD[:, 0]),
            state.sampling,
            positions_B=state.lengths_B + 1,
            top=self.sizes.top_logprobs,
        )
        stopped_B = jnp.any(drawn.token_B[:, None] == state.stop_BI, axis=-1)
        emitted = Emitted(*drawn, routes_NBLX=self._recorded(routes_BTLX)[:, 0], valid_NB=active_B)
        state = state._replace(
            lengths_B=state.lengths_B + active_B,
            last_B=jnp.where(active_B, drawn.token_B, state.last_B),
            remaining_B=jnp.where(active_B & ~stopped_B, state.remaining_B - 1, 0),
        )
        return by_kind(cache), state, emitted

    def _recorded(self, routes_BTLX: Array) -> Array:
        return routes_BTLX if self.sizes.routed_experts else routes_BTLX[..., :0]


def idle_state(sizes: Sizes) -> SlotState:
    """No slot samples: what the host fills in."""
    slots = sizes.slots
    return SlotState(
        lengths_B=np.zeros(slots, np.int32),
        last_B=np.zeros(slots, np.int32),
        remaining_B=np.zeros(slots, np.int32),
        stop_BI=np.full((slots, MOST_STOP_IDS), -1, np.int32),
        pages_BX=np.full((slots, sizes.slot_pages), sizes.pages, np.int32),
        sampling=SamplingParams.of(slots),
    )


def _like(flags_R: Array, leaf: Array) -> Array:
    return flags_R.reshape(flags_R.shape + (1,) * (leaf.ndim - 1))
