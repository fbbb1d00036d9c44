"""`execute_bash`: a bash that the agent shares with nobody, and whose programs it can talk to."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sandbox.agent_tools.arguments import BadArgumentError, flag, seconds
from sandbox.agent_tools.base import Observation, check, failure
from sandbox.agent_tools.bash_shell import BashShell, ShellEnded
from sandbox.agent_tools.commands import split_commands
from sandbox.agent_tools.normalise import Normaliser
from sandbox.base import Sandbox
from sandbox.tasks.schema import TaskSpec

MAX_OUTPUT = 30_000  # characters of one observation
_KEY = re.compile(r"C-([@-_a-z])")
_LONGEST_INPUT = 4095  # bytes of a line; a terminal loses what is longer
_SETTLE = 0.01  # seconds for output that is already there
_PROBE_TIMEOUT = 30.0  # seconds; an answer takes a millisecond unless the machine is drowning
_HINT = (
    "an empty command waits for more output; with is_input, a text or a key (C-c, C-d, C-z) goes to "
    "the running program; `timeout` waits longer from the start"
)
Why = Literal["ended", "silent", "late"]


@dataclass(frozen=True, kw_only=True)
class ExecuteBash:
    """The tool with its settings; each episode opens one of its own.

    Without a `timeout` argument a command is left running after `soft_timeout` seconds without new
    output. A task's `command_timeout` bounds every call. `normalise` hides what differs between
    equal runs.
    """

    soft_timeout: float = 30.0
    normalise: bool = True
    name: str = "execute_bash"
    parameters: tuple[str, ...] = ("command", "is_input", "timeout", "security_risk")
    required: tuple[str, ...] = ("command",)

    def open(self, task: TaskSpec) -> "BashTool":
        """The tool of one episode."""
        return BashTool(self, task.command_timeout)


class BashTool:
    """`execute_bash` of one episode: a shell that lives from its first command on."""

    def __init__(self, settings: ExecuteBash, longest: float) -> None:
        self._settings, self._longest = settings, longest
        self._normaliser = Normaliser() if settings.normalise else None
        self._shell: BashShell | None = None
        self._shown = ""  # what the agent saw of the running command

    @property
    def name(self) -> str:
        """See `Tool.name`."""
        return self._settings.name

    @property
    def parameters(self) -> tuple[str, ...]:
        """See `Tool.parameters`."""
        return self._settings.parameters

    @property
    def required(self) -> tuple[str, ...]:
        """See `Tool.required`."""
        return self._settings.required

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """See `Tool.run`."""
        if wrong := check(self, arguments):
            return wrong
        try:
            is_input, timeout = flag(arguments, "is_input"), seconds(arguments, "timeout")
        except BadArgumentError as error:
            return failure(str(error))
        command = arguments["command"].strip()
        if "\0" in command:
            return failure("command: expected a text without NUL")
        shell = self._shell = self._shell or await BashShell.open(sandbox)
        try:
            return await self._handle(shell, command, is_input=is_input, timeout=timeout, sandbox=sandbox)
        except ShellEnded as ended:
            return await self._replace(sandbox, shell, ended)

    async def _handle(
        self, shell: BashShell, command: str, *, is_input: bool, timeout: float | None, sandbox: Sandbox
    ) -> Observation:
        if was_running := shell.prompt is None:
            await shell.wait(_SETTLE)
        if was_running and (is_input or not command):
            return await self._continue(shell, command, timeout=timeout, sandbox=sandbox)
        if shell.prompt is None:
            return self._refused(shell, command)
        key = _KEY.fullmatch(command)
        if not command or is_input or (key and command != "C-c"):
            return failure(f"no command is running that could {'take input' if command else 'print more'}")
        if not key and len(parts := split_commands(command)) > 1:
            return _several(parts)
        self._shown = ""
        await (self._press(shell, command) if key else shell.run(self._real(command)))
        return await self._await(shell, command, timeout=timeout, sandbox=sandbox)

    async def _continue(
        self, shell: BashShell, command: str, *, timeout: float | None, sandbox: Sandbox
    ) -> Observation:
        """Waits on for the running command, after typing `command` where there is one."""
        note = ""
        if shell.prompt is not None:
            note = "[it had ended before the input could reach it]\n" if command else ""
        elif _KEY.fullmatch(command):
            await self._press(shell, command)
        elif command:
            line = self._real(command).encode(errors="replace") + b"\n"
            if max(map(len, line.split(b"\n"))) > _LONGEST_INPUT:
                return failure(f"input: expected lines of at most {_LONGEST_INPUT} bytes")
            await shell.type(line)
        prefix = f"[more output of the running command]\n{note}"
        return await self._await(shell, command, timeout=timeout, sandbox=sandbox, prefix=prefix)

    async def _press(self, shell: BashShell, key: str) -> None:
        shell.prompt = None
        await shell.type(bytes([ord(key[-1].upper()) & 0x1F]))

    async def _await(
        self,
        shell: BashShell,
        command: str,
        *,
        timeout: float | None,
        sandbox: Sandbox,
        prefix: str = "",
    ) -> Observation:
        """The observation of a command that ends, or is left running."""
        limit = min(timeout or self._longest, self._longest)
        why = await self._wait(shell, limit, soft=None if timeout else self._settings.soft_timeout)
        output = prefix + self._output(shell)
        if why == "ended":
            return await self._ended(shell, command, output, sandbox)
        waited = f"no new output for {self._settings.soft_timeout:g} s" if why == "silent" else f"{limit:g} s"
        return Observation(f"{output}\n[still running after {waited}: {_HINT}]\n[exit code: -1]")

    async def _wait(self, shell: BashShell, limit: float, *, soft: float | None) -> Why:
        """Takes output until the prompt, `limit` seconds, or `soft` seconds without any."""
        now = asyncio.get_running_loop().time
        end, changed = now() + limit, now()
        while shell.prompt is None:
            quiet = end if soft is None else changed + soft
            if now() >= min(end, quiet):
                return "late" if end <= quiet else "silent"
            if await shell.wait(max(min(end, quiet) - now(), 0.001)):
                changed = now()
        return "ended"

    async def _ended(self, shell: BashShell, command: str, output: str, sandbox: Sandbox) -> Observation:
        prompt = shell.prompt
        assert prompt is not None
        by = f" after {command}" if _KEY.fullmatch(command) else ""
        self._shown = ""
        shell.screen.clear()
        text = (
            f"{output}\n[ended{by}]\n[directory: {self._clean(prompt.workdir)}]\n"
            f"[python: {prompt.python or 'none'}]\n[exit code: {prompt.exit_code}]"
        )
        return Observation(text, oom=await _out_of_memory(sandbox))

    async def _replace(self, sandbox: Sandbox, shell: BashShell, ended: ShellEnded) -> Observation:
        """A fresh shell after the agent ended its own. Raises `SandboxError` if the sandbox is gone."""
        output = self._output(shell)
        self._shell, self._shown = await BashShell.open(sandbox), ""
        prompt = self._shell.prompt
        assert prompt is not None
        code = "unknown" if ended.exit_code is None else ended.exit_code
        text = (
            f"{output}\n[the shell itself ended; a new one waits in {prompt.workdir}, without the variables "
            f"and background jobs of the old]\n[exit code: {code}]"
        )
        return Observation(text, oom=await _out_of_memory(sandbox))

    def _refused(self, shell: BashShell, command: str) -> Observation:
        output = self._output(shell)
        return failure(
            f"the command was not run, since an earlier one is still running: {command}\n"
            f"[output of the running command]\n{output}\n[{_HINT}]"
        )

    def _output(self, shell: BashShell) -> str:
        """What is new since the agent last looked."""
        whole = shell.screen.text()
        new, self._shown = whole.removeprefix(self._shown), whole
        return clip(self._clean(new.strip("\n")))

    def _clean(self, text: str) -> str:
        return self._normaliser.clean(text) if self._normaliser else text

    def _real(self, command: str) -> str:
        return self._normaliser.restore(command) if self._normaliser else command


async def _out_of_memory(sandbox: Sandbox) -> bool:
    """Asks the sandbox, which reports with its next command what was killed for memory since the last."""
    return (await sandbox.exec(":", _PROBE_TIMEOUT)).oom


def _several(parts: list[str]) -> Observation:
    listed = "\n".join(f"({number}) {part}" for number, part in enumerate(parts, 1))
    how = "join them by && or ;, or send one at a time"
    return failure(f"expected one command, got {len(parts)}; {how}:\n{listed}")


def clip(text: str) -> str:
    """`text` within `MAX_OUTPUT` characters, the middle cut out."""
    if len(text) <= MAX_OUTPUT:
        return text
    half = MAX_OUTPUT // 2
    return f"{text[:half]}\n[the middle of the output is left out]\n{text[-half:]}"
