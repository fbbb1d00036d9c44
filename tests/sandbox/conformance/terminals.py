"""Cases: interactive shells on a pseudo terminal."""

import asyncio

from sandbox.base import SandboxError, Terminal

from .core import Stage, appears, case, gone, mark, processes, raises, run, say


async def until(terminal: Terminal, wanted: bytes, timeout: float = 15) -> bytes:
    """What the terminal says up to `wanted`."""
    seen = b""
    async with asyncio.timeout(timeout):
        while wanted not in seen:
            seen += await terminal.receive(1)
    return seen


@case("terminal")
async def terminal_echoes_and_answers(stage: Stage) -> None:
    box = await stage.create()
    terminal = await box.terminal()
    await terminal.send(b"cd pkg; tty; echo $((40 + 2)); pwd\n")
    seen = await until(terminal, b"/testbed/pkg\r\n")
    assert b"42\r\n" in seen and b"/dev/" in seen and b"echo $((40 + 2))" in seen
    await terminal.send(b"echo shared > ../t\n")
    await until(terminal, b"shared > ../t\r\n")
    await asyncio.sleep(0.2)
    assert await say(box, "pwd; cat t") == "/testbed\nshared\n"  # the other shell has a state of its own
    assert await terminal.receive(0.5) is not None
    while await terminal.receive(0.3):
        pass
    await terminal.close()
    await terminal.close()


@case("terminal")
async def terminal_interrupts_as_a_keyboard(stage: Stage) -> None:
    box, number = await stage.create(), mark()
    terminal = await box.terminal()
    await terminal.send(f"sleep {number}\n".encode())
    assert await appears(number)
    await terminal.send(b"\x03")
    assert await gone(number, 5)
    await terminal.send(b"echo st''ill\n")
    await until(terminal, b"still")


@case("terminal")
async def terminal_feeds_interactive_programs(stage: Stage) -> None:
    box = await stage.create()
    terminal = await box.terminal()
    await terminal.send(b"python3 -q\n")
    await until(terminal, b">>> ")
    await terminal.send(b"print(input('na' + 'me? ') * 2)\n")
    await until(terminal, b"name? ")
    await terminal.send(b"ho\n")
    await until(terminal, b"hoho\r\n>>> ")  # a C-d before the prompt would be lost
    await terminal.send(b"\x04")
    await terminal.send(b"echo ba''ck\n")
    await until(terminal, b"back")


@case("terminal")
async def terminal_survives_a_flood(stage: Stage) -> None:
    box = await stage.create()
    terminal = await box.terminal()
    await terminal.send(b"seq 300000; echo do''ne\n")
    seen = await until(terminal, b"done", 60)
    assert b"\r\n299999\r\n300000\r\ndone" in seen
    assert await say(box, "echo fine") == "fine\n"


@case("terminal")
async def closing_a_terminal_ends_what_runs_in_it(stage: Stage) -> None:
    box, number = await stage.create(), mark()
    terminal = await box.terminal()
    await terminal.send(f"sleep {number} & sleep {number}\n".encode())
    assert await appears(number, 2)
    await terminal.close()
    assert await gone(number, 5), processes(number)
    with raises(SandboxError):
        await terminal.send(b"true\n")
    with raises(SandboxError):
        await terminal.receive(1)
    assert (await run(box, "echo fine")).output == "fine\n"
    ended = await box.terminal()
    await ended.send(b"exit\n")
    with raises(SandboxError):
        async with asyncio.timeout(20):
            while True:
                await ended.receive(5)
