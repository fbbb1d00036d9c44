"""Which request runs next, who has to wait, who has to leave: bookkeeping between device jobs.

`plan` decides on one device job, the engine runs it, `settle` books what came of it. Nothing here
touches the device or waits.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from jaxrl.engine.batching import Batcher, slot_state
from jaxrl.engine.context import Context, Place
from jaxrl.engine.errors import EngineError
from jaxrl.engine.memory import Memory
from jaxrl.engine.ops import Op
from jaxrl.engine.prefixes import Prefixes
from jaxrl.engine.request import Request, Top
from jaxrl.engine.stats import EngineStats
from jaxrl.engine.step import Emitted, Piece, SlotState


@dataclass(frozen=True, kw_only=True)
class Job:
    """Device work: moves first, then at most one program for these requests."""

    ops: Sequence[Op] = ()
    requests: Sequence[Request] = ()
    pieces: Sequence[Piece] = ()  # a prefill's, one per request
    bucket: int = 0
    state: SlotState | None = None  # a decode's
    slots: Sequence[int | None] = ()  # a decode's: where the requests sat when it was planned


class Scheduler:
    """First come, first served, but for requests that wait for a prefix another one is making."""

    def __init__(
        self,
        memory: Memory,
        prefixes: Prefixes,
        batcher: Batcher,
        *,
        stats: EngineStats,
        text_of: Callable[[Sequence[int]], str] | None = None,
    ):
        """`text_of` decodes tokens; without it stop strings can't be asked for."""
        self.memory, self.prefixes, self.batcher = memory, prefixes, batcher
        self.sizes, self.stats, self.text_of = memory.sizes, stats, text_of
        self.waiting: list[Request] = []  # by arrival
        self.active: dict[Request, None] = {}
        self.draining = False
        self.version = 0
        self._arrivals = 0
        self._gone: list[Request] = []

    def submit(self, request: Request) -> None:
        """Queues a request behind all others."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self.memory.touch(request.context)
        self.waiting.append(request)
        request.future.add_done_callback(
            lambda future: self._gone.append(request) if future.cancelled() else None
        )

    def settled(self) -> bool:
        """Whether no request that was begun is unfinished."""
        return not self.active and not any(request.started for request in self.waiting)

    def plan(self) -> Job | None:
        """The next device job, or None when there is nothing to do."""
        self.drop_ended()
        self._admit()
        job = self._prefill() or self._decode()
        ops = self.memory.take_ops()
        if job is None:
            return Job(ops=ops) if ops else None
        return replace(job, ops=ops)

    # --- admission ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        # A bounded look ahead: ten thousand queued requests must not be gone through for every job.
        for request in list(islice(self.waiting, 4 * self.sizes.slots)):
            if not self.memory.slot_to_have():
                return
            if self.draining and not request.started:
                continue
            if self._waits(request):
                continue
            if not self._place(request):
                return
            self.waiting.remove(request)
            if request.budget == 0 and request.context.ready:
                self._finish(request, "length")

    def _waits(self, request: Request) -> bool:
        """Whether another request is making what this one begins with."""
        prefix = request.waits_for
        if prefix is None or not prefix.pending:
            # A longer one may be in the making by now.
            fresh = self._fresh(request.context)
            prefix = self.prefixes.match(request.context.tokens[:-1]) if fresh else None
        waits = prefix is not None and prefix.pending
        request.wait_for(prefix if waits else None)
        return waits

    def _place(self, request: Request) -> bool:
        """Gives `request` a slot and makes it active, if there is room for all it is going to need soon."""
        context = request.context
        if not self._room(context):
            return False
        if self._fresh(context):
            self._share(request)
        if not self.memory.make_live(context):
            return False
        if context.missing and not context.furthest:
            self.prefixes.announce(request, context.tokens[:-1], start=context.cached)
        request.started = True
        self.active[request] = None
        return True

    def _room(self, context: Context) -> bool:
        if not self.active:
            return True  # everything else can be driven out
        held = {page for request in self.active for page in request.context.pages}
        size = self.sizes.page_size
        wanted = -(-(len(context.tokens) + self.sizes.decode_steps) // size)
        own = sum(page in held for page in context.pages)
        growth = len(self.active)
        return wanted - own + growth <= self.sizes.pages - len(held)

    def _share(self, request: Request) -> None:
        prefix = self.prefixes.match(request.context.tokens[:-1])
        if prefix is not None and prefix.ready:
            self.memory.adopt(prefix, request.context, version=self.version)
            self.stats.shared_tokens += prefix.length
            if request.context.furthest:
                self.stats.recovered_tokens += prefix.length

    @staticmethod
    def _fresh(context: Context) -> bool:
        return context.place is Place.NOWHERE and context.missing > 0

    # --- the next program --------------------------------------------------------------------------

    def _prefill(self) -> Job | None:
        batch = self.batcher.next_prefill(list(self.active))
        if batch is None:
            return None
        requests, bucket = batch
        wanted = [(request, request.context.cached + self.batcher.size(request)) for request in requests]
        chosen = self._make_room(wanted)
        pieces = [self._piece(request) for request in chosen]
        return Job(requests=chosen, pieces=pieces, bucket=bucket) if chosen else None

    def _piece(self, request: Request) -> Piece:
        context = request.context
        assert context.slot is not None
        stop = context.cached + self.batcher.size(request)
        return Piece(
            context.slot, context.cached, context.tokens[context.cached : stop], tuple(context.pages)
        )

    def _decode(self) -> Job | None:
        ready = [request for request in self.active if request.context.ready]
        steps = self.sizes.decode_steps
        wanted = [(request, request.context.cached + min(steps, request.remaining)) for request in ready]
        chosen = self._make_room(wanted)
        if not chosen:
            return None
        slots = [request.context.slot for request in chosen]
        return Job(requests=chosen, state=slot_state(chosen, self.sizes), slots=slots)

    def _make_room(self, wanted: Sequence[tuple[Request, int]]) -> list[Request]:
        """Those of `wanted` that can write up to their position; late arrivals give way to earlier ones."""
        for request, stop in sorted(wanted, key=lambda pair: pair[0].arrival):
            while request in self.active and not self.memory.make_writable(request.context, stop):
                self._preempt(max(self.active, key=lambda other: other.arrival))
        return [request for request, _ in wanted if request in self.active]

    def _preempt(self, request: Request) -> None:
        del self.active[request]
        self.prefixes.abandon(request)
        self.memory.suspend(request.context)
        self.stats.preemptions += 1
        insort(self.waiting, request, key=lambda other: other.arrival)

    # --- what came of it ---------------------------------------------------------------------------

    def settle_prefill(self, job: Job, routes_RTLX: np.ndarray | None) -> None:
        """Books the pieces that a prefill has computed."""
        self.stats.prefill_dispatches += 1
        for row, (request, piece) in enumerate(zip(job.requests, job.pieces, strict=True)):
            context, size = request.context, len(piece.tokens)
            if context.slot != piece.slot:
                continue  # closed meanwhile
            context.cleared = True
            self._advance(context, size)
            if routes_RTLX is not None:
                context.routes.append(routes_RTLX[row, :size])
            if (prefix := self.prefixes.reached(request, context.cached)) is not None:
                self.memory.keep(prefix, context)
            if request in self.active and request.budget == 0 and context.ready:
                self._finish(request, "length")

    def settle_decode(self, job: Job, emitted: Emitted) -> None:
        """Books the tokens that a decode has sampled."""
        self.stats.decode_dispatches += 1
        for request, slot in zip(job.requests, job.slots, strict=True):
            if slot is None or request.context.slot != slot:
                continue  # closed meanwhile
            rows = np.flatnonzero(emitted.valid_NB[:, slot])
            self._book(request, emitted, rows, slot)
            if not _finite(emitted, rows, slot):
                self._fail(request, "non-finite log-probability: the weights or the cache hold NaN")
            elif request in self.active:
                self._go_on(request)

    def _book(self, request: Request, emitted: Emitted, rows: np.ndarray, slot: int) -> None:
        context = request.context
        context.tokens += emitted.token_NB[rows, slot].tolist()
        context.cached += len(rows)
        context.furthest = max(context.furthest, context.cached)
        self._made_by(context)
        request.logprobs += emitted.logprob_NB[rows, slot].tolist()
        request.full_logprobs += emitted.full_logprob_NB[rows, slot].tolist()
        request.versions += [self.version] * len(rows)
        if request.top_logprobs:
            request.top += _top(emitted, rows, slot, request.top_logprobs)
        if self.sizes.routed_experts:
            context.routes.append(np.asarray(emitted.routes_NBLX[rows, slot]))
        self.stats.sampled_tokens += len(rows)

    def _advance(self, context: Context, size: int) -> None:
        again = max(min(context.furthest, context.cached + size) - context.cached, 0)
        self.stats.prefilled_tokens += size
        self.stats.recomputed_tokens += again
        context.cached += size
        context.furthest = max(context.furthest, context.cached)
        self._made_by(context)

    def _made_by(self, context: Context) -> None:
        oldest = context.oldest_version
        context.oldest_version = self.version if oldest is None else min(oldest, self.version)

    def _go_on(self, request: Request) -> None:
        try:
            finish = request.finish(self._completed(request))
        except Exception as fault:  # noqa: BLE001 (the caller's own code decodes; others must not suffer)
            self._fail(request, f"text_of failed: {type(fault).__name__}: {fault}")
            return
        if finish:
            self._finish(request, finish)
        else:
            request.stream()

    def _completed(self, request: Request) -> str | None:
        """The stop string that the last token completed."""
        if not request.stop_strings:
            return None
        assert self.text_of is not None
        # Each token brings at least a byte, and a few may be cut characters or special tokens.
        longest = max(len(stop.encode()) for stop in request.stop_strings)
        tail = self.text_of(request.sampled[-(longest + 8) :])
        return next((stop for stop in request.stop_strings if stop in tail), None)

    # --- ends --------------------------------------------------------------------------------------

    def close(self, context: Context) -> None:
        """Ends whatever `context` has in flight and gives back all it holds."""
        for request in [r for r in [*self.active, *self.waiting] if r.context is context]:
            self._remove(request)
            request.resolve("cancelled")
        self.memory.release(context)

    def fail_all(self, error: EngineError) -> None:
        """Ends every request."""
        for request in [*self.active, *self.waiting]:
            self._remove(request)
            self.memory.release(request.context)
            request.fail(error)

    def forget_cached(self) -> None:
        """Every cached prefix is to be computed anew: active requests begin again from their tokens."""
        for request in list(self.active):
            self._preempt_for_recompute(request)
        for context in list(self.memory.idle):
            self.memory.release(context)

    def _preempt_for_recompute(self, request: Request) -> None:
        del self.active[request]
        self.prefixes.abandon(request)
        self.memory.release(request.context)
        insort(self.waiting, request, key=lambda other: other.arrival)

    def drop_ended(self) -> None:
        """Requests whose awaiter is gone: their sessions keep what was sampled."""
        gone, self._gone = self._gone, []
        for request in gone:
            self._remove(request)
            request.resolve("cancelled")
            self.memory.rest(request.context)

    def _finish(self, request: Request, finish) -> None:
        self._remove(request)
        self.memory.rest(request.context)
        request.resolve(finish)

    def _fail(self, request: Request, why: str) -> None:
        self._remove(request)
        self.memory.release(request.context)
        request.fail(EngineError(why))

    def _remove(self, request: Request) -> None:
        if request in self.active:
            del self.active[request]
            self.prefixes.abandon(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.wait_for(None)


def _finite(emitted: Emitted, rows: np.ndarray, slot: int) -> bool:
    both = emitted.logprob_NB[rows, slot], emitted.full_logprob_NB[rows, slot]
    return all(np.isfinite(values).all() for values in both)


def _top(emitted: Emitted, rows: np.ndarray, slot: int, width: int) -> list[Top]:
    ids = emitted.top_token_NBW[rows, slot, :width].tolist()
    values = emitted.top_logprob_NBW[rows, slot, :width].tolist()
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
