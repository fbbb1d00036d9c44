"""The sandboxes of one provider that are alive: none is forgotten, however its start ends."""

import asyncio
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar


class Startable(Protocol):
    """What a backend's own class of sandboxes has besides the protocol."""

    async def start(self, files: Mapping[str, bytes]) -> None:
        """Starts it with `files`. Called once."""
        ...

    async def destroy(self) -> None:
        """See `Sandbox.destroy`; also undoes a start that failed half-way."""
        ...


_S = TypeVar("_S", bound=Startable)


class Living(Generic[_S]):  # noqa: UP046 (syntax of newer interpreters only)
    """Sandboxes from their start until they say that they end."""

    def __init__(self) -> None:
        self._sandboxes: set[_S] = set()

    async def start(self, sandbox: _S, files: Mapping[str, bytes]) -> _S:
        """Starts a new sandbox, or destroys it and raises what went wrong."""
        self._sandboxes.add(sandbox)
        try:
            await sandbox.start(files)
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    def forget(self, sandbox: _S) -> None:
        """Called by a sandbox that has ended: while it ends by itself, `destroy` waits for it. Idempotent."""
        self._sandboxes.discard(sandbox)

    async def destroy(self) -> None:
        """Destroys all of them."""
        await asyncio.gather(*(sandbox.destroy() for sandbox in list(self._sandboxes)))
