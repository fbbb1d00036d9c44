"""Tools of the `compact` harness: short names, short texts, for small contexts."""

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.agent_tools.base import Observation, Tool, check, failure
from sandbox.base import Sandbox

_MAX_VIEW = 16_000  # characters


@dataclass(frozen=True)
class View:
    """Prints a file, as it is or with line numbers."""

    numbered: bool = False
    name: str = "view"
    parameters: tuple[str, ...] = ("path",)
    required: tuple[str, ...] = ("path",)

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """See `Tool.run`."""
        if wrong := check(self, arguments):
            return wrong
        text = await _read_text(sandbox, arguments["path"])
        if isinstance(text, Observation):
            return text
        if self.numbered:
            text = "".join(f"{n:6}\t{line}\n" for n, line in enumerate(text.splitlines(), 1))
        return Observation(_clip(text))


@dataclass(frozen=True)
class StrReplace:
    """Replaces the only occurrence of a text in a file."""

    name: str = "str_replace"
    parameters: tuple[str, ...] = ("path", "old_str", "new_str")
    required: tuple[str, ...] = ("path", "old_str", "new_str")

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """See `Tool.run`."""
        if wrong := check(self, arguments):
            return wrong
        path, old, new = (arguments[name] for name in self.parameters)
        text = await _read_text(sandbox, path)
        if isinstance(text, Observation):
            return text
        if not old:
            return failure("old_str is empty")
        if (matches := text.count(old)) != 1:
            return failure(f"{matches} matches")
        return await _write_text(sandbox, path, text.replace(old, new))


@dataclass(frozen=True)
class Finish:
    """Ends the episode."""

    name: str = "finish"
    parameters: tuple[str, ...] = ()
    required: tuple[str, ...] = ()

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """See `Tool.run`."""
        return check(self, arguments) or Observation("", finished=True)


@dataclass(frozen=True)
class ExecuteBash:
    """Runs a command in the sandbox's shell for at most `timeout` seconds."""

    timeout: float = 10.0
    name: str = "execute_bash"
    parameters: tuple[str, ...] = ("command",)
    required: tuple[str, ...] = ("command",)

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """See `Tool.run`."""
        if wrong := check(self, arguments):
            return wrong
        command = arguments["command"]
        if not command.strip() or "\0" in command:
            return failure("command is empty or holds a NUL")
        result = await sandbox.exec(command, self.timeout)
        if result.timed_out:
            return Observation(f"{_clip(result.output)}\nerror: timed out", error=True)
        note = f"\nexit code {result.exit_code}" if result.exit_code else ""
        return Observation(_clip(result.output) + note)


def compact_tools(*, numbered: bool = False) -> Mapping[str, Tool]:
    """The harness's tools by name; `numbered` makes `view` number its lines."""
    tools: tuple[Tool, ...] = (View(numbered=numbered), StrReplace(), Finish())
    return {tool.name: tool for tool in tools}


async def _read_text(sandbox: Sandbox, path: str) -> str | Observation:
    try:
        return (await sandbox.read(path)).decode()
    except FileNotFoundError:
        return failure("no such file")
    except IsADirectoryError:
        return failure("is a directory")
    except UnicodeError:
        return failure("not a text file")
    except (OSError, ValueError):
        return failure("cannot read")


async def _write_text(sandbox: Sandbox, path: str, text: str) -> Observation:
    try:
        await sandbox.write(path, text.encode())
    except (OSError, ValueError):
        return failure("cannot write")
    return Observation("ok")


def _clip(text: str) -> str:
    if len(text) <= _MAX_VIEW:
        return text
    half = _MAX_VIEW // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
