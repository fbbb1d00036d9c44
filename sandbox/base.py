"""The sandbox protocol: what every backend offers, and the limits it enforces.

A sandbox is one isolated working copy in which untrusted commands run. Backends
(`namespace`, `docker`, `apptainer`) implement `Sandbox`; callers never see which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resources of one sandbox. `None` means that the backend's own maximum holds."""

    cpu: float = 1.0  # cores
    memory: int = 512 << 20  # bytes, whole sandbox
    pids: int = 64
    disk: int = 64 << 20  # bytes of written files
    wall: float = 1800.0  # seconds from creation to forced destruction
    output: int = 1 << 20  # bytes kept of one command's output
    network: bool = False


@dataclass(frozen=True, kw_only=True)
class Image:
    """What a sandbox is made from. Sandboxes share it and never write to it.

    `root` None means the host's own /usr and interpreter, read-only; `name` is what a container
    engine calls its image, for the backends that have one. `layers` (absolute path inside → host
    directory) are shown read-only, for example a locked environment at /opt/env. The working
    directory starts with the content of `source` and is writable. What the covered paths name (absolute,
    inside, not in the working directory; it exists) is shown empty and cannot be written.
    """

    root: Path | None = None  # a directory, squashfs file or SIF file that holds a whole root
    name: str | None = None
    layers: Mapping[str, Path] = field(default_factory=dict)
    source: Path | None = None
    workdir: str = "/testbed"
    python: str | None = None  # interpreter of the project, inside; None: the backend's own
    environment: Mapping[str, str] = field(default_factory=dict)  # of every command
    covered_folders: tuple[str, ...] = ()
    covered_files: tuple[str, ...] = ()


HOST = Image()


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """What a finished command left.

    `exit_code` is the shell's (128 + signal when killed, -1 when `timed_out`);
    `output` is stdout and stderr interleaved, decoded as UTF-8 with replacement.
    """

    exit_code: int
    output: str
    timed_out: bool = False
    oom: bool = False


class SandboxError(RuntimeError):
    """The sandbox itself failed (not the command in it): an infrastructure fault."""


@runtime_checkable
class Terminal(Protocol):
    """A second shell (bash where there is one) on a pseudo terminal, beside the one of `exec`."""

    async def send(self, data: bytes) -> None:
        """Types `data`; b"\\x03" interrupts as a keyboard would. Raises `SandboxError` if it ended."""
        ...

    async def receive(self, timeout: float) -> bytes:
        """Next output, b"" if none came in `timeout` seconds. Raises `SandboxError` after its end."""
        ...

    async def close(self) -> None:
        """Ends the shell and what runs in it. Idempotent."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """One isolated working copy. Every method raises `SandboxError` if the sandbox is gone."""

    async def adopt(self, files: Mapping[str, bytes]) -> None:
        """Writes `files` into the working directory; `diff` will not count them as changes."""
        ...

    async def exec(self, command: str, timeout: float) -> ExecResult:
        """Runs `command` in the persistent shell, in the working directory."""
        ...

    async def read(self, path: str) -> bytes:
        """Content of a regular file. Raises `FileNotFoundError`, `IsADirectoryError`."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Creates or replaces a file (parents are created)."""
        ...

    async def diff(self) -> "Diff":
        """All changes of the working directory since creation, taken from the trusted side.

        A tree that cannot be a patch gives a `RejectedDiff`.
        """
        ...

    async def terminal(self) -> Terminal:
        """A new interactive shell in the working directory. It ends with the sandbox."""
        ...

    async def destroy(self) -> None:
        """Kills every process and removes every trace. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Changed files relative to the working directory: new content, or None for a deleted file."""

    files: Mapping[str, bytes | None] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.files


@dataclass(frozen=True, kw_only=True)
class RejectedDiff(Diff):
    """A working copy that cannot be a patch: it holds links, special or unreadable files, or too much.

    `files` is empty; graders answer "tampering" with `reason`.
    """

    reason: str

    @property
    def empty(self) -> bool:
        """Never: something was changed."""
        return False


@runtime_checkable
class SandboxProvider(Protocol):
    """Creates sandboxes of one backend."""

    async def create(self, files: Mapping[str, bytes], limits: Limits, *, image: Image = HOST) -> Sandbox:
        """A fresh sandbox of `image` whose working directory also holds `files` (path → content).

        Raises `SandboxError`, saying what to do, if the backend cannot run that image.
        """
        ...

    async def close(self) -> None:
        """Destroys every sandbox that is still alive."""
        ...
