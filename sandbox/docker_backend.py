"""Sandboxes in containers of a Docker-compatible engine (dockerd or podman) behind its socket.

A sandbox is a container without network, capabilities or a writable root, under an unprivileged uid, and
a memory-backed volume that is its working copy. The engine enforces memory (swap included), cpu, number of
processes and its default seccomp filter; the sizes of the volume, of /tmp and of /dev/shm enforce `disk`,
each on its own. What the image has in the working directory, and `Image.source`, are copied into the volume
and belong to the unprivileged uid; they do not count against `disk`.

When a command runs out of time, or ends the shell, a new container takes over the volume and the old one
is removed with every process: shell state and what was written outside of the working directory are lost.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.base import HOST, Diff, Image, Limits, SandboxError, Terminal
from sandbox.bubblewrap import UNPRIVILEGED_UID
from sandbox.containers.archive import TreeWriter, base_of, entries
from sandbox.containers.engine import Engine, get_tree, reap, remove
from sandbox.containers.owner import LABEL, Sentinel, new_owner
from sandbox.containers.programs import Programs
from sandbox.containers.settings import SHELL, container, volume_options
from sandbox.containers.streams import FramedStream, StreamTerminal
from sandbox.held import HeldSandbox
from sandbox.living import Living
from sandbox.shell import Shell
from sandbox.snapshots import Snapshot, changes

if TYPE_CHECKING:
    from docker import APIClient

_START_TIMEOUT = 60.0  # seconds until a shell answers; it takes a tenth of one unless the machine is drowning
_BASES = 8  # working copies of images kept ready for the next sandbox
_SLACK = 256 << 10  # bytes of a volume for directories
_PAGE = 4096
_Base = tuple[str | None, Path | None, str]  # name, source and working directory of an image
_OOM_COUNT = """for f in /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events; do
while read -r key value; do [ "$key" = oom_kill ] && echo "$value"; done 2>/dev/null < $f; done"""


class DockerSandbox(HeldSandbox):
    """One sandbox; made by `DockerProvider.create`."""

    def __init__(self, provider: "DockerProvider", limits: Limits, image: Image) -> None:
        super().__init__(limits, provider.living)
        self._provider, self._image = provider, image
        self._volume = f"jaxrl-{secrets.token_hex(8)}"
        self._container, self._exec = "", ""
        self._stream: FramedStream | None = None
        self._known = Snapshot()
        self._oom_kills = 0
        self._terminals: list[StreamTerminal] = []

    async def terminal(self) -> Terminal:
        """See `Sandbox.terminal`."""
        async with self._lock:
            await self._settle()
            terminal = await self._programs().terminal()
            self._terminals.append(terminal)
            return terminal

    async def _begin(self, files: Mapping[str, bytes]) -> Shell:
        base, known = await self._provider.base(self._image)
        self._known = known.copy()
        size = self._limits.disk + _SLACK + known.size + _PAGE * (len(known.files) + len(known.links))
        await self._provider.ask(
            lambda client: client.create_volume(
                self._volume, "local", volume_options(size), self._provider.labels
            )
        )
        self._container = await self._start_container()
        for content in (base, self._packed(files)):
            await self._unpack(content)
        self._known.add(files)
        return await self._attach()

    async def _start_container(self) -> str:
        return await self._provider.ask(self._create_and_start)

    def _create_and_start(self, client: "APIClient") -> str:
        settings = container(
            client,
            self._image,
            self._limits,
            volume=self._volume,
            runtime=self._provider.runtime,
            local=self._provider.local,
        )
        made = client.create_container(**settings, labels=self._provider.labels)["Id"]
        try:
            client.start(made)
        except BaseException:
            remove(client, made)
            raise
        return made

    async def _attach(self) -> Shell:
        """Starts the held shell of the current container."""
        self._exec, connection = await self._programs().launch([SHELL])
        with connection:
            self._stream = FramedStream(connection)
        shell = Shell(self._stream)
        greeting = await shell.start(_START_TIMEOUT)
        if greeting.exit_code != 0:
            raise SandboxError(f"{self._image.name}: {SHELL} does not answer: {greeting.output.strip()}")
        self._oom_kills = 0
        return shell

    async def _replace(self) -> tuple[Shell, int]:
        old, old_exec, old_stream = self._container, self._exec, self._stream
        self._container = await self._start_container()  # it holds the volume while the old one ends
        # An engine may wait for the reader of a stream before it lets a container end.
        if old_stream is not None:
            old_stream.close()
        await self._abandon_terminals()
        status = await self._provider.ask(lambda client: _end(client, old, old_exec))
        return await self._attach(), status

    async def _kill(self) -> None:
        await self._abandon_terminals()
        if self._stream is not None and self._usable:  # nobody reads
            self._stream.close()
        if self._container:
            try:
                await self._provider.ask(lambda client: client.kill(self._container))
            except SandboxError:
                pass  # it ended already, or its removal says what is wrong

    async def _remove(self) -> None:
        await self._abandon_terminals()
        if self._stream is not None:
            self._stream.close()
        await self._provider.ask(lambda client: remove(client, self._container, volume=self._volume))

    async def _put(self, files: Mapping[str, bytes]) -> None:
        await self._unpack(self._packed(files))
        self._known.add(files)

    async def _get(self, path: str) -> bytes:
        return await self._programs().read(path, self._limits.disk + self._known.size)

    async def _set(self, path: str, content: bytes) -> None:
        await self._programs().write(path, content, self._limits.disk)

    async def _diff(self) -> Diff:
        return await self._provider.ask(self._read_changes)

    def _read_changes(self, client: "APIClient") -> Diff:
        chunks = get_tree(client, self._container, self._image.workdir)
        if chunks is None:
            raise SandboxError(f"the working directory {self._image.workdir} is gone")
        return changes(entries(chunks), self._known, self._limits.disk)

    async def _ran_out_of_memory(self, shell: Shell | None) -> bool:
        if shell is None:  # it ended or hangs: the engine may know
            state = await self._provider.ask(lambda client: client.inspect_container(self._container))
            return bool(state["State"].get("OOMKilled"))
        before, self._oom_kills = self._oom_kills, await self._count(shell, _OOM_COUNT)
        return self._oom_kills > before

    async def _unpack(self, content: bytes) -> None:
        place = self._image.workdir
        await self._provider.ask(lambda client: client.put_archive(self._container, place, content))

    def _packed(self, files: Mapping[str, bytes]) -> bytes:
        writer = TreeWriter(UNPRIVILEGED_UID)
        for path, content in files.items():
            writer.file(path.removeprefix(self._image.workdir + "/"), content)
        return writer.content()

    def _programs(self) -> Programs:
        return Programs(self._provider.engine, self._container, self._image)

    async def _abandon_terminals(self) -> None:
        terminals, self._terminals = self._terminals, []
        await asyncio.gather(*(terminal.abandon() for terminal in terminals))


def _end(client: "APIClient", old: str, old_exec: str) -> int:
    """Ends a container; the exit status of the shell in it."""
    status = client.exec_inspect(old_exec)["ExitCode"]
    remove(client, old)
    return status if status is not None else 137


class DockerProvider:
    """Creates sandboxes in one engine; belongs to the event loop of its first use.

    `address`: unix:// or tcp:// (None: DOCKER_HOST, else Docker's usual socket). `runtime`: one that the
    engine knows, for example runc or runsc (None: its default).
    """

    def __init__(self, *, address: str | None = None, runtime: str | None = None) -> None:
        self.engine, self.runtime = Engine(address), runtime
        self.local = self.engine.address.startswith("unix://")
        owner = new_owner()
        self.labels = {LABEL: owner}
        self._owner = owner
        self._sentinel: Sentinel | None = None
        self.living: Living[DockerSandbox] = Living()
        self._bases: dict[_Base, asyncio.Task[tuple[bytes, Snapshot]]] = {}

    async def create(
        self, files: Mapping[str, bytes], limits: Limits, *, image: Image = HOST
    ) -> DockerSandbox:
        """See `SandboxProvider.create`; `image.name` must name an image in the engine's store."""
        if image.name is None or image.root is not None:
            raise SandboxError(
                "the docker backend runs images of the engine's store: set Image.name and no root "
                "(a directory or archive becomes one by `docker import`)"
            )
        if self._sentinel is None:
            self._sentinel = Sentinel(self.engine.address, self._owner)
        return await self.living.start(DockerSandbox(self, limits, image), files)

    async def reap(self) -> int:
        """Removes containers of owners that died without a sentinel; how many. Raises `SandboxError`."""
        return await self.ask(reap)

    async def close(self) -> None:
        """See `SandboxProvider.close`. The provider can be used again afterwards."""
        await self.living.destroy()
        if self._sentinel is not None:
            await asyncio.to_thread(self._sentinel.dismiss)
            self._sentinel = None
        await asyncio.to_thread(self.engine.close)

    async def ask[T](self, work: "Callable[[APIClient], T]") -> T:
        """Does blocking work with the engine's API, in a thread. Raises `SandboxError` if it refuses."""
        return await self.engine.run(work)

    async def base(self, image: Image) -> tuple[bytes, Snapshot]:
        """The working copy of `image` before a caller's files, as a tar; kept for the next sandbox."""
        key = image.name, image.source, image.workdir
        if key not in self._bases:
            while len(self._bases) >= _BASES:
                self._bases.pop(next(iter(self._bases)))
            self._bases[key] = asyncio.ensure_future(self.ask(lambda client: self._make_base(client, image)))
        try:
            return await asyncio.shield(self._bases[key])
        except SandboxError:
            self._bases.pop(key, None)
            raise

    def _make_base(self, client: "APIClient", image: Image) -> tuple[bytes, Snapshot]:
        """Reads the image's own working directory from a container that never starts."""
        probe = client.create_container(image.name, [SHELL], labels=self.labels)["Id"]
        try:
            tree = get_tree(client, probe, image.workdir)
            return base_of(tree, image.source, UNPRIVILEGED_UID)
        finally:
            remove(client, probe)
