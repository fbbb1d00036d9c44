"""The pool against a backend that fails, is full, or holds what dead owners left."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from sandbox.base import HOST, Diff, ExecResult, Image, Limits, SandboxError, Terminal
from sandbox.pool import Patience, SandboxPool, is_busy

OTHER = Image(root=Path("/other"))


class FakeSandbox:
    """Knows what it was made of and whether it lives."""

    def __init__(self, files: Mapping[str, bytes], image: Image, limits: Limits) -> None:
        self.files, self.image, self.limits = dict(files), image, limits
        self.alive, self.expired, self.adopted = True, False, False

    async def adopt(self, files: Mapping[str, bytes]) -> None:
        if self.expired:
            raise SandboxError("its time ran out")
        self.files |= files
        self.adopted = True

    async def exec(self, command: str, timeout: float) -> ExecResult:
        raise NotImplementedError

    async def read(self, path: str) -> bytes:
        return self.files[path]

    async def write(self, path: str, content: bytes) -> None:
        raise NotImplementedError

    async def diff(self) -> Diff:
        raise NotImplementedError

    async def terminal(self) -> Terminal:
        raise NotImplementedError

    async def destroy(self) -> None:
        self.alive = False


class FakeProvider:
    """Starts sandboxes, or raises what `trouble` gives for the number of the try."""

    def __init__(self, trouble: Callable[[int], Exception | None] = lambda _: None) -> None:
        self.trouble, self.tries, self.made, self.reaped = trouble, 0, list[FakeSandbox](), 0
        self.times = list[float]()

    async def create(self, files: Mapping[str, bytes], limits: Limits, *, image: Image = HOST) -> FakeSandbox:
        self.tries += 1
        self.times.append(asyncio.get_running_loop().time())
        if error := self.trouble(self.tries):
            raise error
        await asyncio.sleep(0)
        self.made.append(FakeSandbox(files, image, limits))
        return self.made[-1]

    async def reap(self) -> int:
        self.reaped += 1
        return 3

    async def close(self) -> None:
        for made in self.made:
            made.alive = False


def full() -> SandboxError:
    """As a backend says that there are no descriptors left."""
    try:
        try:
            raise OSError(24, "Too many open files")
        except OSError as error:
            raise SandboxError("no pipe to a sandbox") from error
    except SandboxError as error:
        return error


async def test_leases_get_their_image_and_limits() -> None:
    provider, limits = FakeProvider(), Limits(pids=9)
    pool = SandboxPool(provider, size=2, warm=1)
    await pool.start()
    async with pool.lease({"a": b"1"}) as warm, pool.lease({"a": b"2"}, image=OTHER, limits=limits) as cold:
        assert await warm.read("a") == b"1" and await cold.read("a") == b"2"
        assert isinstance(warm, FakeSandbox) and isinstance(cold, FakeSandbox)
        assert warm.adopted and warm.image == HOST
        assert not cold.adopted and (cold.image, cold.limits) == (OTHER, limits)
    assert not warm.alive and not cold.alive
    await pool.close()
    assert not [made for made in provider.made if made.alive] and pool.health.started >= 2


async def test_what_dead_owners_left_is_removed_at_the_start() -> None:
    provider = FakeProvider()
    pool = SandboxPool(provider, size=1)
    await pool.start()
    assert (provider.reaped, pool.health.reaped) == (1, 3)
    await pool.close()


async def test_a_warm_sandbox_that_expired_is_replaced() -> None:
    provider = FakeProvider()
    pool = SandboxPool(provider, size=1, warm=1)
    await pool.start()
    provider.made[0].expired = True
    async with pool.lease({"a": b"1"}) as sandbox:
        assert await sandbox.read("a") == b"1"
        assert not provider.made[0].alive
    await pool.close()


async def test_a_full_machine_is_waited_for() -> None:
    provider = FakeProvider(lambda number: full() if number <= 4 else None)
    pool = SandboxPool(provider, size=1)
    async with pool.lease({}):
        pass
    assert pool.health.busy == 4 and pool.health.failed == 0
    pauses = [second - first for first, second in pairwise(provider.times)]
    assert all(longer > 1.5 * pause for pause, longer in pairwise(pauses)), pauses
    await pool.close()


async def test_patience_with_a_full_machine_ends() -> None:
    pool = SandboxPool(FakeProvider(lambda _: full()), size=1, patience=Patience(busy=0.3))
    with pytest.raises(SandboxError, match="no room for a sandbox.*lower the number"):
        async with pool.lease({}):
            pass
    await pool.close()


async def test_a_failing_backend_is_paused_longer_each_time_and_comes_back() -> None:
    said = list[str]()
    provider = FakeProvider(lambda number: SandboxError("broken") if number <= 5 else None)
    pool = SandboxPool(provider, size=8, patience=Patience(failures=3, pause=0.1), report=said.append)

    async def episode() -> None:
        async with pool.lease({}):
            pass

    for _ in range(5):
        with pytest.raises(SandboxError, match="broken"):
            await episode()
    assert (pool.health.in_a_row, pool.health.pauses, len(said)) == (5, 3, 3)
    assert "3 starts in a row failed" in said[0] and pool.health.last_error == "broken"
    await episode()
    gaps = [second - first for first, second in pairwise(provider.times)]
    assert max(gaps[:2]) < 0.1 <= gaps[2] and gaps[3] >= 0.2 and gaps[4] >= 0.4, gaps
    assert (pool.health.in_a_row, pool.health.failed, pool.health.started) == (0, 5, 1)
    await pool.close()


async def test_closing_ends_what_waits_for_a_paused_backend() -> None:
    provider = FakeProvider(lambda _: SandboxError("broken"))
    pool = SandboxPool(provider, size=2, patience=Patience(failures=1, pause=60))

    async def episode() -> None:
        async with pool.lease({}):
            pass

    with pytest.raises(SandboxError, match="broken"):
        await episode()
    waiting = asyncio.ensure_future(episode())
    await asyncio.sleep(0.05)
    assert not waiting.done() and provider.tries == 1
    await pool.close()
    with pytest.raises(SandboxError, match="closed"):
        await waiting


def test_what_counts_as_busy() -> None:
    assert is_busy(full())
    assert is_busy(SandboxError("runc: clone: resource temporarily unavailable"))
    assert not is_busy(SandboxError("no such image"))
    nested = SandboxError("x")
    nested.__cause__ = OSError(2, "No such file or directory")
    assert not is_busy(nested)
