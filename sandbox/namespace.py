"""The default backend: sandboxes made of Linux namespaces by bubblewrap, without daemon or root.

A sandbox is one shell as the first process of its own user, pid, mount, network, IPC and UTS
namespaces, over a read-only root. Its working copy is a tmpfs that exists only in its mount
namespace: nothing of a sandbox lies on the host, so nothing is left when its processes end.

When a command runs out of time, or ends the shell, every process of the sandbox is killed and it is
rebuilt around the same files: shell state (directory, variables, background jobs) and what was
written outside of the working directory are lost, the working copy is kept.
"""

import asyncio
import dataclasses
import itertools
import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox.base import HOST, Diff, ExecResult, Image, Limits, RejectedDiff, SandboxError
from sandbox.bubblewrap import WHY_NOT, arguments, find_shell, keeper_config, locate, rlimits
from sandbox.diffs import compare
from sandbox.keeper.client import KeeperClient
from sandbox.keeper.files import read_tree
from sandbox.keeper.wire import join_files, split_files
from sandbox.pipes import Pipes
from sandbox.shell import Finished, Shell
from sandbox.view import check

_WORDS_TIMEOUT = 2.0  # seconds for what a program that failed to start has to say
_START_TIMEOUT = 30.0  # seconds; a start takes milliseconds unless the machine is drowning


