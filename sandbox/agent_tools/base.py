"""What a tool is: a name, its parameters, and an effect in a sandbox."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sandbox.base import Sandbox
from sandbox.tasks.schema import TaskSpec


@dataclass(frozen=True)
class Observation:
    """What the agent sees of a tool call. `finished` ends the episode.

    `oom` means that the sandbox ran out of memory, which ends the episode too.
    """

    text: str
    finished: bool = False
    error: bool = False
    oom: bool = False


class Tool(Protocol):
    """One tool of a harness. Mistakes of the model are error observations, never exceptions."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Sequence[str]:
        """Every argument it takes, in order."""
        ...

    @property
    def required(self) -> Sequence[str]: ...

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """Raises `SandboxError` only if the sandbox itself failed."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A tool that remembers: what a harness lists of it is where each episode gets its own from."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Sequence[str]: ...

    @property
    def required(self) -> Sequence[str]: ...

    def open(self, task: TaskSpec) -> Tool:
        """The tool of one episode, with a state of its own."""
        ...


def for_episode(tools: Mapping[str, Tool | Stateful], task: TaskSpec) -> Mapping[str, Tool]:
    """The tools of one episode: those that remember start anew."""
    return {name: tool.open(task) if isinstance(tool, Stateful) else tool for name, tool in tools.items()}


def failure(text: str) -> Observation:
    """An error observation."""
    return Observation(f"error: {text}", error=True)


def check(tool: Tool, arguments: Mapping[str, str]) -> Observation | None:
    """The error observation for missing or unexpected arguments, None if there are none."""
    if missing := [name for name in tool.required if name not in arguments]:
        return failure(f"missing argument {', '.join(missing)}")
    if unexpected := [name for name in arguments if name not in tool.parameters]:
        allowed = ", ".join(tool.parameters) or "none"
        return failure(f"unexpected argument {', '.join(unexpected)}; allowed: {allowed}")
    return None


async def run_tool(
    tools: Mapping[str, Tool], name: str, *, sandbox: Sandbox, arguments: Mapping[str, str]
) -> Observation:
    """Runs the tool called `name`; an unknown name is an error observation."""
    tool = tools.get(name)
    if tool is None:
        return failure(f"unknown tool {name}; tools: {', '.join(tools)}")
    return check(tool, arguments) or await tool.run(sandbox, arguments)
