"""The engine: sessions in slots, and a loop that picks the next device job.

    engine = Engine(model, EngineOptions(slots=8, context=256))
    async with engine:  # may be entered again later, compiled programs stay
        session = engine.open_session()
        turn = await session.generate(ids, key=key, sampling=Sampling(), max_tokens=64, stop_ids=[2])
        session.close()

Device jobs run one at a time on a single-thread executor that the trainer shares, so decode steps
and training microbatches interleave in the order in which they were asked for.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxrl.contracts import Generation
from jaxrl.engine.batching import Batcher
from jaxrl.engine.cache import Sizes
from jaxrl.engine.session import EngineError, EngineSession, TurnInFlight
from jaxrl.engine.step import Emitted, Params, Piece, Steps
from jaxrl.model.transformer import Transformer

DeviceJob = Callable[[], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Fixed sizes of the compiled programs."""

    slots: int = 128
    context: int = 192  # tokens a slot can hold
    prefill_rows: int = 16
    prefill_buckets: tuple[int, ...] = (16, 64)  # tokens; the last one is the chunk
    decode_steps: int = 4  # tokens per dispatch
    poison_freed: bool = False  # tests: freed slots are filled with NaN


@dataclass
class EngineStats:
    """Totals since start."""

    prompt_tokens: int = 0  # asked to be prefilled, shared prompts counted once per session
    prefilled_tokens: int = 0  # run through the model by prefill
    sampled_tokens: int = 0
    prefill_dispatches: int = 0
    decode_dispatches: int = 0


@dataclass
class _Table:
    """Which session sits where."""

    free: list[int]
    waiting: deque[TurnInFlight] = field(default_factory=deque)
    active: dict[int, TurnInFlight] = field(default_factory=dict)  # by slot