@dataclass
class Launched:
    """A program running as the first process of a new sandbox."""

    keeper: KeeperClient
    identity: int
    pid: int
    pipes: Pipes

    async def request(self, op: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Asks the keeper to do something with this sandbox."""
        return await self.keeper.call({"op": op, "sandbox": self.identity, **fields}, payload=payload)

    async def kill(self) -> int | None:
        """Ends every process; the working copy stays readable. Returns the exit status."""
        return (await self.request("kill"))[0]["status"]

    async def destroy(self) -> None:
        """Ends every process and forgets the sandbox. Idempotent; the pipes stay open."""
        await self.request("destroy")


@dataclass
class _Saved:
    files: dict[str, bytes]
    links: dict[str, str] = field(default_factory=dict)


class NamespaceSandbox:
    """One sandbox; made by `NamespaceProvider.create`."""

    def __init__(self, provider: "NamespaceProvider", limits: Limits, image: Image) -> None:
        self._provider, self._limits, self._image = provider, limits, image
        self._lock = asyncio.Lock()
        self._baseline: dict[str, bytes] = {}
        self._launched: Launched | None = None
        self._shell: Shell | None = None
        self._usable = False  # the shell waits for a command
        self._ending: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def adopt(self, files: Mapping[str, bytes]) -> None:
        """Writes `files` into the working directory and makes them the state that `diff` compares with."""
        async with self._lock:
            await self._put(files)
            self._baseline |= files

    async def exec(self, command: str, timeout: float) -> ExecResult:
        """See `Sandbox.exec`. `exit N` ends the shell: its state is lost, the files are kept."""
        async with self._lock:
            shell = await self._ready_shell()
            self._usable = False
            finished = await shell.run(command, timeout, limit=self._limits.output)
            self._usable = finished.exit_code is not None
            return await self._result(finished)

    async def read(self, path: str) -> bytes:
        """See `Sandbox.read`. Raises `OSError` for what is no regular file, or is too large."""
        launched = self._alive()
        return (await launched.request("get", path=self._absolute(path), limit=self._limits.disk))[1]

    async def write(self, path: str, content: bytes) -> None:
        """See `Sandbox.write`. Raises `OSError`, for example when the disk limit is reached."""
        async with self._lock:
            await self._put({path: content})

    async def diff(self) -> Diff:
        """See `Sandbox.diff`. A tree with links or special files gives a `RejectedDiff`."""
        async with self._lock:
            header, payload = await self._tree(self._alive())
        if header["problem"]:
            return RejectedDiff(reason=header["problem"])
        return compare(self._baseline, split_files(header["files"], payload))

    async def destroy(self) -> None:
        """See `Sandbox.destroy`. Completes even if the caller is cancelled."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def start(self, files: Mapping[str, bytes]) -> None:
        """Starts the sandbox with `files`. Called once, by the provider."""
        self._baseline = {**copy_of(self._image), **files}
        await self._build(_Saved(self._baseline))
        self._alarm = asyncio.get_running_loop().call_later(self._limits.wall, self._expire)

    async def _result(self, finished: Finished) -> ExecResult:
        if finished.exit_code is not None:
            return ExecResult(exit_code=finished.exit_code, output=finished.output)
        status = await self._rebuild()
        code = -1 if finished.timed_out else status
        return ExecResult(exit_code=code, output=finished.output, timed_out=finished.timed_out)

    async def _ready_shell(self) -> Shell:
        self._alive()
        if not self._usable:  # an earlier command was cancelled in the middle
            await self._rebuild()
        assert self._shell is not None
        return self._shell

    async def _rebuild(self) -> int:
        """Kills everything and starts again around the same files. Returns the shell's exit status."""
        launched = self._alive()
        status = await launched.kill()
        header, payload = await self._tree(launched)
        saved = _Saved(split_files(header["files"], payload), header["links"])
        await launched.destroy()
        launched.pipes.close()
        self._alive()
        await self._build(saved)
        return 128 - status if status is not None and status < 0 else status or 0

    async def _build(self, saved: _Saved) -> None:
        program = [find_shell() if self._image.root is None else "/bin/sh"]
        image = dataclasses.replace(self._image, source=None)
        launched = self._launched = await self._provider.launch(
            program, self._limits, scratch=True, image=image
        )
        self._shell = Shell(launched.pipes)
        greeting = await self._shell.start(_START_TIMEOUT)
        if greeting.exit_code != 0:
            raise SandboxError(WHY_NOT.format(reason=greeting.output.strip() or "no answer"))
        try:
            await self._enter(launched, saved)
        except OSError as error:  # a fault of the host, or more files than the disk limit
            raise SandboxError(f"the sandbox cannot take its first files: {error}") from error
        self._usable = True

    async def _tree(self, launched: Launched) -> tuple[dict[str, Any], bytes]:
        try:
            return await launched.request("tree", limit=self._limits.disk)
        except OSError as error:
            raise SandboxError(f"the working copy cannot be read: {error}") from error

    async def _enter(self, launched: Launched, saved: _Saved) -> None:
        sizes, payload = join_files({self._absolute(path): data for path, data in saved.files.items()})
        links = {self._absolute(path): target for path, target in saved.links.items()}
        workdir = self._image.workdir
        await launched.request("enter", payload, pid=launched.pid, workdir=workdir, files=sizes, links=links)

    async def _put(self, files: Mapping[str, bytes]) -> None:
        sizes, payload = join_files({self._absolute(path): data for path, data in files.items()})
        await self._alive().request("put", payload, files=sizes)

    def _absolute(self, path: str) -> str:
        if not path or "\0" in path:
            raise FileNotFoundError(2, "No such file or directory", path)
        return posixpath.join(self._image.workdir, path)

    def _alive(self) -> Launched:
        if self._ending is not None or self._launched is None:
            raise SandboxError("the sandbox was destroyed; create a new one")
        return self._launched

    def _expire(self) -> None:
        self._ending = self._ending or asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._provider.forget(self)
        if self._launched is None:
            return
        try:
            await self._launched.kill()
            async with self._lock:  # the end of its output has woken whoever still reads
                await self._launched.destroy()
        finally:
            self._launched.pipes.close()


class NamespaceProvider:
    """Creates namespace sandboxes; belongs to the event loop of its first use.

    As root, sandboxes run under an unprivileged uid. Raises `SandboxError` where bubblewrap cannot
    run, saying what to enable: nothing ever runs without isolation.
    """

    def __init__(self) -> None:
        self.workdir = HOST.workdir
        self._layout = locate()
        self.python = self._layout.python
        self._keeper: KeeperClient | None = None
        self._ids = itertools.count()
        self._sandboxes: set[NamespaceSandbox] = set()

    async def create(
        self, files: Mapping[str, bytes], limits: Limits, *, image: Image = HOST
    ) -> NamespaceSandbox:
        """See `SandboxProvider.create`."""
        sandbox = NamespaceSandbox(self, limits, image)
        self._sandboxes.add(sandbox)
        try:
            await sandbox.start(files)
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    async def launch(
        self, program: Sequence[str], limits: Limits, *, scratch: bool, image: Image = HOST
    ) -> Launched:
        """Starts `program` in a sandbox of its own; `scratch` gives it a writable /tmp.

        The caller destroys what it gets, then closes the pipes.
        """
        starting = asyncio.ensure_future(self._launch(program, limits, scratch, image))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A start takes milliseconds: let it end, so that there is a whole sandbox to destroy.
            await asyncio.wait([starting])
            if starting.exception() is None:
                await starting.result().destroy()
                starting.result().pipes.close()
            raise

    async def _launch(self, program: Sequence[str], limits: Limits, scratch: bool, image: Image) -> Launched:
        keeper, identity = self._start_keeper(), next(self._ids)
        argv = arguments(program, image=image, python=self.python, limits=limits, scratch=scratch)
        header = {"op": "spawn", "sandbox": identity, "argv": argv, "rlimits": rlimits(limits)}
        theirs_in, ours_in, ours_out, theirs_out = _two_pipes()
        launched = Launched(keeper, identity, 0, Pipes(ours_in, ours_out))
        try:
            launched.pid = (await keeper.call(header, fds=(theirs_in, theirs_out)))[0]["pid"]
        except BaseException as error:
            reason = await _abandon(launched, (theirs_in, theirs_out))
            if isinstance(error, SandboxError | OSError):
                raise SandboxError(WHY_NOT.format(reason=reason or error)) from error
            raise
        os.close(theirs_in)
        os.close(theirs_out)
        if image.source is not None:
            await self._fill(launched, image)
        return launched

    async def _fill(self, launched: Launched, image: Image) -> None:
        files = {posixpath.join(image.workdir, path): data for path, data in copy_of(image).items()}
        sizes, payload = join_files(files)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                while not await _entered(launched, image.workdir, sizes, payload):
                    await asyncio.sleep(0.002)
        except BaseException as error:
            await launched.destroy()
            launched.pipes.close()
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox cannot take {image.source}: {error}") from error
            raise

    def forget(self, sandbox: NamespaceSandbox) -> None:
        """Called by a sandbox that ends."""
        self._sandboxes.discard(sandbox)

    async def close(self) -> None:
        """See `SandboxProvider.close`. The provider can be used again afterwards."""
        await asyncio.gather(*(sandbox.destroy() for sandbox in list(self._sandboxes)))
        if self._keeper is not None:
            await self._keeper.close()
            self._keeper = None

    def _start_keeper(self) -> KeeperClient:
        if self._keeper is None:
            self._keeper = KeeperClient(keeper_config(self._layout))
        return self._keeper


async def _entered(launched: Launched, workdir: str, sizes: list[tuple[str, int]], payload: bytes) -> bool:
    """Whether the working directory was there already, and took the files."""
    try:
        await launched.request("enter", payload, pid=launched.pid, workdir=workdir, files=sizes)
    except FileNotFoundError:
        return False
    return True


def copy_of(image: Image) -> dict[str, bytes]:
    """Files of the image's source, or of the working directory in its root."""
    check(image)
    top = image.source
    if top is None and image.root is not None:
        top = image.root / image.workdir.lstrip("/")
    if top is None or not top.is_dir():
        return {}
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        tree = read_tree(fd, 1 << 30)
    finally:
        os.close(fd)
    if tree.problem:
        raise SandboxError(f"image source {top}: {tree.problem}")
    return tree.files


def _two_pipes() -> tuple[int, int, int, int]:
    """(read, write, read, write). Raises `SandboxError` where the process has no descriptors left."""
    made: list[int] = []
    try:
        for _ in range(2):
            made += os.pipe()
    except OSError as error:
        for fd in made:
            os.close(fd)
        raise SandboxError(f"no pipe to a sandbox: {error}; raise the limit of open files") from error
    return made[0], made[1], made[2], made[3]


async def _abandon(launched: Launched, fds: Sequence[int]) -> str:
    """Undoes a start that failed or was cancelled; returns what the program said."""
    for fd in fds:
        os.close(fd)
    try:
        await asyncio.shield(asyncio.ensure_future(launched.destroy()))
        async with asyncio.timeout(_WORDS_TIMEOUT):
            return (await launched.pipes.read()).decode(errors="replace").strip()
    except (SandboxError, OSError):  # of which TimeoutError is one
        return ""
    finally:
        launched.pipes.close()
