"""Sandboxes by the command line of Apptainer (or Singularity), for clusters that offer nothing else.

A sandbox is one `apptainer exec` that holds a shell; its working copy is a directory of the host, bound into
it. It runs as the calling user, who must not be root. Apptainer's own flags give process, mount and (unless
`isolate_network` is False, as the benchmark's reference runs it) network namespaces. Memory, number of
processes and disk use are watched from outside once a second and ended when they are exceeded: a burst
shorter than that goes unnoticed, `cpu` is not enforced, and each terminal is a container of its own which
shares the working copy alone. A file is at most `Limits.disk` bytes. `read` and `write` reach the working
directory only.

This backend was tested against a stand-in that checks every flag, not against Apptainer itself.
"""

import asyncio
import errno
import os
import posixpath
import pty
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sandbox.base import HOST, Diff, Image, Limits, SandboxError, Terminal
from sandbox.containers.archive import inside
from sandbox.containers.folder import Folder
from sandbox.containers.owner import is_dead, new_owner
from sandbox.containers.streams import StreamTerminal
from sandbox.containers.supervised import Running, supervise
from sandbox.held import HeldSandbox
from sandbox.living import Living
from sandbox.pipes import Pipes
from sandbox.shell import Shell
from sandbox.snapshots import Snapshot, changes

PREFIX = "jaxrl-apptainer-"
_START_TIMEOUT = 120.0  # seconds; a container of a large image over a network file system takes its time
_OWNER = "owner"  # file beside the working copy
_EMPTY, _NOTHING = "empty", "nothing"  # folder and file beside it, shown where something is covered
_SHELL = "/bin/sh"
_OWN_PROCESSES = 8  # Apptainer's own helpers
_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")
_TERMINAL = "command -v bash >/dev/null && exec bash --noprofile --norc -i; exec sh -i"


class ApptainerSandbox(HeldSandbox):
    """One sandbox; made by `ApptainerProvider.create`."""

    def __init__(self, provider: "ApptainerProvider", limits: Limits, image: Image) -> None:
        super().__init__(limits, provider.living)
        self._provider, self._image = provider, image
        self._top = Path(tempfile.mkdtemp(prefix=PREFIX, dir=provider.folder))
        (self._top / _OWNER).write_text(provider.owner)
        (self._top / "work").mkdir()
        (self._top / _EMPTY).mkdir()
        (self._top / _NOTHING).touch()
        self._folder = Folder(self._top / "work")
        self._running: Running | None = None
        self._pipes: Pipes | None = None
        self._terminals: list[tuple[StreamTerminal, Running]] = []
        self._known = Snapshot()

    async def terminal(self) -> Terminal:
        """See `Sandbox.terminal`."""
        async with self._lock:
            await self._settle()
            master, slave = pty.openpty()
            try:
                running = self._launch([_SHELL, "-c", _TERMINAL], slave, slave, tty=True)
            finally:
                os.close(slave)
            stream = Pipes(master, os.dup(master))

            terminal = StreamTerminal(stream, running.dismiss)
            self._terminals.append((terminal, running))
            return terminal

    async def _begin(self, files: Mapping[str, bytes]) -> Shell:
        if self._image.source is not None:
            self._known = await asyncio.to_thread(self._folder.fill, self._image.source)
        await self._put(files)
        return await self._attach()

    async def _attach(self) -> Shell:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        try:
            self._running = self._launch([_SHELL], theirs_in, theirs_out, tty=False)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
            self._pipes = Pipes(ours_in, ours_out)
        shell = Shell(self._pipes)
        greeting = await shell.start(_START_TIMEOUT)
        if greeting.exit_code != 0:
            raise SandboxError(f"apptainer gave no shell: {greeting.output.strip() or 'no answer'}")
        return shell

    def _launch(self, program: Sequence[str], stdin: int, stdout: int, *, tty: bool) -> Running:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        config = {
            "command": self._provider.arguments(self._image, self._limits, self._folder.path, program),
            "control": theirs.fileno(),
            "folder": str(self._top),
            "work": str(self._folder.path),
            "memory": self._limits.memory,
            "pids": self._limits.pids + _OWN_PROCESSES,
            "disk": self._limits.disk + self._known.size,
            "file_size": self._limits.disk,
            "tty": tty,
        }
        with theirs:
            return supervise(config, ours, stdin, stdout, self._provider.environment)

    async def _replace(self) -> tuple[Shell, int]:
        assert self._running is not None
        old, old_pipes = self._running, self._pipes
        await self._end_terminals()
        status = (await old.kill())["status"]
        try:
            return await self._attach(), 128 - status if status < 0 else status
        finally:  # the old supervisor still minds the directory while there is no new one
            await old.dismiss()
            if old_pipes is not None:
                old_pipes.close()

    async def _kill(self) -> None:
        await self._end_terminals()
        if self._running is not None:
            await self._running.kill()

    async def _remove(self) -> None:
        self._folder.close()
        await self._end_terminals()
        if self._running is not None:
            await self._running.dismiss()
        if self._pipes is not None:
            self._pipes.close()
        await asyncio.to_thread(_remove_tree, self._top)

    async def _put(self, files: Mapping[str, bytes]) -> None:
        relative = {self._inside(path): content for path, content in files.items()}
        if sum(map(len, files.values())) > self._limits.disk:
            raise SandboxError(f"the first files have more than {self._limits.disk} bytes: No space left")
        try:
            await asyncio.to_thread(self._folder.write, relative)
        except OSError as error:
            raise SandboxError(f"the sandbox cannot take its first files: {error}") from error
        self._known.add(relative)

    async def _get(self, path: str) -> bytes:
        limit = self._limits.disk + self._known.size
        return await asyncio.to_thread(self._folder.read, self._inside(path), limit)

    async def _set(self, path: str, content: bytes) -> None:
        if len(content) > self._limits.disk:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        await asyncio.to_thread(self._folder.write, {self._inside(path): content})

    async def _diff(self) -> Diff:
        return await asyncio.to_thread(
            lambda: changes(self._folder.entries(), self._known, self._limits.disk)
        )

    async def _ran_out_of_memory(self, shell: Shell | None) -> bool:
        if shell is not None or self._running is None:
            return False  # only the end of everything is ever done for memory
        return (await self._running.kill())["reason"] == "memory"

    async def _end_terminals(self) -> None:
        terminals, self._terminals = self._terminals, []
        for terminal, running in terminals:
            await terminal.abandon()
            if running.process.returncode is None:
                await running.dismiss()

    def _inside(self, path: str) -> str:
        """Relative to the working directory; what lies elsewhere is out of reach."""
        normal = posixpath.relpath(posixpath.join(self._image.workdir, path), self._image.workdir)
        return normal if normal == "." else inside(normal)


