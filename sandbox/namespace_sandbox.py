"""One sandbox of the namespace backend: a persistent shell around a working copy."""

import asyncio
import posixpath
from collections.abc import Mapping, Sequence
from typing import Protocol

from sandbox.base import Diff, ExecResult, Image, Limits, RejectedDiff, SandboxError
from sandbox.bubblewrap import WHY_NOT, find_shell
from sandbox.diffs import compare
from sandbox.keeper.wire import join_files, split_files
from sandbox.launched import Launched, whole
from sandbox.living import Living
from sandbox.shell import Finished, Shell
from sandbox.terminal import NamespaceTerminal

_INTERACTIVE = (("/bin/bash", "--norc", "--noprofile"), ("/bin/sh",))
_START_TIMEOUT = 30.0  # seconds; a start takes milliseconds unless the machine is drowning


class Launcher(Protocol):
    """What a sandbox needs of its provider."""

    living: "Living[NamespaceSandbox]"

    async def launch(
        self,
        program: Sequence[str],
        limits: Limits,
        *,
        scratch: bool,
        image: Image,
        files: Mapping[str, bytes],
        strict: bool,
    ) -> Launched: ...


class NamespaceSandbox:
    """One sandbox; made by `NamespaceProvider.create`."""

    def __init__(self, provider: Launcher, limits: Limits, image: Image) -> None:
        self._provider, self._limits, self._image = provider, limits, image
        self._lock = asyncio.Lock()
        self._baseline: dict[str, bytes] = {}
        self._launched: Launched | None = None
        self._shell: Shell | None = None
        self._terminals: list[NamespaceTerminal] = []
        self._usable = False  # the shell waits for a command
        self._ending: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def adopt(self, files: Mapping[str, bytes]) -> None:
        """See `Sandbox.adopt`."""
        async with self._lock:
            await self._put(files)
            self._baseline |= relative(files, self._image.workdir)

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
        """See `Sandbox.diff`. A tree with new links or special files gives a `RejectedDiff`."""
        async with self._lock:
            known, limit = list(self._baseline), self._limits.disk
            header, payload = await self._alive().request("changes", known=known, limit=limit)
        if header["problem"]:
            return RejectedDiff(reason=header["problem"])
        return compare(self._baseline, split_files(header["files"], payload), header["deleted"])

    async def terminal(self) -> NamespaceTerminal:
        """See `Sandbox.terminal`. It ends, too, when a command is out of time or ends the shell."""
        launched = self._alive()
        try:
            header, _ = await launched.request(
                "terminal",
                commands=_INTERACTIVE,
                environment=launched.environment,
                rlimits=launched.header["rlimits"],
            )
        except OSError as error:
            raise SandboxError(f"no terminal: {error}") from error
        terminal = NamespaceTerminal(header["fd"], header["pid"], launched)
        self._terminals.append(terminal)
        return terminal

    async def destroy(self) -> None:
        """See `Sandbox.destroy`. Completes even if the caller is cancelled."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def start(self, files: Mapping[str, bytes]) -> None:
        """Starts the sandbox with `files`. Called once, by the provider."""
        self._baseline = relative(files, self._image.workdir)
        program = [find_shell() if self._image.root is None else "/bin/sh"]
        self._launched = await self._provider.launch(
            program, self._limits, scratch=True, image=self._image, files=self._baseline, strict=False
        )
        await self._greet(self._launched)
        self._alarm = asyncio.get_running_loop().call_later(self._limits.wall, self._expire)

    async def _result(self, finished: Finished) -> ExecResult:
        code, oom = finished.exit_code, self._alive().oom()
        if code is None:
            status = await whole(self._rebuild())
            code = -1 if finished.timed_out else status
        return ExecResult(exit_code=code, output=finished.output, timed_out=finished.timed_out, oom=oom)

    async def _ready_shell(self) -> Shell:
        self._alive()
        if not self._usable:  # an earlier command was cancelled in the middle
            await whole(self._rebuild())
        assert self._shell is not None
        return self._shell

    async def _rebuild(self) -> int:
        """Kills everything and starts again around the same files. Returns the shell's exit status."""
        launched = self._alive()
        status = await launched.kill()
        self._alive()
        try:
            await launched.spawn()
        except OSError as error:
            raise SandboxError(f"the sandbox cannot start again: {error}") from error
        await self._greet(launched)
        return 128 - status if status is not None and status < 0 else status or 0

    async def _greet(self, launched: Launched) -> None:
        self._shell = Shell(launched.pipes)
        greeting = await self._shell.start(_START_TIMEOUT)
        if greeting.exit_code != 0:
            raise SandboxError(WHY_NOT.format(reason=greeting.output.strip() or "no answer"))
        self._usable = True

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
        try:
            if self._launched is not None:
                await self._end_launched(self._launched)
        finally:
            self._provider.living.forget(self)

    async def _end_launched(self, launched: Launched) -> None:
        try:
            await launched.kill()
            async with self._lock:  # the end of its output has woken whoever still reads
                await launched.destroy()
        finally:
            launched.pipes.close()
            for terminal in self._terminals:
                terminal.abandon()


def relative(files: Mapping[str, bytes], workdir: str) -> dict[str, bytes]:
    """`files` by their paths in the working directory. Raises `SandboxError` for one that is outside."""
    result = {}
    for path, content in files.items():
        absolute = posixpath.normpath(posixpath.join(workdir, path))
        if not absolute.startswith(workdir + "/") or "\0" in path:
            raise SandboxError(f"files: expected paths inside {workdir}, got {path!r}")
        result[absolute[len(workdir) + 1 :]] = content
    return result
