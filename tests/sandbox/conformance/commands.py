"""Cases: how commands run, end and are ended."""

import asyncio
import time

from .core import (
    LIMITS,
    Stage,
    appears,
    case,
    gone,
    mark,
    processes,
    raises,
    run,
    say,
)


@case()
async def shell_keeps_its_state(stage: Stage) -> None:
    box = await stage.create()
    assert (await run(box, "cd pkg; export Q=7; f() { echo f$1; }; false")).exit_code == 1
    assert await say(box, "pwd; echo $Q; f 3; cat b.py") == "/testbed/pkg\n7\nf3\ny = 2\n"


@case()
async def exit_codes(stage: Stage) -> None:
    box = await stage.create()
    for command, code in {
        "true": 0,
        "sh -c 'exit 42'": 42,
        "/no/such/program": 127,
        "/etc": 126,
        "sh -c 'kill -9 $$'": 137,
        "sh -c 'kill -15 $$'": 143,
        "false | true": 0,
    }.items():
        assert (await run(box, command)).exit_code == code, command
    broken = await run(box, "if (")
    assert broken.exit_code != 0 and "yntax error" in broken.output


@case()
async def output_is_merged_in_order(stage: Stage) -> None:
    box = await stage.create()
    script = "for i in 1 2 3; do echo out$i; echo err$i >&2; done; printf 'no newline'"
    assert await say(box, script) == "out1\nerr1\nout2\nerr2\nout3\nerr3\nno newline"
    assert await say(box, "echo 'quo\"ted' \\\\ '$x'") == 'quo"ted \\ $x\n'
    assert await say(box, "echo " + "y" * 100_000 + " | wc -c") == "100001\n"


@case()
async def binary_output(stage: Stage) -> None:
    box = await stage.create()
    assert await say(box, "printf 'a\\377b\\0c\\r\\n\\033[0m'") == "a\ufffdb\0c\r\n\x1b[0m"


@case()
async def redirected_shell_stays_reachable(stage: Stage) -> None:
    box = await stage.create()
    assert (await run(box, "exec >/dev/null; echo lost")).exit_code == 0
    assert await say(box, "echo seen") == "seen\n"


@case()
async def stdin_is_empty(stage: Stage) -> None:
    box = await stage.create()
    assert await say(box, "cat; read line; echo $?") == "1\n"
    await run(box, "exec <&-")
    assert await say(box, "echo still here") == "still here\n"


@case()
async def deleted_working_directory(stage: Stage) -> None:
    box = await stage.create()
    await run(box, "mkdir d; cd d; rmdir ../d")
    assert await say(box, "echo here; cd /testbed; cat a.py") == "here\nx = 1\n"


@case()
async def exit_rebuilds_around_the_files(stage: Stage) -> None:
    box = await stage.create()
    assert (await run(box, "echo new > pkg/n.txt; cd /; Q=1; exit 3")).exit_code == 3
    assert await say(box, "pwd; cat pkg/n.txt; echo $Q") == "/testbed\nnew\n\n"
    assert set((await box.diff()).files) == {"pkg/n.txt"}
    await run(box, "Q=1; kill -9 $$")  # ends the shell, unless it is the first process
    assert await say(box, "cat pkg/n.txt") == "new\n"


@case()
async def timeout_ends_the_whole_tree(stage: Stage) -> None:
    box, number = await stage.create(), mark()
    daemons = (
        f"setsid sleep {number} & (sh -c 'setsid sh -c \"sleep {number} & \" &'); nohup sleep {number} &"
    )
    result = await box.exec(f"echo begun; {daemons} echo kept > k; ln -s k l; sleep {number}", 1)
    assert result.timed_out and result.exit_code == -1 and result.output.startswith("begun")
    assert not processes(number)
    assert await say(box, "cat k; readlink l; pwd") == "kept\nk\n/testbed\n"


@case()
async def background_jobs_outlive_their_command(stage: Stage) -> None:
    box, number = await stage.create(), mark()
    assert (await run(box, f"sleep {number} >/dev/null 2>&1 &")).exit_code == 0
    assert await appears(number)
    assert await say(box, "kill -0 $! && echo runs") == "runs\n"
    await box.destroy()
    assert await gone(number)


@case()
async def endless_output_times_out_within_bounds(stage: Stage) -> None:
    box = await stage.create()
    result = await box.exec("yes", 1)
    assert result.timed_out and len(result.output) < LIMITS.output + 100
    assert await say(box, "echo fine") == "fine\n"


@case()
async def a_hundred_megabytes_of_output(stage: Stage) -> None:
    box, started = await stage.create(), time.monotonic()
    result = await run(box, "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last", 60)
    assert result.exit_code == 0 and len(result.output) < LIMITS.output + 100
    assert result.output.startswith("first\n") and result.output.endswith("x\nlast\n")
    assert time.monotonic() - started < 30  # about 1 s where nothing else runs


@case()
async def cancelled_command_does_not_disturb_the_next(stage: Stage) -> None:
    box, number = await stage.create(), mark()
    with raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await box.exec(f"echo x > made; setsid sleep {number}", 60)
    assert await say(box, "cat made; echo alive") == "x\nalive\n"
    assert not processes(number)


@case()
async def commands_of_one_sandbox_queue(stage: Stage) -> None:
    box = await stage.create()
    results = await asyncio.gather(*(run(box, f"sleep 0.0{n}; echo {n}") for n in (5, 3, 1)))
    assert [result.output for result in results] == ["5\n", "3\n", "1\n"]
