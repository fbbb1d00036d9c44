"""Small models with all sizes of the engine's programs, and the least of a host that drives them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.engine.cache import Sizes
from jaxrl.engine.step import Emitted, Piece, SlotState, Steps, idle_state
from jaxrl.model.gdn import GatedDeltaNet
from jaxrl.model.spec import ModelSpec
from jaxrl.model.transformer import Transformer

SIZES = Sizes(
    slots=4,
    context=96,
    page_size=8,
    pages=40,
    parked=3,
    prefill_rows=3,
    prefill_buckets=(4, 16),
    decode_steps=3,
    top_logprobs=2,
    routed_experts=True,
)
CHUNK = SIZES.prefill_buckets[-1]


def spec(**mlp: Any) -> ModelSpec:
    return ModelSpec(
        vocab_size=64,
        dtype="float32",
        hidden_size=24,
        layer_types=("linear_attention", "full_attention", "linear_attention"),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rotary_dim=4,
        rope_theta=1e4,
        gdn_key_heads=2,
        gdn_value_heads=4,
        gdn_key_dim=6,
        gdn_value_dim=5,
        **mlp,
    )


def mixture(experts: int) -> dict[str, int]:
    return {"num_experts": experts, "experts_per_token": 2, "expert_dim": 8, "shared_expert_dim": 12}


# Few experts run as dense products, many as tiles of sorted tokens.
SPECS = {"few": spec(**mixture(4)), "many": spec(**mixture(20)), "dense": spec(mlp_dim=32)}


@functools.cache
def make(model_spec: ModelSpec) -> tuple[Transformer, Steps]:
    model = Transformer(model_spec, rngs=nnx.Rngs(3))
    for block in model.layers:
        if isinstance(block.mixer, GatedDeltaNet):
            # Slow decay, so that a leak through the state would be large.
            block.mixer.dt_bias[...] = jnp.full_like(block.mixer.dt_bias[...], -4.0)
    return model, Steps(model, SIZES)


class Host:
    """The least that a scheduler does: slots with pages of their own choice, fed in pieces."""

    def __init__(self, steps: Steps, *, seed: int = 0, poison: float | None = float("nan")):
        self.steps, self.sizes = steps, steps.sizes
        self.cache = steps.init_cache()
        self.free = list(np.random.default_rng(seed).permutation(self.sizes.pages))
        if poison is not None:
            self.cache = steps.fill(
                self.cache, value=poison, slots=range(4), rows=range(3), pages=range(self.sizes.pages)
            )
        self.pages: dict[int, list[int]] = {slot: [] for slot in range(self.sizes.slots)}
        self.tokens: dict[int, list[int]] = {slot: [] for slot in range(self.sizes.slots)}
        self.state = idle_state(self.sizes)

    def prefill(self, prompts: dict[int, list[int]]) -> dict[int, list[np.ndarray]]:
        """Feeds all but the last token of what each slot now holds; returns the routes per slot."""
        start = {slot: max(0, len(self.tokens[slot]) - 1) for slot in prompts}
        for slot, prompt in prompts.items():
            self.tokens[slot] += prompt
        routes: dict[int, list[np.ndarray]] = {slot: [] for slot in prompts}
        waiting = dict(start)
        while waiting:
            self._round(waiting, routes)
        return routes

    def _round(self, waiting: dict[int, int], routes: dict[int, list[np.ndarray]]) -> None:
        pieces = []
        for slot, at in waiting.items():
            end = min(len(self.tokens[slot]) - 1, at - at % CHUNK + CHUNK)
            self._reserve(slot, end)
            pieces.append(Piece(slot, at, self.tokens[slot][at:end], self.pages[slot]))
        bucket = next(b for b in self.sizes.prefill_buckets if b >= len(pieces[0].tokens))
        chosen = [piece for piece in pieces if len(piece.tokens) <= bucket][: self.sizes.prefill_rows]
        if bucket == CHUNK:
            chosen = [p for p in pieces if len(p.tokens) > self.sizes.prefill_buckets[0]]
            chosen = chosen[: self.sizes.prefill_rows]
        self.cache, got = self.steps.prefill(self.steps.params, self.cache, chosen, bucket=bucket)
        for row, piece in enumerate(chosen):
            routes[piece.slot].append(np.asarray(got)[row, : len(piece.tokens)])
            waiting[piece.slot] = piece.start + len(piece.tokens)
            if waiting[piece.slot] == len(self.tokens[piece.slot]) - 1:
                del waiting[piece.slot]

    def _reserve(self, slot: int, length: int) -> None:
        while len(self.pages[slot]) * self.sizes.page_size < length:
            self.pages[slot].append(int(self.free.pop()))

    def generate(self, budgets: dict[int, int], *, key: dict[int, int] | None = None) -> list[Emitted]:
        """Samples until every slot has what it may; tokens are appended."""
        state, left, out = self.state, dict(budgets), []
        while left:
            state.remaining_B[:] = 0
            for slot, budget in left.items():
                self._reserve(slot, len(self.tokens[slot]) - 1 + min(budget, self.sizes.decode_steps))
                self._write(state, slot, budget, slot if key is None else key[slot])
            self.cache, emitted = self.steps.generate(self.steps.params, self.cache, state)
            out.append(jax.tree.map(np.asarray, emitted))
            for slot in list(left):
                drawn = out[-1].token_NB[out[-1].valid_NB[:, slot], slot].tolist()
                self.tokens[slot] += drawn
                left[slot] -= len(drawn)
                if left[slot] == 0 or drawn[-1] in state.stop_BI[slot]:
                    del left[slot]
        return out

    def _write(self, state: SlotState, slot: int, budget: int, key: int) -> None:
        state.lengths_B[slot] = len(self.tokens[slot]) - 1
        state.last_B[slot] = self.tokens[slot][-1]
        state.remaining_B[slot] = budget
        state.pages_BX[slot] = self.sizes.pages
        state.pages_BX[slot, : len(self.pages[slot])] = self.pages[slot]
        state.sampling.key_B2[slot] = (key, 9)


def of_slot(out: list[Emitted], slot: int, name: str) -> np.ndarray:
    """What was emitted for one slot, over all dispatches."""
    return np.concatenate([getattr(part, name)[part.valid_NB[:, slot], slot] for part in out])


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, 64, length).tolist()


def random_cache(steps: Steps, seed: int = 0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), steps.init_cache()
    )


def host_copy(cache):
    return jax.tree.map(lambda leaf: np.array(leaf), cache)


def assert_same(got, want, why="") -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=why)
