"""Cases: what a sandbox can use up, and that it is usable afterwards."""

import asyncio

from sandbox.base import Limits, SandboxError

from .core import LIMITS, Stage, case, mark, processes, raises, run, say

_HOG = "python3 -c 'x = []\nwhile True: x.append(b\"1\" * (4 << 20))'"
_COUNT = (
    "n=0; while head -c 1000000 /dev/zero > {folder}/f$n; "
    "do n=$((n+1)); [ $n -lt 64 ] || break; done; echo $n"
)


@case("process limit")
async def number_of_processes(stage: Stage) -> None:
    box = await stage.create()
    many = await run(box, "for i in $(seq 60); do sleep 1 & done; echo spawned")
    assert "fork" in many.output.lower() or "resource" in many.output.lower(), many
    assert await say(box, "wait; echo fine") == "fine\n"


@case("process limit")
async def fork_bomb(stage: Stage) -> None:
    box = await stage.create()
    assert (await run(box, "for i in $(seq 60); do sleep 0.5 & done")).output  # the limit holds
    await run(box, "wait")
    bomb = await box.exec("sh -c 'bomb() { bomb | bomb & }; bomb; wait' & while :; do :; done", 2)
    assert bomb.timed_out
    assert await say(box, "cat a.py") == "x = 1\n"


@case()
async def memory_hog(stage: Stage) -> None:
    box = await stage.create()
    await run(box, "cd pkg; echo saved > s")
    hog = await run(box, _HOG, 60)
    assert hog.exit_code != 0
    assert hog.oom == ("oom" in stage.backend.traits), hog
    after = await run(box, "cat /testbed/pkg/s")
    assert after.output == "saved\n" and not after.oom


@case("oom of a child")
async def children_killed_for_memory_are_reported(stage: Stage) -> None:
    box = await stage.create()
    hog = await run(box, f"({_HOG}); echo went on; false", 60)
    assert hog.exit_code == 1 and hog.output.endswith("went on\n") and hog.oom
    assert not (await run(box, "sh -c 'kill -9 $$'")).oom


@case()
async def disk_filler(stage: Stage) -> None:
    box = await stage.create()
    big = await run(box, "head -c 20000000 /dev/zero > big")
    assert big.exit_code != 0 and len(await box.read("big")) <= LIMITS.disk
    assert await say(box, "rm big; echo fine") == "fine\n"


@case("disk")
async def many_files_fill_the_disk_too(stage: Stage) -> None:
    box = await stage.create()
    for folder in (".", "/tmp"):
        count = int((await say(box, _COUNT.format(folder=folder))).split()[-1])
        assert count <= LIMITS.disk // 1_000_000
        assert await say(box, f"rm {folder}/f*; echo fine") == "fine\n"


@case("watched")
async def excesses_end_everything_but_the_files(stage: Stage) -> None:
    box, number = await stage.create(), mark()
    many = await box.exec(f"echo x > kept; for i in $(seq 60); do sleep {number} & done; wait", 30)
    assert many.exit_code == 137 and not many.timed_out and not many.oom
    assert not processes(number)
    full = await box.exec("for i in 1 2 3 4; do head -c 4000000 /dev/zero > f$i; done; sleep 60", 30)
    assert full.exit_code == 137 and not full.timed_out
    assert await say(box, "rm f*; cat kept") == "x\n"


@case()
async def wall_clock(stage: Stage) -> None:
    box = await stage.create(limits=Limits(wall=2, memory=LIMITS.memory))
    with raises(SandboxError):
        await asyncio.wait_for(box.exec("sleep 60", 60), 30)
