"""One episode: turns of sampling and tool calls, then a verdict on what was changed."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from jaxrl.contracts import (
    OUTCOME_RULES,
    Generation,
    Generator,
    Outcome,
    OutcomeRule,
    SampleKey,
    Sampling,
    Session,
    Trajectory,
)
from jaxrl.rollout.calls import Call, Parsed
from jaxrl.rollout.loops import Step, stuck_in_loop
from jaxrl.rollout.renderer import Renderer
from jaxrl.rollout.transcript import Transcript
from sandbox.agent_tools.base import Observation, Stateful, Tool, failure, for_episode
from sandbox.base import Diff, Image, Sandbox, SandboxError
from sandbox.tasks.conceal import Concealer
from sandbox.tasks.schema import Hidden, TaskSpec


class Sandboxes(Protocol):
    """Where episodes get their sandboxes: a pool, as a rule."""

    def lease(
        self, files: Mapping[str, bytes], *, image: Image | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox of `image` holding `files`, destroyed at the block's end. Raises `SandboxError`."""
        ...


class Verdict(Protocol):
    """The grader's word: resolved, unresolved, tampering, timeout or error."""

    @property
    def status(self) -> str: ...

    @property
    def detail(self) -> str: ...


class Grader(Protocol):
    """Judges a diff in a sandbox of its own."""

    async def grade(self, task: TaskSpec, hidden: Hidden, diff: Diff) -> Verdict: ...


VERDICTS: Mapping[str, Outcome] = {
    "resolved": Outcome.RESOLVED,
    "unresolved": Outcome.UNRESOLVED,
    "tampering": Outcome.SUSPECTED_TAMPERING,
    "timeout": Outcome.GRADER_TIMEOUT,
    "error": Outcome.GRADER_ERROR,
}


@dataclass(frozen=True, kw_only=True)
class World:
    """What every episode of a run shares. Raises `ValueError` if a tool of the harness is missing."""

    generator: Generator
    sandboxes: Sandboxes
    grader: Grader
    tools: Mapping[str, Tool | Stateful]
    renderer: Renderer
    rules: Mapping[Outcome, OutcomeRule] = field(default_factory=lambda: OUTCOME_RULES)
    concealer: Concealer = field(default_factory=Concealer)

    def __post_init__(self) -> None:
        missing = set(self.renderer.harness.tools) - set(self.tools)
        if missing:
            raise ValueError(f"expected the harness's tools, got none for {sorted(missing)}: add them")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Which rollout of a task this is, and the distribution it samples from."""

    seed: int
    epoch: int
    sample: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the turns ended. `finished` means by a clean finish, so that the verdict decides."""

    outcome: Outcome
    detail: str = ""
    finished: bool = False


async def run_episode(task: TaskSpec, hidden: Hidden, *, attempt: Attempt, world: World) -> Trajectory:
    """Plays one episode and grades it. Faults of sandboxes become outcomes, all others raise.

    The trajectory holds complete turns only: what a time-out interrupts is not in it, so it may be
    empty. Reward follows `world.rules`; cancellation leaves no session and no sandbox.
    """
    return await _Episode(task, attempt=attempt, world=world).run(hidden)


