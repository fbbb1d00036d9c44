"""The default backend: sandboxes made of Linux namespaces by bubblewrap, without daemon or root.

A sandbox is one shell as the first process of its own user, pid, mount, network, IPC and UTS
namespaces, over a read-only root. Its working copy is a tmpfs, over the image's tree where there is
one, that exists only in mount namespaces: nothing of a sandbox lies on the host, so nothing is left
when its processes end.

When a command runs out of time, or ends the shell, every process of the sandbox is killed and it is
rebuilt around the same working copy: shell state (directory, variables, background jobs), terminals
and what was written outside of the working directory are lost.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sandbox.archives import show
from sandbox.base import HOST, Image, Limits, SandboxError
from sandbox.bubblewrap import SCRATCH, WHY_NOT, arguments, group_limits, keeper_config, locate, rlimits
from sandbox.keeper.client import KeeperClient
from sandbox.keeper.wire import join_files
from sandbox.launched import Launched, no_pipes, whole
from sandbox.living import Living
from sandbox.namespace_sandbox import NamespaceSandbox, relative
from sandbox.shares import Share, Shares
from sandbox.view import View, check, environment

__all__ = ["Launched", "NamespaceProvider", "NamespaceSandbox"]


class NamespaceProvider:
    """Creates namespace sandboxes; belongs to the event loop of its first use.

    As root, sandboxes run under an unprivileged uid, and images may lie where only root can read.
    Raises `SandboxError` where bubblewrap cannot run, saying what to enable: nothing ever runs
    without isolation.

    Memory, processes and processor time of a sandbox are limited by control groups of version 2 or 1,
    where this process may make some and `cgroups` is true. Otherwise memory is watched ten times a
    second, processes are limited by rlimits, and processor time only in total. `limits_by` says which.
    Where memory is watched, programs must do without memory that could be hidden from the watch:
    anonymous memory shared between processes (files in /dev/shm do the same), memfd_create and
    System V objects; sockets beyond 64 count as full ones. The kernel's own memory for other things,
    such as pipes and file locks, is limited by its own settings only.
    """

    def __init__(self, *, cgroups: bool = True) -> None:
        self.workdir = HOST.workdir
        self.limits_by = ""  # what enforces memory and processes; known after the first start
        self._cgroups = cgroups
        self._layout = locate()
        self.python = self._layout.python
        self._keeper: KeeperClient | None = None
        self._shares: Shares | None = None
        self._ids = itertools.count()
        self.living: Living[NamespaceSandbox] = Living()

    async def create(
        self, files: Mapping[str, bytes], limits: Limits, *, image: Image = HOST
    ) -> NamespaceSandbox:
        """See `SandboxProvider.create`."""
        return await self.living.start(NamespaceSandbox(self, limits, image), files)

    async def launch(
        self,
        program: Sequence[str],
        limits: Limits,
        *,
        scratch: bool,
        image: Image = HOST,
        files: Mapping[str, bytes] | None = None,
        strict: bool = True,
    ) -> Launched:
        """Starts `program` in a sandbox of its own; `scratch` gives it a writable /tmp.

        The working directory holds the image's tree and `files`. `strict` also refuses what could
        outlive a process (System V shared memory) or look into another (ptrace). The caller destroys
        what it gets, then closes the pipes.
        """
        kind = "strict" if strict else "usual"
        starting = asyncio.ensure_future(self._launch(program, limits, scratch, image, files or {}, kind))
        try:
            return await whole(starting)
        except asyncio.CancelledError:
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().destroy()
                starting.result().pipes.close()
            raise

    async def _launch(
        self,
        program: Sequence[str],
        limits: Limits,
        scratch: bool,
        image: Image,
        files: Mapping[str, bytes],
        kind: str,
    ) -> Launched:
        check(image)
        keeper, shares = self._start_keeper()
        taken: list[Share] = []
        launched = Launched(keeper, next(self._ids), {}, no_pipes(), lambda: _give_back(shares, taken))
        try:
            bwrap = await self._take(self._layout.packages, taken, owned=False)
            view = await self._view(image, taken)
            argv = arguments(program, view=view, python=self.python, limits=limits)
            sizes, payload = join_files(relative(files, image.workdir))
            launched.header = {
                "op": "spawn",
                "sandbox": launched.identity,
                "bwrap": f"{bwrap}/{self._layout.bwrap}",
                "argv": argv,
                "filter": kind,
                "rlimits": rlimits(limits),
                "limits": group_limits(limits, scratch=scratch),
                "memory": limits.memory,
                "disk": limits.disk,
                "scratch": SCRATCH if scratch else (),
                "network": limits.network,
                "files": sizes,
                "workdir": image.workdir,
                "lower": view.lower or view.root,
                "inside": "" if view.lower else image.workdir,
                "root": view.root,
                "targets": [image.workdir, *image.layers],
            }
            launched.environment = environment(image, self.python)
            await launched.spawn(payload)
            self.limits_by = launched.limits_by
        except BaseException as error:
            await _abandon(launched)
            if isinstance(error, SandboxError) and not str(error).startswith("image"):
                raise SandboxError(WHY_NOT.format(reason=error)) from error
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox cannot take its first files: {error}") from error
            raise
        return launched

    async def _view(self, image: Image, taken: list[Share]) -> View:
        """Has everything of `image` shown to the keeper."""
        prefix = self.python.prefix if image.root is None else None
        root = await self._take(image.root, taken) if image.root else None
        lower = await self._take(image.source, taken) if image.source else None
        return View(
            image,
            python=await self._take(prefix, taken, owned=False) if prefix else None,
            root=root,
            lower=lower,
            layers={target: await self._take(source, taken) for target, source in image.layers.items()},
        )

    async def _take(self, path: Any, taken: list[Share], *, owned: bool = True) -> str:
        _, shares = self._start_keeper()
        taken.append(await shares.take(path, owned=owned))
        return taken[-1].path

    async def close(self) -> None:
        """See `SandboxProvider.close`. The provider can be used again afterwards."""
        await self.living.destroy()
        if self._keeper is not None:
            await self._keeper.close()
            self._keeper = self._shares = None

    def _start_keeper(self) -> tuple[KeeperClient, Shares]:
        if self._keeper is None or self._shares is None:
            keeper = self._keeper = KeeperClient(keeper_config(cgroups=self._cgroups))
            self._shares = Shares(lambda path, owned: show(keeper, path, owned), keeper.release)
        return self._keeper, self._shares


async def _give_back(shares: Shares, taken: list[Share]) -> None:
    with suppress(SandboxError):  # the keeper is gone, and all that it showed
        while taken:
            await shares.give_back(taken.pop())


async def _abandon(launched: Launched) -> None:
    """Undoes a start that failed or was cancelled."""
    with suppress(SandboxError, OSError):
        await asyncio.shield(asyncio.ensure_future(launched.destroy()))
    launched.pipes.close()
