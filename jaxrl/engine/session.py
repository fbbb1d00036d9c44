"""A conversation held by the engine, and one turn of it in flight."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.contracts import Finish, Generation, SampleKey, Sampling
from jaxrl.engine.sampling import key_words

if TYPE_CHECKING:
    from jaxrl.engine.scheduler import Engine


MOST_STOP_IDS = 4


class EngineError(RuntimeError):
    """The engine could not serve a request; the message says why and what to do."""


@dataclass(eq=False)
class TurnInFlight:
    """A request and what it has produced so far.

    `pending` are tokens still to be prefilled from position `start`; `last` is fed by the first
    decode step.
    """

    session: "EngineSession"
    pending: list[int]
    start: int
    last: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    budget: int
    limited_by: Finish
    words: np.ndarray
    future: asyncio.Future
    fresh: bool = False  # the slot still holds its previous owner's rows
    leader: "TurnInFlight | None" = None  # same first prompt: copied instead of prefilled
    skipped: int = 0  # dispatches that passed this prefill over
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def prefilled(self) -> bool:
        return not self.pending and not self.fresh and self.leader is None

    @property
    def length(self) -> int:
        """Tokens in the cache once prefilled."""
        return self.start + len(self.tokens)

    def finish(self) -> Finish | None:
        if self.tokens and self.tokens[-1] in self.stop_ids:
            return "stop"
        return self.limited_by if len(self.tokens) >= self.budget else None


class EngineSession:
    """See `contracts.Session`. Holds one slot from its first turn to `close`."""

    def __init__(self, engine: "Engine"):
        self._engine = engine
        self.slot: int | None = None
        self.cached = 0  # tokens in the slot's cache row
        self.last: int | None = None  # sampled, not yet in the cache
        self.closed = False
        self.broken = False
        self.busy = False

    @property
    def length(self) -> int:
        return self.cached + (self.last is not None)

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        key: SampleKey,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> Generation:
        """Appends `tokens`, samples up to `max_tokens` more; see `contracts.Generation`.

        A prompt that does not fit the context gives no tokens and finish `context`.

        Raises:
            EngineError: on invalid input, a closed session, or a fault of the device program.
        """
        self._check(tokens, max_tokens, stop_ids)
        room = self._engine.context - self.length - len(tokens)
        if room <= 0:
            return Generation(tokens=(), logprobs=(), full_logprobs=(), versions=(), finish="context")
        turn = self._turn(list(tokens), key, sampling, min(max_tokens, room), tuple(stop_ids))
        turn.limited_by = "length" if max_tokens <= room else "context"
        self.busy = True
        try:
            return await self._engine.submit(turn)
        finally:
            self.busy = False

    def close(self) -> None:
        """Frees the slot. Idempotent; a turn in flight ends as `cancelled`."""
        if not self.closed:
            self.closed = True
            self._engine.release(self)

    def _turn(self, tokens, key, sampling, budget, stop_ids) -> TurnInFlight:
        feed = ([] if self.last is None else [self.last]) + tokens
        return TurnInFlight(
            session=self,
            pending=feed[:-1],
            start=self.cached,
            last=feed[-1],
            sampling=sampling,
            stop_ids=stop_ids,
            budget=budget,
            limited_by="length",
            words=key_words(key),
            future=asyncio.get_running_loop().create_future(),
        )

    def _check(self, tokens: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> None:
        vocab = self._engine.vocab_size
        if self.closed or self.broken:
            why = "closed" if self.closed else "lost its cache in an engine fault"
            raise EngineError(f"session is {why}: open a new one")
        if self.busy:
            raise EngineError("session already generates: await its turn before the next")
        if max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, got {max_tokens}")
        if not tokens and self.last is None:
            raise EngineError("empty prompt: the first turn needs at least one token")
        if len(stop_ids) > MOST_STOP_IDS:
            raise EngineError(f"at most {MOST_STOP_IDS} stop ids per turn, got {len(stop_ids)}")
        bad = next((t for t in tokens if not 0 <= t < vocab), None)
        if bad is not None:
            raise EngineError(f"token id {bad} is outside the vocabulary 0..{vocab - 1}")
