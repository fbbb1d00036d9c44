"""A scripted engine, a sandbox in memory, tools and a grader: everything around the turn loop."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.contracts import Finish, Generation, SampleKey, Sampling
from jaxrl.rollout.agent import Attempt, World
from jaxrl.rollout.calls import render_call
from jaxrl.rollout.harness import COMPACT, Harness
from jaxrl.rollout.renderer import Renderer
from jaxrl.rollout.tokenizer import Tokenizer
from sandbox.agent_tools.base import Observation
from sandbox.base import Diff, ExecResult, Image, Limits, SandboxError, Terminal
from sandbox.tasks.generated.generate import instances

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "configs/quickstart/tokenizer.json")
INSTANCE = instances("train", 8, 1)[0]
END = "<|im_end|>"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode_markup(text)


def view() -> str:
    return render_call("view", {"path": "app.py"}) + END


def edit(new: str, old: str = INSTANCE.repair.wrong) -> str:
    return render_call("str_replace", {"path": "app.py", "old_str": old, "new_str": new}) + END


FINISH = render_call("finish", {}) + END
SOLVE = (view(), edit(INSTANCE.repair.right), FINISH)


@dataclass
class FakeSession:
    engine: "FakeGenerator"
    context: list[int] = field(default_factory=list)
    closed: bool = False

    @property
    def length(self) -> int:
        return len(self.context)

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        key: SampleKey,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> Generation:
        assert not self.closed and max_tokens > 0
        assert self.length + len(tokens) + max_tokens <= self.engine.context
        self.engine.keys.append(key)
        self.engine.active += 1
        self.engine.peak = max(self.engine.peak, self.engine.active)
        try:
            await self.engine.wait(key)
        finally:
            self.engine.active -= 1
        script = self.engine.script(key)
        if isinstance(script, Exception):
            raise script
        wanted = ids(script) if isinstance(script, str) else script
        made = wanted[:max_tokens]
        self.context += [*tokens, *made]
        stopped = bool(made) and made[-1] in stop_ids
        return Generation(
            tokens=made,
            logprobs=[-0.5 - each / 1024 for each in made],
            full_logprobs=[-0.75 - each / 1024 for each in made],
            versions=[3 + key.turn] * len(made),
            finish="stop" if stopped else self.engine.unstopped,
        )

    def close(self) -> None:
        self.closed = True


class FakeGenerator:
    """Answers turn by turn from a script: texts per sample, or one script for all."""

    unstopped: Finish

    def __init__(self, *scripts, context=512, delay=0.0, unstopped: Any = "length"):
        self.scripts, self.context, self.delay, self.unstopped = scripts, context, delay, unstopped
        self.sessions: list[FakeSession] = []
        self.keys: list[SampleKey] = []
        self.active = self.peak = 0

    def open_session(self) -> FakeSession:
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]

    def script(self, key: SampleKey):
        return self.scripts[key.sample % len(self.scripts)][key.turn]

    async def wait(self, key: SampleKey) -> None:
        await asyncio.sleep(self.delay)


@dataclass
class FakeSandbox:
    provider: "FakeProvider"
    files: dict[str, bytes]
    start: Mapping[str, bytes]
    gone: bool = False

    async def adopt(self, files: Mapping[str, bytes]) -> None:
        raise NotImplementedError

    async def exec(self, command: str, timeout: float) -> ExecResult:
        raise NotImplementedError

    async def terminal(self) -> Terminal:
        raise NotImplementedError

    async def read(self, path: str) -> bytes:
        self.provider.fail("read")
        assert not self.gone
        return self.files[path]

    async def write(self, path: str, content: bytes) -> None:
        self.files[path] = content

    async def diff(self) -> Diff:
        self.provider.fail("diff")
        assert not self.gone
        return Diff(files={path: text for path, text in self.files.items() if self.start.get(path) != text})

    async def destroy(self) -> None:
        await asyncio.sleep(0.01)
        self.gone = True


class FakeProvider:
    """Leases sandboxes in memory; `faults` lists the operations that fail, each once."""

    def __init__(self, *faults: str):
        self.faults, self.made = list(faults), []

    @property
    def alive(self) -> int:
        return sum(not each.gone for each in self.made)

    def fail(self, operation: str) -> None:
        if operation in self.faults:
            self.faults.remove(operation)
            raise SandboxError(f"{operation} failed")

    async def create(self, files: Mapping[str, bytes], limits: Limits) -> FakeSandbox:
        self.fail("create")
        self.made.append(FakeSandbox(self, dict(files), dict(files)))
        return self.made[-1]

    @asynccontextmanager
    async def lease(self, files: Mapping[str, bytes], *, image: Image | None = None):
        sandbox = await self.create(files, Limits())
        try:
            yield sandbox
        finally:
            await sandbox.destroy()


class FakeTool:
    def __init__(self, name: str, *parameters: str):
        self.name, self.parameters, self.required = name, parameters, parameters


class ViewTool(FakeTool):
    async def run(self, sandbox, arguments) -> Observation:
        return Observation((await sandbox.read(arguments["path"])).decode())


class ReplaceTool(FakeTool):
    async def run(self, sandbox, arguments) -> Observation:
        text = (await sandbox.read(arguments["path"])).decode()
        matches = text.count(arguments["old_str"])
        if matches != 1:
            return Observation(f"error: {matches} matches", error=True)
        await sandbox.write("app.py", text.replace(arguments["old_str"], arguments["new_str"]).encode())
        return Observation("ok")


class FinishTool(FakeTool):
    async def run(self, sandbox, arguments) -> Observation:
        return Observation("", finished=True)


@dataclass(frozen=True)
class Judged:
    status: str
    detail: str = "judged"


class FakeGrader:
    """Resolved for exactly the reference; `verdicts` are given first, an exception is raised."""

    def __init__(self, provider: FakeProvider, *verdicts):
        self.provider, self.verdicts, self.diffs = provider, list(verdicts), []

    async def grade(self, task, hidden, diff: Diff) -> Judged:
        assert self.provider.alive == 0 or len(self.provider.made) > 1, "the sandbox must be gone first"
        self.diffs.append(diff)
        if self.verdicts:
            verdict = self.verdicts.pop(0)
            if isinstance(verdict, Exception):
                raise verdict
            return Judged(verdict)
        wanted = {path: text.encode() for path, text in hidden.reference.items()}
        return Judged("resolved" if diff.files == wanted else "unresolved")


def world(generator, *, provider=None, verdicts=(), harness: Harness = COMPACT, **fields) -> Any:
    provider = provider or FakeProvider()
    return World(
        generator=generator,
        sandboxes=provider,
        grader=FakeGrader(provider, *verdicts),
        tools={
            "view": ViewTool("view", "path"),
            "str_replace": ReplaceTool("str_replace", "path", "old_str", "new_str"),
            "finish": FinishTool("finish"),
        },
        renderer=Renderer(TOKENIZER, harness),
        **fields,
    )


ATTEMPT = Attempt(seed=7, epoch=2, sample=0, sampling=Sampling())
