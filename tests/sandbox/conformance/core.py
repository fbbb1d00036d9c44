"""What every sandbox backend must do: cases that need only the standard library and `sandbox`.

pytest runs them in its own process (test_conformance.py); `python -m` this package runs them all as
whoever calls it, for example a plain user, and prints one JSON line per case.
"""

import asyncio
import itertools
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox.base import HOST, ExecResult, Image, Limits, Sandbox, SandboxProvider

FILES = {"a.py": b"x = 1\n", "pkg/b.py": b"y = 2\n"}
LIMITS = Limits(memory=256 << 20, pids=24, disk=8 << 20, output=4096)
ROOT = Path(__file__).resolve().parents[3]
_marks = itertools.count(os.getpid() * 1000)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend under test.

    `traits`: what it offers beyond the core, so which cases with `needs` apply.
    `traces()`: everything of ours on the machine besides processes, such as containers or directories.
    """

    name: str
    make: Callable[[], SandboxProvider]
    image: Image = HOST
    traits: frozenset[str] = frozenset()
    traces: Callable[[], set[str]] = set
    death: float = 2.0  # seconds after which a dead owner has left nothing


@dataclass
class Stage:
    """What a case works with: sandboxes of one provider, all destroyed when the case ends."""

    backend: Backend
    provider: SandboxProvider
    folder: Path  # scratch directory on the host

    async def create(
        self,
        files: Mapping[str, bytes] = FILES,
        *,
        limits: Limits = LIMITS,
        image: Image | None = None,
        provider: SandboxProvider | None = None,
    ) -> Sandbox:
        """A sandbox of the backend's image, or of `image`."""
        provider = provider or self.provider
        return await provider.create(files, limits, image=image or self.backend.image)

    def variant(self, **fields: object) -> Image:
        """The backend's image with some fields changed."""
        return replace(self.backend.image, **fields)  # type: ignore[arg-type]


Body = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """One case; `needs` names traits that the backend must have."""

    name: str
    body: Body
    needs: frozenset[str] = field(default_factory=frozenset)


CASES: dict[str, Case] = {}


def case(*needs: str) -> Callable[[Body], Body]:
    """Registers a case under its function's name."""

    def register(body: Body) -> Body:
        name = body.__name__  # type: ignore[attr-defined]
        assert name not in CASES, name
        CASES[name] = Case(name, body, frozenset(needs))
        return body

    return register


def cases_for(backend: Backend) -> list[Case]:
    """Those that apply."""
    return [item for item in CASES.values() if item.needs <= backend.traits]


def play(item: Case, backend: Backend) -> None:
    """Runs one case in an event loop of its own; raises what it raises."""

    async def session(folder: Path) -> None:
        provider = backend.make()
        try:
            await item.body(Stage(backend, provider, folder))
        finally:
            await provider.close()

    with tempfile.TemporaryDirectory() as folder:  # pytest's own is below one that only its user can read
        os.chmod(folder, 0o755)
        asyncio.run(session(Path(folder)))


def mark() -> str:
    """A number of seconds for `sleep` that no other process on the machine uses."""
    return f"7{next(_marks)}"


def processes(text: str) -> list[int]:
    """Processes of the machine, sandboxed ones too, that have `text` as an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


async def gone(text: str, within: float = 1.0) -> bool:
    """Whether no process has `text` as an argument, at the latest after `within` seconds."""
    deadline = asyncio.get_running_loop().time() + within
    while processes(text):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def appears(text: str, count: int = 1, within: float = 5.0) -> bool:
    """Whether `count` processes with that argument appear within some seconds."""
    deadline = asyncio.get_running_loop().time() + within
    while len(processes(text)) < count:
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def run(sandbox: Sandbox, command: str, timeout: float = 20) -> ExecResult:
    """A command that must not run out of time."""
    result = await sandbox.exec(command, timeout)
    assert not result.timed_out, (command, result)
    return result


async def say(sandbox: Sandbox, command: str) -> str:
    """Output of a command."""
    return (await run(sandbox, command)).output


@contextmanager
def raises(*kinds: type[BaseException]) -> Iterator[None]:
    """The block must raise one of `kinds`."""
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"expected {' or '.join(kind.__name__ for kind in kinds)}, nothing was raised")
