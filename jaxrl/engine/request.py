"""One turn of a session: what is asked, and what has been made of it so far."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl.contracts import Finish, Generation, Sampling
from jaxrl.engine.context import Context
from jaxrl.engine.errors import EngineError
from jaxrl.engine.prefixes import Prefix

Top = tuple[tuple[int, float], ...]  # most likely first


@dataclass(eq=False, kw_only=True)
class Request:
    """Samples up to `budget` tokens behind `context.tokens`, of which `start` precede the turn."""

    context: Context
    start: int
    first: int  # tokens before the first sampled one
    sampling: Sampling
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    top_logprobs: int
    budget: int
    limited_by: Finish  # what the budget's end means
    words: np.ndarray  # of the sampling key
    future: asyncio.Future[Generation]
    parts: asyncio.Queue[Generation | EngineError] | None = None  # a stream's
    arrival: int = 0
    started: bool = False
    waits_for: Prefix | None = None
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)
    streamed: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def sampled(self) -> Sequence[int]:
        """What the turn has sampled so far."""
        return self.context.tokens[self.first :]

    @property
    def remaining(self) -> int:
        """Tokens it may still sample."""
        return self.budget - (len(self.context.tokens) - self.first)

    def wait_for(self, prefix: Prefix | None) -> None:
        """Puts the request behind the making of a prefix, or behind nothing."""
        if self.waits_for is not None:
            self.waits_for.waiting -= 1
        self.waits_for = prefix
        if prefix is not None:
            prefix.waiting += 1

    def finish(self, completed: str | None) -> Finish | None:
        """Why the turn is over; `completed` is the stop string that its last token completed."""
        if self.sampled and (self.sampled[-1] in self.stop_ids or completed is not None):
            return "stop"
        return self.limited_by if self.remaining <= 0 else None

    def resolve(self, finish: Finish) -> None:
        """The turn is over: tells whoever waits."""
        self.wait_for(None)
        self.ended.set()
        if self.parts is not None:
            self.parts.put_nowait(self._generation(self.streamed, finish))
        if not self.future.done():
            self.future.set_result(self._generation(0, finish))

    def fail(self, error: EngineError) -> None:
        """The turn came to nothing: the conversation is what it was before."""
        self.wait_for(None)
        self.ended.set()
        del self.context.tokens[self.start :]
        self.context.furthest = min(self.context.furthest, self.start)
        if not self.future.done():
            self.future.set_exception(error)
        if self.parts is not None:
            self.parts.put_nowait(error)
            self.future.exception()  # a stream's reader hears of it through `parts` alone

    def stream(self) -> None:
        """Hands over what was sampled since the last time."""
        if self.parts is not None and len(self.sampled) > self.streamed:
            self.parts.put_nowait(self._generation(self.streamed, None))
            self.streamed = len(self.sampled)

    def _generation(self, skip: int, finish: Finish | None) -> Generation:
        return Generation(
            tokens=tuple(self.sampled[skip:]),
            logprobs=tuple(self.logprobs[skip:]),
            full_logprobs=tuple(self.full_logprobs[skip:]),
            versions=tuple(self.versions[skip:]),
            finish=finish,
            top_logprobs=tuple(self.top[skip:]),
            routed_experts=None if finish is None else self._routes(),
        )

    def _routes(self) -> np.ndarray | None:
        if not self.context.routes:
            return None
        return np.concatenate(self.context.routes)[max(self.start - 1, 0) :]
