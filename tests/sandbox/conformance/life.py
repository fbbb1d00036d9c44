"""Cases: how sandboxes start, end, and end with their owner."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time

from sandbox.base import Limits, Sandbox, SandboxError

from .core import LIMITS, ROOT, Stage, appears, case, gone, mark, processes, raises, say


async def _is_gone(box: Sandbox) -> None:
    for call in (
        box.exec("true", 1),
        box.read("a.py"),
        box.write("a", b""),
        box.diff(),
        box.adopt({"b": b""}),
    ):
        with raises(SandboxError):
            await call


@case()
async def destroyed_sandboxes_raise_and_leave_nothing(stage: Stage) -> None:
    before = stage.backend.traces()
    box, number = await stage.create(), mark()
    running = asyncio.ensure_future(box.exec(f"setsid sleep {number}", 60))
    assert await appears(number)
    await box.destroy()
    await box.destroy()
    with raises(SandboxError):
        await running
    assert not processes(number)
    await _is_gone(box)
    assert stage.backend.traces() <= before


@case("terminal")
async def terminals_end_with_their_sandbox(stage: Stage) -> None:
    box, number = await stage.create(), mark()
    terminal = await box.terminal()
    await terminal.send(f"sleep {number}\n".encode())
    assert await appears(number)
    await box.destroy()
    assert not processes(number)
    with raises(SandboxError):
        while True:
            await terminal.receive(5)
    with raises(SandboxError):
        await terminal.send(b"x\n")
        await terminal.send(b"x\n")
    await terminal.close()
    with raises(SandboxError):
        await box.terminal()


@case()
async def destruction_survives_cancellation(stage: Stage) -> None:
    box, number = await stage.create(), mark()
    running = asyncio.ensure_future(box.exec(f"sleep {number}", 60))
    assert await appears(number)
    ending = asyncio.ensure_future(box.destroy())
    await asyncio.sleep(0)
    ending.cancel()
    assert await gone(number, 10)
    with raises(SandboxError):
        await running
    await _is_gone(box)


@case()
async def closed_providers_leave_nothing(stage: Stage) -> None:
    before, opened = stage.backend.traces(), len(os.listdir("/proc/self/fd"))
    provider, number = stage.backend.make(), mark()
    boxes = await asyncio.gather(*(stage.create({}, provider=provider) for _ in range(3)))
    for box in boxes:
        await box.exec(f"sleep {number} >/dev/null 2>&1 &", 10)
    assert await appears(number, 3)
    await provider.close()
    assert not processes(number) and stage.backend.traces() <= before
    assert len(os.listdir("/proc/self/fd")) <= opened + 2
    for box in boxes:
        await _is_gone(box)


@case()
async def closing_waits_for_a_sandbox_that_ends_by_itself(stage: Stage) -> None:
    before, lost = stage.backend.traces(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    provider = stage.backend.make()
    limits = Limits(wall=1, memory=LIMITS.memory)
    box = await stage.create({}, limits=limits, provider=provider)
    while box._ending is None:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    for _ in range(3):  # until it is in the midst of it
        await asyncio.sleep(0)
    await provider.close()
    assert stage.backend.traces() <= before
    await _is_gone(box)
    del box
    gc.collect()
    assert not lost, lost


@case()
async def many_at_once_and_cancelled_starts(stage: Stage) -> None:
    before = stage.backend.traces()
    starts = [asyncio.ensure_future(stage.create({})) for _ in range(8)]
    await asyncio.sleep(0.03)
    for start in starts[::2]:
        start.cancel()
    results = await asyncio.gather(*starts, return_exceptions=True)
    alive = [item for item in results if not isinstance(item, BaseException)]
    assert all(isinstance(item, asyncio.CancelledError) for item in results if item not in alive), results
    assert len(alive) >= 4
    outputs = await asyncio.gather(*(say(box, f"echo {n}") for n, box in enumerate(alive)))
    assert [int(text) for text in outputs] == list(range(len(alive)))
    await asyncio.gather(*(box.destroy() for box in alive))
    assert stage.backend.traces() <= before


@case()
async def files_beyond_the_limit_are_an_error(stage: Stage) -> None:
    before = stage.backend.traces()
    with raises(SandboxError):
        await stage.create({"big": bytes(3 << 20)}, limits=Limits(disk=1 << 20, memory=LIMITS.memory))
    assert stage.backend.traces() <= before


@case()
async def killed_owner_leaves_nothing(stage: Stage) -> None:
    before, number = stage.backend.traces(), mark()
    package = __package__ or ""
    search = os.pathsep.join([str(ROOT), str(ROOT / "tests/sandbox"), *sys.path])
    command = [sys.executable, "-m", package, "own", stage.backend.name, number]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search}) as owner:
        try:
            assert owner.stdout is not None
            assert await asyncio.to_thread(owner.stdout.readline) == b"ready\n"
            assert await appears(number, 6), processes(number)  # two in each sandbox
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    killed = time.monotonic()
    assert await gone(number, stage.backend.death), processes(number)
    while (left := stage.backend.traces() - before) and time.monotonic() < killed + stage.backend.death:
        await asyncio.sleep(0.02)
    assert not left, left


async def own(stage: Stage, number: str) -> None:
    """The owner that the case above kills: three sandboxes with two processes each."""
    boxes = await asyncio.gather(*(stage.create({}) for _ in range(3)))
    running = [
        asyncio.ensure_future(box.exec(f"setsid sleep {number} & sleep {number}", 600)) for box in boxes
    ]
    print("ready", flush=True)
    await asyncio.gather(*running)