def _remove_tree(path: Path) -> None:
    """Also directories that their owner made unreadable."""
    for folder, _, _ in os.walk(path):
        with suppress(OSError):
            os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)


class ApptainerProvider:
    """Creates sandboxes with Apptainer's command line; belongs to the event loop of its first use.

    `command`: the program (None: apptainer, else singularity, from PATH). `folder`: where working copies
    lie (None: the system's temporary directory). Raises `SandboxError` where the program is missing, or
    for root: a container of root's has root's power over the host's devices.
    """

    def __init__(
        self, *, command: str | None = None, folder: Path | None = None, isolate_network: bool = True
    ) -> None:
        found = command or shutil.which("apptainer") or shutil.which("singularity")
        if found is None:
            raise SandboxError(
                "the apptainer backend needs `apptainer` or `singularity` on PATH: install it or load its "
                "module; without it the namespace backend runs the same SIF images"
            )
        if os.geteuid() == 0:
            raise SandboxError("the apptainer backend does not run as root; start it as a plain user")
        self._command, self._isolate_network = found, isolate_network
        self.folder, self.owner = folder or Path(tempfile.gettempdir()), new_owner()
        self.environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self.living: Living[ApptainerSandbox] = Living()

    async def create(
        self, files: Mapping[str, bytes], limits: Limits, *, image: Image = HOST
    ) -> ApptainerSandbox:
        """See `SandboxProvider.create`; the image is `Image.root`, or a `name` that Apptainer can run."""
        if image.root is None and image.name is None:
            raise SandboxError(
                "the apptainer backend runs images only: set Image.root to a SIF file or a directory"
            )
        return await self.living.start(ApptainerSandbox(self, limits, image), files)

    def arguments(self, image: Image, limits: Limits, work: Path, program: Sequence[str]) -> list[str]:
        """The command line of one container."""
        network = self._isolate_network and not limits.network
        common = {"HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"}
        values = common | dict(image.environment)
        return [
            *(self._command, "exec", "--writable-tmpfs", "--cleanenv", "--pid"),
            *("--no-mount", "home,tmp,bind-paths"),
            *(("--net", "--network", "none") if network else ()),
            *(part for key, value in values.items() for part in ("--env", f"{key}={value}")),
            *("--mount", f"type=bind,src={work},dst={image.workdir}"),
            *(
                part
                for target, source in image.layers.items()
                for part in ("--mount", f"type=bind,src={source},dst={target},ro")
            ),
            *(
                part
                for kind, paths in ((_EMPTY, image.covered_folders), (_NOTHING, image.covered_files))
                for path in paths
                for part in ("--mount", f"type=bind,src={work.with_name(kind)},dst={path},ro")
            ),
            *("--pwd", image.workdir, str(image.root or image.name)),
            *program,
        ]

    async def reap(self) -> int:
        """Removes directories of owners that died together with their supervisors; how many."""
        left = [path for path in self.folder.glob(f"{PREFIX}*") if _abandoned(path)]
        for path in left:
            await asyncio.to_thread(_remove_tree, path)
        return len(left)

    async def close(self) -> None:
        """See `SandboxProvider.close`. The provider can be used again afterwards."""
        await self.living.destroy()


def _abandoned(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid() and is_dead((path / _OWNER).read_text())
    except OSError:  # it is being made or removed
        return False
