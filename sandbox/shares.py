"""Where the keeper sees the host directories that images are made of."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import SandboxError

_MAX_IDLE = 64  # shown but unused; each makes every start a little slower
_Key = tuple[str, bool]


@dataclass
class Share:
    """A path of the host, and where the keeper sees it."""

    key: _Key
    shown: asyncio.Future[str]
    users: int = 0

    @property
    def path(self) -> str:
        """Where the keeper sees it."""
        return self.shown.result()


class Shares:
    """Counts the users of each path, so that an image is shown once, and not for ever."""

    def __init__(
        self, share: Callable[[str, bool], Awaitable[str]], release: Callable[[str], Awaitable[None]]
    ) -> None:
        self._share, self._release = share, release
        self._shares: dict[_Key, Share] = {}  # the longest unused first

    async def take(self, path: Path, *, owned: bool) -> Share:
        """Shows `path`; give it back. `owned`: as if the keeper's user owned its files.

        Raises `SandboxError` if that is impossible.
        """
        key = str(path.resolve()), owned
        share = self._shares.pop(key, None) or Share(key, asyncio.ensure_future(self._share(*key)))
        self._shares[key] = share
        share.users += 1
        try:
            await asyncio.shield(share.shown)
        except (OSError, SandboxError) as error:
            self._shares.pop(key, None)
            reason = error.strerror if isinstance(error, OSError) else error
            raise SandboxError(f"image: {path} cannot be shown to sandboxes: {reason}") from error
        except BaseException:
            share.users -= 1
            raise
        return share

    async def give_back(self, share: Share) -> None:
        """One user less. Takes away what has been unused for longest if there is too much of it."""
        share.users -= 1
        idle = [other for other in self._shares.values() if not other.users and other.shown.done()]
        for other in idle[: max(len(idle) - _MAX_IDLE, 0)]:
            del self._shares[other.key]
            await self._release(other.path)
