"""The sandbox protocol: what every backend offers, and the limits it enforces.

A sandbox is one isolated working copy in which untrusted commands run. Backends
(`namespace`, `docker`, `apptainer`) implement `Sandbox`; callers never see which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
class Sandbox(Protocol):
    """One isolated working copy. Every method raises `SandboxError` if the sandbox is gone."""

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
        """All changes of the working directory since creation, taken from the trusted side."""
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


@runtime_checkable
class SandboxProvider(Protocol):
    """Creates sandboxes of one backend."""

    async def create(self, files: Mapping[str, bytes], limits: Limits) -> Sandbox:
        """A fresh sandbox whose working directory holds `files` (path → content)."""
        ...

    async def close(self) -> None:
        """Destroys every sandbox that is still alive."""
        ...
