"""A bash on a terminal whose prompts are data: exit code, directory and interpreter of each command.

Commands are typed as an encoded text that the shell reads and evaluates: whatever bytes they hold,
the terminal takes them for text, and lines that a program might swallow never lie before it. A
prompt is a frame of control characters around a nonce. The nonce is a variable of the shell and not
of its environment, so a program that prints a frame cannot know it; only a command that asks the
shell itself for it could forge the prompts of its own session.
"""

import asyncio
import re
import secrets
from dataclasses import dataclass

from sandbox.agent_tools.screen import Screen
from sandbox.base import Sandbox, SandboxError, Terminal

_START_TIMEOUT = 20.0  # seconds; a start takes milliseconds unless the machine is drowning
_CHUNK = 1000  # bytes typed in a line; a terminal takes at most 4095
_FRAME = rb"\x1e%s\x1f(\d+)\x1f(\d+)\x1f([^\x1f]*)\x1f([^\x1e]*)\x1e\r?\n"
_LONGEST_FRAME = 16_384

# Width and height are fixed, colours and pagers off, hashes of strings fixed: equal runs print the same.
_ENVIRONMENT = (
    "TERM=dumb PAGER=cat GIT_PAGER=cat MANPAGER=cat PYTHONHASHSEED=0 HISTFILE= PS1= PS2= PROMPT_COMMAND="
)
_EXEC = f"exec env {_ENVIRONMENT} bash --norc --noprofile --noediting -i\n"
# The terminal's echo is off while we type and on while a command runs, so that typed input is seen.
# Statuses pass through, so that `$?` means the agent's last command. A command that resets
# PROMPT_COMMAND does not cut us off: it is set anew after each.
_SETUP = r"""stty -echo cols 80 rows 24; set +o history +H; unset HISTFILE
export -n PS1 PS2 PROMPT_COMMAND; _agent_nonce={nonce} _agent_number=0
_agent_frame() {{ printf '\036%s\037%s\037%s\037%s\037%s\036\n' \
"$_agent_nonce" "$_agent_number" "$@" "$PWD"; }}
_agent_prompt() {{ local status=$?; PS1= PS2=; stty sane -echo
_agent_frame "$status" "$(type -P python || type -P python3)"; }}
_agent_read() {{ local status=$? line text=; _agent_number=$1
while IFS= read -r line && [ "$line" != . ]; do text+=$line; done
printf -v _agent_command %b "$text"; stty echo; return $status; }}
_agent_keep() {{ local status=$?; PROMPT_COMMAND=_agent_prompt; return $status; }}
trap '_agent_frame "$?" exit' EXIT
PROMPT_COMMAND=_agent_prompt
"""
# The number tells the prompt after a command from a late one, such as that of a C-c at the prompt.
_RUN = '_agent_read {number}; eval "$_agent_command"; _agent_keep\n'


@dataclass(frozen=True)
class Prompt:
    """What the shell says when it waits for a command."""

    exit_code: int  # of the command before
    workdir: str
    python: str  # path of the interpreter that `python`, else `python3`, starts; "" if none


class ShellEnded(Exception):  # noqa: N818 - not an error of ours: the agent ended its shell
    """The shell is gone. `exit_code` is None where it could not say one."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the shell ended with exit code {exit_code}")
        self.exit_code = exit_code


class BashShell:
    """One shell. What it prints goes to `screen`; `prompt` is None while a command runs."""

    def __init__(self, terminal: Terminal) -> None:
        self.screen = Screen()
        self.prompt: Prompt | None = None
        self._terminal = terminal
        self._nonce = secrets.token_hex(8)
        self._frame = re.compile(_FRAME % self._nonce.encode())
        self._held = b""
        self._number = 0  # of the last command
        self._ended: int | None = None

    @classmethod
    async def open(cls, sandbox: Sandbox) -> "BashShell":
        """A shell that waits for its first command. Raises `SandboxError` if there is no bash."""
        terminal = await sandbox.terminal()
        shell = cls(terminal)
        await terminal.send(_EXEC.encode() + _SETUP.format(nonce=shell._nonce).encode())
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                while shell.prompt is None:
                    await shell.wait(_START_TIMEOUT)
        except (TimeoutError, ShellEnded) as error:
            said = shell.screen.text().strip()[-200:]
            raise SandboxError(
                f"expected a bash in the sandbox, got no prompt (last output {said!r}): use an image with "
                "bash and coreutils"
            ) from error
        shell.screen.clear()
        return shell

    async def run(self, command: str) -> None:
        """Starts `command`; `wait` until there is a `prompt` again. Raises `ShellEnded`."""
        encoded = _encode(command)
        lines = [encoded[start : start + _CHUNK] for start in range(0, len(encoded), _CHUNK)]
        self.prompt, self._number = None, self._number + 1
        typed = _RUN.format(number=self._number).encode()
        await self.type(typed + b"".join(line + b"\n" for line in lines) + b".\n")

    async def type(self, data: bytes) -> None:
        """Types `data` as a user would. Raises `ShellEnded`."""
        try:
            await self._terminal.send(data)
        except SandboxError as error:
            raise ShellEnded(self._ended) from error

    async def wait(self, timeout: float) -> bool:
        """Takes output that comes within `timeout` seconds: whether any came. Raises `ShellEnded`."""
        try:
            data = await self._terminal.receive(timeout)
        except SandboxError as error:
            raise ShellEnded(self._ended) from error
        if data:
            self._take(data)
        return bool(data)

    def _take(self, data: bytes) -> None:
        data = self._held + data
        while match := self._frame.search(data):
            self.screen.feed(data[: match.start()])
            data = data[match.end() :]
            self._meet(match)
        cut = data.rfind(b"\x1e")  # a frame may be split between two reads
        whole = cut < 0 or len(data) - cut > _LONGEST_FRAME
        self._held = b"" if whole else data[cut:]
        self.screen.feed(data if whole else data[:cut])

    def _meet(self, frame: re.Match[bytes]) -> None:
        number, code = int(frame[1]), int(frame[2])
        python, workdir = (frame[part].decode(errors="replace") for part in (3, 4))
        if python == "exit":
            self._ended = code
        elif number == self._number:
            self.prompt = Prompt(code, workdir, python)


def _encode(command: str) -> bytes:
    """`command` in escapes of `printf %b`, so that a terminal takes every byte of it for text."""
    data = command.encode(errors="replace")
    return b"".join(_SAFE.get(byte) or b"\\0%03o" % byte for byte in data)


_SAFE = {byte: bytes([byte]) for byte in range(0x20, 0x7F) if byte not in b"\\"}
