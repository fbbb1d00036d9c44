"""What a tool is: a name, its parameters, and an effect in a sandbox."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sandbox.base import Sandbox


@dataclass(frozen=True)
class Observation:
    """What the agent sees of a tool call. `finished` ends the episode."""

    text: str
    finished: bool = False
    error: bool = False


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