class Engine:
    """Serves many sessions with one model; see `contracts.Generator`."""

    def __init__(self, model: Transformer, options: EngineOptions, *, device: Executor | None = None):
        """`device` is the executor of device jobs; one of its own is made when None."""
        self.options, self.context, self.vocab_size = options, options.context, model.spec.vocab_size
        self.steps = Steps(model, _sizes(options))
        self.params, self.version = self.steps.params, 0
        self.stats = EngineStats()
        self._cache = self.steps.init_cache()
        self._table = self._empty_table()
        self._batcher = Batcher(options.prefill_rows, options.prefill_buckets)
        self._given_device = device
        self._device = device
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task | None = None
        self._to_poison: list[int] = []

    async def __aenter__(self) -> "Engine":
        self._device = self._given_device or ThreadPoolExecutor(1, thread_name_prefix="device")
        self._wake = asyncio.Event()
        self._loop_task = asyncio.create_task(self._run(), name="engine")
        return self

    async def __aexit__(self, *_) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, return_exceptions=True)
        self._fail_all(EngineError("engine stopped"))
        if self._given_device is None and self._device is not None:
            self._device.shutdown()
        self._table = self._empty_table()

    def _empty_table(self) -> _Table:
        return _Table(free=list(reversed(range(self.options.slots))))

    def open_session(self) -> EngineSession:
        """A new, empty conversation. It takes a slot with its first turn."""
        return EngineSession(self)

    def set_weights(self, params: Params, *, version: int) -> None:
        """Swaps weights after a drain: cached states of older weights must not be extended.

        Raises:
            EngineError: while any session holds a slot.
        """
        held = self.options.slots - len(self._table.free)
        if held or self._table.waiting:
            raise EngineError(f"weight swap needs a drained engine: {held} sessions still hold slots")
        self.params, self.version = params, version

    async def submit(self, turn: TurnInFlight) -> Generation:
        """Queues a turn and waits for its end."""
        if self._loop_task is None or self._loop_task.done():
            raise EngineError("engine is not running: use it inside `async with`")
        self.stats.prompt_tokens += len(turn.pending) + 1
        if turn.session.slot is None:
            self._table.waiting.append(turn)
        else:
            self._table.active[turn.session.slot] = turn
        self._wake.set()
        return await turn.future

    def release(self, session: EngineSession) -> None:
        """Ends whatever `session` has in flight and frees its slot."""
        for turn in [t for t in self._table.waiting if t.session is session]:
            self._table.waiting.remove(turn)
            self._resolve(turn, "cancelled")
        if session.slot is None:
            return
        if turn := self._table.active.pop(session.slot, None):
            self._promote_followers(turn)
            self._resolve(turn, "cancelled")
        self._table.free.append(session.slot)
        if self.options.poison_freed:
            self._to_poison.append(session.slot)
        session.slot = None
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._drop_cancelled()
            self._admit()
            job = self._next_job()
            if job is None:
                await self._wake.wait()
                self._wake.clear()
                continue
            try:
                done = await loop.run_in_executor(self._device, job)
                done()
            except Exception as fault:  # noqa: BLE001 (whatever it is, every waiting turn must hear of it)
                self._reset_after(fault)

    def _next_job(self) -> DeviceJob | None:
        """A function for the device thread; what it returns runs on the event loop."""
        turns = list(self._table.active.values())
        if batch := self._batcher.next_prefill(turns):
            return self._prefill_job(*batch)
        decoding = {slot: turn for slot, turn in self._table.active.items() if turn.prefilled}
        if decoding:
            return lambda: self._decode(decoding)
        if self._to_poison:
            return self._poison
        return None

    def _admit(self) -> None:
        table = self._table
        leaders = {
            tuple(t.pending): t for t in table.active.values() if t.fresh and t.pending and t.leader is None
        }
        while table.waiting and table.free:
            turn = table.waiting.popleft()
            turn.session.slot = slot = table.free.pop()
            if slot in self._to_poison:
                self._to_poison.remove(slot)
            table.active[slot] = turn
            turn.fresh = True
            leader = leaders.setdefault(tuple(turn.pending), turn)
            turn.leader = leader if leader is not turn and turn.pending else None

    def _prefill_job(self, turns: Sequence[TurnInFlight], bucket: int, sizes: Sequence[int]) -> DeviceJob:
        pieces = [
            Piece(_slot(turn), turn.start, turn.pending[:size], self._pages(_slot(turn)))
            for turn, size in zip(turns, sizes, strict=True)
        ]

        def run() -> Callable[[], None]:
            self._cache, _ = self.steps.prefill(self.params, self._cache, pieces, bucket=bucket)
            return lambda: self._prefilled(turns, sizes)

        return run

    def _prefilled(self, turns: Sequence[TurnInFlight], sizes: Sequence[int]) -> None:
        self.stats.prefill_dispatches += 1
        self.stats.prefilled_tokens += sum(sizes)
        for turn, size in zip(turns, sizes, strict=True):
            turn.fresh = False
            turn.start += size
            turn.session.cached = turn.start
            del turn.pending[:size]
        self._copy_to_followers([turn for turn in turns if not turn.pending])

    def _copy_to_followers(self, leaders: Sequence[TurnInFlight]) -> None:
        followers = [t for t in self._table.active.values() if t.leader in leaders and t.leader]
        if not followers:
            return
        sources = [_slot(t.leader) for t in followers if t.leader]
        targets = [_slot(t) for t in followers]
        self._cache = self.steps.copy(self._cache, sources=sources, targets=targets)
        self._cache = self.steps.copy_pages(
            self._cache,
            sources=[page for slot in sources for page in self._pages(slot)],
            targets=[page for slot in targets for page in self._pages(slot)],
        )
        for turn in followers:
            assert turn.leader is not None
            turn.start = turn.session.cached = turn.leader.start
            turn.fresh = False
            turn.pending.clear()
            turn.leader = None

    def _pages(self, slot: int) -> range:
        """Every slot owns as many pages as its context needs."""
        each = self.steps.sizes.slot_pages
        return range(slot * each, (slot + 1) * each)

    def _decode(self, turns: dict[int, TurnInFlight]) -> Callable[[], None]:
        state = self._batcher.slot_state(turns, self.steps.sizes)
        self._cache, emitted = self.steps.generate(self.params, self._cache, state)
        host: Emitted = jax.tree.map(np.asarray, emitted)
        self.stats.decode_dispatches += 1
        return lambda: self._decoded(turns, host, self.version)

    def _decoded(self, turns: dict[int, TurnInFlight], emitted: Emitted, version: int) -> None:
        for slot, turn in turns.items():
            rows = np.flatnonzero(emitted.valid_NB[:, slot])
            turn.tokens += emitted.token_NB[rows, slot].tolist()
            turn.logprobs += emitted.logprob_NB[rows, slot].tolist()
            turn.full_logprobs += emitted.full_logprob_NB[rows, slot].tolist()
            turn.versions += [version] * len(rows)
            self.stats.sampled_tokens += len(rows)
            if self._table.active.get(slot) is turn:
                self._settle(slot, turn)

    def _settle(self, slot: int, turn: TurnInFlight) -> None:
        turn.session.cached, turn.session.last = turn.length, turn.tokens[-1]
        finish = turn.finish()
        if not np.isfinite(turn.full_logprobs[-1]):
            del self._table.active[slot]
            turn.session.broken = True
            _set_error(turn, EngineError("non-finite log-probability: the weights or the cache hold NaN"))
        elif finish:
            del self._table.active[slot]
            self._resolve(turn, finish)

    def _poison(self) -> Callable[[], None]:
        pages = [page for slot in self._to_poison for page in self._pages(slot)]
        self._cache = self.steps.fill(self._cache, slots=self._to_poison, pages=pages, value=float("nan"))
        self._to_poison = []
        return lambda: None

    def _drop_cancelled(self) -> None:
        live = [turn for turn in self._table.waiting if not turn.future.cancelled()]
        self._table.waiting = deque(live)
        for slot, turn in list(self._table.active.items()):
            if turn.future.cancelled():
                del self._table.active[slot]
                self._promote_followers(turn)
                turn.session.broken = True

    def _promote_followers(self, gone: TurnInFlight) -> None:
        """Turns that waited for `gone`'s prefill start over with a leader among themselves."""
        orphans = [t for t in self._table.active.values() if t.leader is gone]
        for turn in orphans:
            turn.leader = orphans[0] if turn is not orphans[0] else None

    def _reset_after(self, fault: Exception) -> None:
        """The cache may have been donated to the failed program: every held state is lost."""
        self._fail_all(EngineError(f"device program failed: {type(fault).__name__}: {fault}"))
        self._cache = self.steps.init_cache()

    def _fail_all(self, error: EngineError) -> None:
        for turn in [*self._table.active.values(), *self._table.waiting]:
            turn.session.broken = True
            _set_error(turn, error)
        self._table.active.clear()
        self._table.waiting.clear()

    @staticmethod
    def _resolve(turn: TurnInFlight, finish) -> None:
        if not turn.future.done():
            turn.future.set_result(
                Generation(
                    tokens=tuple(turn.tokens),
                    logprobs=tuple(turn.logprobs),
                    full_logprobs=tuple(turn.full_logprobs),
                    versions=tuple(turn.versions),
                    finish=finish,
                )
            )


def _sizes(options: EngineOptions) -> Sizes:
    page_size = Sizes.page_size
    each = -(-options.context // page_size)
    return Sizes(
        slots=options.slots,
        context=each * page_size,
        pages=options.slots * each,
        prefill_rows=options.prefill_rows,
        prefill_buckets=options.prefill_buckets,
        decode_steps=options.decode_steps,
    )


def _slot(turn: TurnInFlight) -> int:
    slot = turn.session.slot
    assert slot is not None, "a turn in flight holds a slot"
    return slot


def _set_error(turn: TurnInFlight, error: EngineError) -> None:
    if not turn.future.done():
        turn.future.set_exception(error)