class _Episode:
    def __init__(self, task: TaskSpec, *, attempt: Attempt, world: World) -> None:
        self._task = task
        self._attempt = attempt
        self._world = world
        self._harness = world.renderer.harness
        self._tools: Mapping[str, Tool] = for_episode(world.tools, task)
        self._steps: list[Step] = []
        self._oom = False
        self._transcript = Transcript()
        self._sandbox: Sandbox | None = None
        self._lease = AsyncExitStack()
        self._seconds: dict[str, float] = defaultdict(float)

    async def run(self, hidden: Hidden) -> Trajectory:
        with self._timed("episode"):
            try:
                ending, diff = await self._play()
            except SandboxError as error:
                ending, diff = Ending(outcome=Outcome.INFRA_ERROR, detail=str(error)), Diff()
            outcome, graded, detail = await self._judge(ending, hidden, diff)
        return self._transcript.trajectory(
            self._task.instance_id,
            epoch=self._attempt.epoch,
            sample=self._attempt.sample,
            outcome=outcome,
            reward=self._reward(outcome, graded),
            timings=dict(self._seconds),
            detail=detail,
        )

    async def _play(self) -> tuple[Ending, Diff]:
        """The agent's part; the sandbox is gone when it returns."""
        session = self._world.generator.open_session()
        try:
            ending = await self._within_time(session)
            return ending, await self._diff(ending)
        finally:
            session.close()
            await self._destroy()

    async def _within_time(self, session: Session) -> Ending:
        clock = asyncio.timeout(self._task.agent_timeout)
        try:
            async with clock:
                return await self._turns(session)
        except TimeoutError:
            if not clock.expired():
                raise
            return Ending(outcome=Outcome.AGENT_TIMEOUT, detail=f"over {self._task.agent_timeout} s")

    async def _turns(self, session: Session) -> Ending:
        renderer = self._world.renderer
        pending, malformed = renderer.initial(self._task), 0
        for turn in range(self._harness.max_turns):
            room = self._world.generator.context - session.length - len(pending)
            if room <= 0:
                return self._unfinished(Outcome.CONTEXT_FULL, malformed)
            generation = await self._generate(session, pending, turn=turn, room=room)
            if (cut := _cut(generation, room)) is not None:
                return Ending(outcome=cut, detail=f"turn {turn} was cut")
            parsed = renderer.parse(generation.tokens)
            texts, finished = await self._act(parsed)
            if finished:
                return _finish(generation, parsed)
            if (ending := self._failed(turn)) is not None:
                return ending
            malformed = malformed + 1 if parsed.error else 0
            if malformed >= self._harness.max_malformed:
                return Ending(outcome=Outcome.MALFORMED, detail=parsed.error)
            pending = self._answer(parsed, texts, closed=renderer.closed(generation.tokens))
        return self._unfinished(Outcome.MAX_TURNS, malformed)

    def _answer(self, parsed: Parsed, texts: Sequence[str], *, closed: bool) -> list[int]:
        """The next turn's given ids: results of calls, or the word about a turn without one."""
        renderer = self._world.renderer
        if not parsed.calls and self._harness.no_call_by_user:
            return renderer.reply(texts[0], closed=closed)
        return renderer.observation(texts, closed=closed)

    def _failed(self, turn: int) -> Ending | None:
        """An ending that the calls of a turn brought about, if any."""
        if self._oom:
            return Ending(outcome=Outcome.SANDBOX_OOM, detail=f"turn {turn} used up the sandbox's memory")
        if self._harness.detect_loops and (why := stuck_in_loop(self._steps)):
            return Ending(outcome=Outcome.STUCK_IN_LOOP, detail=why)
        return None

    def _unfinished(self, outcome: Outcome, malformed: int) -> Ending:
        """An episode whose last turn held no call ended for that reason, not for want of room."""
        return Ending(outcome=Outcome.MALFORMED if malformed else outcome, detail=f"ended as {outcome.value}")

    async def _generate(
        self, session: Session, pending: Sequence[int], *, turn: int, room: int
    ) -> Generation:
        attempt = self._attempt
        key = SampleKey(attempt.seed, self._task.instance_id, attempt.epoch, attempt.sample, turn)
        with self._timed("generation"):
            generation = await session.generate(
                pending,
                key=key,
                sampling=attempt.sampling,
                max_tokens=min(self._harness.turn_tokens, room),
                stop_ids=self._world.renderer.stop_ids,
            )
        self._transcript.give(pending, "tool" if turn else "prompt")
        self._transcript.sample(generation)
        return generation

    async def _act(self, parsed: Parsed) -> tuple[list[str], bool]:
        """Runs the calls in order up to a finish; returns what they printed, and whether one finished."""
        texts, said = [], parsed.content
        for call in parsed.calls:
            shown = await self._call(call)
            text = self._harness.clip(shown.text)
            texts.append(text)
            action = (said, call.name, repr(sorted(call.arguments.items())))
            self._steps.append(Step(action=action, observation=text, error=shown.error))
            self._oom, said = self._oom or shown.oom, ""
            if shown.finished or shown.oom:
                return texts, shown.finished
        if not texts:
            self._steps.append(Step(action=(said,)))
        return texts or [self._harness.no_call], False

    async def _call(self, call: Call) -> Observation:
        if call.error:
            return Observation(self._harness.bad_call, error=True)
        if call.name not in self._harness.tools:
            return failure(f"no tool {call.name}; tools: {', '.join(self._harness.tools)}")
        sandbox = await self._open()
        with self._timed("tools"):
            return await self._tools[call.name].run(sandbox, call.arguments)

    async def _open(self) -> Sandbox:
        """The sandbox, leased by the first call: an episode without calls needs none."""
        if self._sandbox is None:
            with self._timed("sandbox"):
                lease = self._world.concealer.lease(self._world.sandboxes, self._task)
                self._sandbox = await self._lease.enter_async_context(lease)
        return self._sandbox

    async def _diff(self, ending: Ending) -> Diff:
        if self._sandbox is None or not self._graded(ending):
            return Diff()
        with self._timed("sandbox"):
            return await self._sandbox.diff()

    async def _destroy(self) -> None:
        """Completes even if the episode is cancelled meanwhile."""
        with self._timed("sandbox"):
            await _to_the_end(self._lease.aclose())

    def _graded(self, ending: Ending) -> bool:
        """A clean finish, or another ending whose reward is "as graded" where no finish is required."""
        rule = self._world.rules[ending.outcome]
        as_graded = rule.trained and rule.reward is None
        return ending.finished or (as_graded and not self._harness.require_finish)

    async def _judge(self, ending: Ending, hidden: Hidden, diff: Diff) -> tuple[Outcome, float, str]:
        """(outcome, graded reward, detail); an ending without a finish keeps its own outcome."""
        if not self._graded(ending):
            return ending.outcome, 0.0, ending.detail
        try:
            with self._timed("grading"):
                verdict = await self._world.grader.grade(self._task, hidden, diff)
        except SandboxError as error:
            return Outcome.GRADER_ERROR, 0.0, str(error)
        outcome = VERDICTS[verdict.status]
        passed = outcome is Outcome.RESOLVED
        plain = passed or outcome is Outcome.UNRESOLVED
        return ending.outcome if plain and not ending.finished else outcome, float(passed), verdict.detail

    def _reward(self, outcome: Outcome, graded: float) -> float | None:
        rule = self._world.rules[outcome]
        if rule.reward is None:
            return graded if rule.trained else None
        return rule.reward

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - start


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Awaits `work` even while being cancelled, then lets the cancellation through."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled
    task.result()


def _cut(generation: Generation, room: int) -> Outcome | None:
    """Why a turn is incomplete for the engine's reasons; a turn that stopped by itself never is."""
    if generation.finish == "cancelled":
        return Outcome.CANCELLED
    full = generation.finish == "length" and len(generation.tokens) >= room
    return Outcome.CONTEXT_FULL if full or generation.finish == "context" else None


def _finish(generation: Generation, parsed: Parsed) -> Ending:
    """A finish counts only in a turn that is whole and well formed."""
    clean = generation.finish == "stop" and not any(call.error for call in parsed.calls)
    if clean:
        return Ending(outcome=Outcome.UNRESOLVED, finished=True)
    return Ending(outcome=Outcome.MALFORMED, detail="finish in an ill-formed turn")
