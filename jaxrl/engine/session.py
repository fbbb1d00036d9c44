"""A conversation held by the engine. Its context only grows; only new tokens are ever prefilled."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from jaxrl.contracts import Generation, SampleKey, Sampling
from jaxrl.engine.checks import check_count, check_ids, check_sampling, check_strings, checked_words
from jaxrl.engine.context import Context, Place
from jaxrl.engine.errors import EngineError
from jaxrl.engine.request import Request
from jaxrl.engine.step import MOST_STOP_IDS

if TYPE_CHECKING:
    from jaxrl.engine.engine import Engine

_NO_TOKENS = Generation(tokens=(), logprobs=(), full_logprobs=(), versions=(), finish="context")
_APPEND = SampleKey(0, "append", 0, 0, 0)


class EngineSession:
    """One conversation; made by `Engine.open_session`. See `contracts.Session`."""

    def __init__(self, engine: "Engine"):
        self._engine = engine
        self._context = Context()
        self._request: Request | None = None
        self.closed = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far, prompts and samples, also those of a turn that was cancelled."""
        return tuple(self._context.tokens)

    @property
    def length(self) -> int:
        """Tokens so far, prompts and samples together."""
        return len(self._context.tokens)

    @property
    def place(self) -> Place:
        """Where what is cached of the conversation lies now."""
        return self._context.place

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that made part of the cache; None if nothing is cached."""
        return self._context.oldest_version

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        key: SampleKey,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        top_logprobs: int = 0,
    ) -> Generation:
        """Appends `tokens`, samples up to `max_tokens` more; see `contracts.Generation`.

        A prompt that does not fit the context gives no tokens and finish `context`. If the awaiting task
        is cancelled the session keeps what was sampled, and can go on. After an error it is as before.

        Args:
          stop_ids: the turn ends with the first of them; it is part of the result.
          stop_strings: the turn ends with the token that completes one; all its tokens are part of the
            result. Such a turn samples one token a dispatch.
          top_logprobs: so many most-likely tokens per token, of the full softmax.

        Raises:
            EngineError: on invalid input, a closed session, or a fault of the device program.
        """
        await self._end_of_cancelled()
        self._check(tokens, sampling, max_tokens, stop_ids, stop_strings, top_logprobs)
        if self._room(tokens) <= 0:
            return _NO_TOKENS
        request = self._ask(tokens, key, sampling, max_tokens, stop_ids, stop_strings, top_logprobs)
        return await self._engine.submit(request)

    async def stream(
        self,
        tokens: Sequence[int],
        *,
        key: SampleKey,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        top_logprobs: int = 0,
    ) -> AsyncGenerator[Generation]:
        """As `generate`, in parts as they are sampled; the last part alone has a `finish`.

        Closing the iterator (`contextlib.aclosing`) ends the turn; a slow reader holds up nobody.
        """
        await self._end_of_cancelled()
        self._check(tokens, sampling, max_tokens, stop_ids, stop_strings, top_logprobs)
        if self._room(tokens) <= 0:
            yield _NO_TOKENS
            return
        request = self._ask(tokens, key, sampling, max_tokens, stop_ids, stop_strings, top_logprobs)
        request.parts = asyncio.Queue()
        done = self._engine.submit(request)
        try:
            while True:
                part = await request.parts.get()
                if isinstance(part, EngineError):
                    raise part
                yield part
                if part.finish is not None:
                    return
        finally:
            done.cancel()
            self._engine.wake()

    async def append(self, tokens: Sequence[int]) -> None:
        """Prefills `tokens` without sampling, for instance while the next ones are awaited.

        Raises:
            EngineError: as `generate`, or when they do not fit the context.
        """
        await self._end_of_cancelled()
        self._check(tokens, Sampling(), 1, (), (), 0)
        if self._room(tokens) < 0:
            raise EngineError(
                f"{self.length} tokens and {len(tokens)} more do not fit the context of "
                f"{self._engine.context}"
            )
        request = self._ask(tokens, _APPEND, Sampling(), 0, (), (), 0)
        await self._engine.submit(request)

    def fork(self) -> "EngineSession":
        """A second session with the same context; both go on by themselves. Copies no keys.

        Raises:
            EngineError: while a turn is in flight, or when closed.
        """
        self._check_open()
        if self._busy():
            raise EngineError("session generates: await its turn before you fork it")
        twin = EngineSession(self._engine)
        twin._context.tokens = list(self._context.tokens)
        self._engine.fork(self._context, twin._context)
        return twin

    def close(self) -> None:
        """Gives back all the engine holds for the session. Idempotent; a turn in flight ends `cancelled`."""
        if not self.closed:
            self.closed = True
            self._engine.release(self._context)

    def _ask(self, tokens, key, sampling, max_tokens, stop_ids, stop_strings, top_logprobs) -> Request:
        words = checked_words(key)  # first: after an error the session is as before
        context, start, room = self._context, self.length, self._room(tokens)
        context.tokens += [int(token) for token in tokens]
        self._request = Request(
            context=context,
            start=start,
            first=len(context.tokens),
            sampling=sampling,
            stop_ids=tuple(stop_ids),
            stop_strings=tuple(stop_strings),
            top_logprobs=top_logprobs,
            budget=min(max_tokens, room),
            limited_by="length" if max_tokens <= room else "context",
            words=words,
            future=asyncio.get_running_loop().create_future(),
        )
        return self._request

    def _room(self, tokens: Sequence[int]) -> int:
        return self._engine.context - self.length - len(tokens)

    def _busy(self) -> bool:
        return self._request is not None and not self._request.ended.is_set()

    async def _end_of_cancelled(self) -> None:
        """A turn whose awaiter is gone ends with the device job it is part of: a moment later."""
        if self._request is not None and self._busy() and self._request.future.cancelled():
            self._engine.wake()
            await self._request.ended.wait()

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("session is closed: open a new one")

    def _check(self, tokens, sampling, max_tokens, stop_ids, stop_strings, top_logprobs) -> None:
        self._check_open()
        engine = self._engine
        engine.check_running()
        if self._busy():
            raise EngineError(
                "session already generates: await its turn, or close its stream (contextlib.aclosing), first"
            )
        check_count("max_tokens", max_tokens, 1)
        check_ids("tokens", tokens, vocab=engine.vocab_size)
        check_ids("stop_ids", stop_ids, vocab=engine.vocab_size)
        check_strings(stop_strings)
        check_sampling(sampling)
        if not len(tokens) and not self.length:
            raise EngineError("empty prompt: the first turn needs at least one token")
        if len(stop_ids) > MOST_STOP_IDS:
            raise EngineError(f"at most {MOST_STOP_IDS} stop ids per turn, got {len(stop_ids)}")
        if stop_strings and not engine.decodes_text:
            raise EngineError("stop strings need an engine that decodes: pass text_of=tokenizer.decode")
        check_count("top_logprobs", top_logprobs, 0)
        if top_logprobs > engine.options.top_logprobs:
            raise EngineError(
                f"top_logprobs = {top_logprobs}: this engine records {engine.options.top_logprobs}; "
                "raise EngineOptions.top_logprobs"
            )
