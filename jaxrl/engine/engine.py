"""The engine: sessions, and a loop that runs one device job after another.

    engine = Engine(model, EngineOptions(slots=8, context=256))
    async with engine:  # may be entered again later, compiled programs stay
        session = engine.open_session()
        turn = await session.generate(ids, key=key, sampling=Sampling(), max_tokens=64, stop_ids=[2])
        session.close()

Device jobs run one at a time on a single-thread executor that the trainer shares, so decode steps
and training microbatches interleave in the order in which they were asked for.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Literal

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxrl.contracts import Generation
from jaxrl.engine.batching import Batcher
from jaxrl.engine.checks import check_weights
from jaxrl.engine.context import Context
from jaxrl.engine.costs import Costs
from jaxrl.engine.device import Device
from jaxrl.engine.errors import EngineError
from jaxrl.engine.memory import Memory
from jaxrl.engine.options import EngineOptions
from jaxrl.engine.prefixes import Prefixes
from jaxrl.engine.request import Request
from jaxrl.engine.scheduler import Job, Scheduler
from jaxrl.engine.session import EngineSession
from jaxrl.engine.stats import EngineStats
from jaxrl.engine.step import Emitted, Params, Steps
from jaxrl.model.transformer import Transformer

__all__ = ["Engine", "EngineError", "EngineOptions", "EngineSession"]


class Engine:
    """Serves many sessions with one model; see `contracts.Generator`. Use it on one event loop at a time."""

    def __init__(
        self,
        model: Transformer,
        options: EngineOptions,
        *,
        device: Executor | None = None,
        text_of: Callable[[Sequence[int]], str] | None = None,
        steps: Steps | None = None,
        mesh: Mesh | None = None,
    ):
        """Allocates the cache; compiles nothing yet.

        Args:
          device: the executor of device jobs; one of its own is made when None.
          text_of: decodes tokens, for stop strings.
          steps: another engine's, to share its compiled programs; of the same model and sizes.

          mesh: what the model's weights lie on; None for one device.

        Raises:
            EngineError: an option out of its range, a memory budget that holds no sequence, or `steps` of
              other sizes.
        """
        self.options, self.context, self.vocab_size = options, options.context, model.spec.vocab_size
        sizes = options.sizes(model.spec)
        self.steps = steps or Steps(model, sizes, mesh=mesh)
        if self.steps.sizes != sizes:
            raise EngineError(f"steps: expected the sizes of these options, {sizes}; got {self.steps.sizes}")
        self.steps.params = None  # those in use are the device's; the first ones would outlive every swap
        self.stats = EngineStats()
        self._costs = Costs() if options.eviction == "measured" else None
        self._device = Device(self.steps, nnx.state(model), costs=self._costs)
        self._prefixes = Prefixes(options.prefill_buckets[-1])
        self._memory = Memory(
            self.steps.sizes,
            self._prefixes,
            page_bytes=self.steps.page_bytes(),
            row_bytes=self.steps.row_bytes(),
            host_bytes=options.host_bytes,
            poison=options.poison_freed,
            worth_storing=self._worth_storing,
        )
        self._scheduler = Scheduler(
            self._memory,
            self._prefixes,
            Batcher(options.prefill_rows, options.prefill_buckets),
            stats=self.stats,
            text_of=text_of,
        )
        self._given_executor, self._executor = device, device
        self._wake = asyncio.Event()
        self._paused = False
        self._between: list[tuple[Callable[[], None], asyncio.Future[None]]] = []
        self._drains: list[asyncio.Future[None]] = []
        self._holds = 0  # drains begun and not resumed: while there are any, no turn begins
        self._last_end: float | None = None
        self._loop_task: asyncio.Task | None = None

    @property
    def params(self) -> Params:
        """The weights in use."""
        return self._device.params

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self._scheduler.version

    @property
    def decodes_text(self) -> bool:
        """Whether stop strings can be asked for."""
        return self._scheduler.text_of is not None

    async def __aenter__(self) -> "Engine":
        if self._loop_task is not None and not self._loop_task.done():
            raise EngineError("engine is already running: enter it once")
        self._executor = self._given_executor or ThreadPoolExecutor(1, thread_name_prefix="device")
        self._wake, self._paused = asyncio.Event(), False
        self._hold(-self._holds)
        self._loop_task = asyncio.create_task(self._run(), name="engine")
        return self

    async def __aexit__(self, *_) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, return_exceptions=True)
        self._stop(EngineError("engine stopped"))
        if self._given_executor is None and self._executor is not None:
            self._executor.shutdown()

    async def warm_up(self) -> None:
        """Compiles every program that this engine can ever run."""
        self.check_running()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._device.warm_up)

    def open_session(self) -> EngineSession:
        """A new, empty conversation. It holds nothing until its first turn."""
        return EngineSession(self)

    def cache_bytes(self) -> int:
        """Bytes of the cache on the device, which do not change while the engine lives."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._device.cache))

    def memory_counts(self) -> dict[str, int]:
        """What is held now (slots, parked rows, pages, bytes on the host) and was moved since the start."""
        memory = self._memory
        pools = {"slots": memory.slots, "rows": memory.rows, "pages": memory.pages}
        held = {name: pool.count - pool.free for name, pool in pools.items()}
        moved = {name: getattr(memory, name) for name in ("offloads", "restores", "drops", "dropped_tokens")}
        return held | {"host_bytes": memory.host_used} | moved

    # --- weights -----------------------------------------------------------------------------------

    def set_weights(self, params: Params, *, version: int) -> None:
        """Swaps the weights of an engine that holds no conversation, as between synchronous steps.

        Raises:
            EngineError: weights of another model; while a session holds something or a request waits, see
              `swap_weights`.
        """
        check_weights(params, self.params, version=version)
        held = self.options.slots - self._memory.slots.free
        idle = len(self._memory.idle)
        if held or idle or self._scheduler.waiting or self._memory.host_used:
            raise EngineError(
                f"weights can be set on a drained engine only: {held} slots are held and "
                f"{len(self._scheduler.waiting)} requests wait; close the sessions, or use swap_weights"
            )
        self._use(params, version, keep_prefixes=False)

    async def swap_weights(
        self,
        params: Params,
        *,
        version: int,
        policy: Literal["drain", "in_flight"] = "drain",
        cached: Literal["keep", "recompute"] = "keep",
        keep_prefixes: bool = False,
    ) -> None:
        """Swaps the weights while sessions are open. Every token tells the version that sampled it.

        Args:
          policy: "drain" lets turns that have begun end under the old weights and holds back all others
            meanwhile; "in_flight" swaps between two device jobs, in the middle of turns.
          cached: "keep" lets sessions go on from what older weights computed of their context
            (`EngineSession.oldest_version` tells); "recompute" prefills it again with the new ones.
          keep_prefixes: let new requests take over prompts that older weights computed.

        Raises:
            EngineError: weights of another model, another policy, or the engine stops meanwhile.
        """
        check_weights(params, self.params, version=version)
        if policy not in ("drain", "in_flight") or cached not in ("keep", "recompute"):
            raise EngineError(
                f"policy = {policy!r}, cached = {cached!r}: expected drain or in_flight, keep or recompute"
            )
        if policy == "drain":
            await self.drain()
        try:
            await self._at_rest(lambda: self._swap(params, version, cached, keep_prefixes))
        finally:
            if policy == "drain":
                self._hold(-1)

    def _worth_storing(self, nbytes: int, tokens: int) -> bool:
        match self.options.eviction:
            case "offload":
                return True
            case "recompute":
                return False
            case "measured":
                return self._costs is None or self._costs.storing_pays(nbytes, tokens)

    def _swap(self, params: Params, version: int, cached: str, keep_prefixes: bool) -> None:
        if cached == "recompute":
            self._scheduler.forget_cached()
        self._use(params, version, keep_prefixes=keep_prefixes and cached == "keep")

    def _use(self, params: Params, version: int, *, keep_prefixes: bool) -> None:
        if not keep_prefixes:
            for prefix in self._prefixes.clear():
                self._memory.discard(prefix)
        self._device.params, self._scheduler.version = params, version

    # --- flow --------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Stops after the device job under way; nothing is lost. Idempotent."""
        self._paused = True
        await self._at_rest(lambda: None)

    async def drain(self) -> None:
        """Waits until every turn that has begun is over; others stay queued until `resume`.

        Raises:
            EngineError: turns that have begun are paused, or the engine stops meanwhile.
        """
        self.check_running()
        if self._paused:
            await self._at_rest(lambda: None)  # books the ends of cancelled turns
        if self._paused and not self._scheduler.settled():
            raise EngineError("engine is paused in the middle of turns: resume it before it can drain")
        drained = asyncio.get_running_loop().create_future()
        self._drains.append(drained)
        self._hold(1)
        try:
            await drained
        except BaseException:
            self._hold(-1)
            raise

    def resume(self) -> None:
        """Goes on after `pause` or `drain`."""
        self._paused = False
        self._hold(-self._holds)

    def _hold(self, change: int) -> None:
        # A resume in the middle of a swap may have let go of what the swap lets go of at its end.
        self._holds = max(self._holds + change, 0)
        self._scheduler.draining = self._holds > 0
        self.wake()

    def check_running(self) -> None:
        """Raises: EngineError: outside `async with`."""
        if self._loop_task is None or self._loop_task.done():
            raise EngineError("engine is not running: use it inside `async with`")

    def wake(self) -> None:
        """Something changed: the loop looks again."""
        self._wake.set()

    def submit(self, request: Request) -> asyncio.Future[Generation]:
        """Queues a request; sessions call this."""
        self.stats.prompt_tokens += request.first - request.start
        self._scheduler.submit(request)
        self.wake()
        return request.future

    def fork(self, context: Context, twin: Context) -> None:
        """Shares what is cached of `context`; sessions call this."""
        self._memory.fork(context, twin)

    def release(self, context: Context) -> None:
        """Gives back what `context` holds; sessions call this."""
        self._scheduler.close(context)
        self.wake()

    # --- the loop ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                self._run_between()
                job = self._planned()
                self._tell_drained()
                if job is not None:
                    await self._do(job)
                    continue
            except Exception as fault:  # noqa: BLE001 (whatever it is, every waiting turn must hear of it)
                self._lose_device(fault)
            self._last_end = None
            await self._wake.wait()
            self._wake.clear()

    def _planned(self) -> Job | None:
        if not self._paused:
            return self._scheduler.plan()
        self._scheduler.drop_ended()
        return None

    async def _do(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        result, started, ended = await loop.run_in_executor(self._executor, self._device.run, job)
        self.stats.device_seconds += ended - started
        if self._last_end is not None:
            self.stats.idle_seconds += started - self._last_end
        self._last_end = ended
        if isinstance(result, Emitted):
            self._scheduler.settle_decode(job, result)
        elif job.pieces:
            self._scheduler.settle_prefill(job, result)

    async def _at_rest(self, action: Callable[[], None]) -> None:
        """Runs `action` between two device jobs."""
        self.check_running()
        done = asyncio.get_running_loop().create_future()
        self._between.append((action, done))
        self.wake()
        await done

    def _run_between(self) -> None:
        actions, self._between = self._between, []
        for action, done in actions:
            if done.done():
                continue  # who asked for it is gone
            try:
                action()
                done.set_result(None)
            except Exception as fault:  # noqa: BLE001 (it is the asker's)
                done.set_exception(fault)

    def _tell_drained(self) -> None:
        if self._drains and self._scheduler.settled():
            drains, self._drains = self._drains, []
            for drained in drains:
                if not drained.done():
                    drained.set_result(None)

    def _lose_device(self, fault: Exception) -> None:
        """The cache may have been donated to the failed program: what it held is to be computed anew."""
        self._scheduler.fail_all(EngineError(f"device job failed: {type(fault).__name__}: {fault}"))
        self._memory.lose_device()
        self._device.reset()

    def _stop(self, error: EngineError) -> None:
        self._scheduler.fail_all(error)
        self._memory.forget_all()
        for future in [*(done for _, done in self._between), *self._drains]:
            if not future.done():
                future.set_exception(error)
        self._between, self._drains = [], []
