"""Terminals of the namespace backend: what the shared cases do not ask."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable

from sandbox.base import Limits, SandboxError
from sandbox.namespace import NamespaceProvider, NamespaceSandbox
from sandbox.terminal import NamespaceTerminal

LIMITS = Limits(memory=256 << 20, pids=24, disk=8 << 20, output=4096)
Body = Callable[[NamespaceSandbox], Awaitable[None]]


def within(body: Body) -> None:
    async def session() -> None:
        backend = NamespaceProvider()
        try:
            await body(await backend.create({"a.py": b"x = 1\n"}, LIMITS))
        finally:
            await backend.close()

    asyncio.run(session())


async def until(terminal: NamespaceTerminal, wanted: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(20):
        while wanted not in seen:
            seen += await terminal.receive(1)
    return seen


def test_terminal_is_as_confined_as_the_shell() -> None:
    questions = (
        "id -u",
        "grep -E '^(Cap|NoNewPrivs|Seccomp:|Uid|Gid)' /proc/self/status",
        "readlink /proc/self/ns/* | sort",
        "ulimit -a | grep -v pipe",
        "env | grep -vE '^(_|OLDPWD|SHLVL|PWD)=' | sort",
        "pwd",
    )

    async def body(sandbox: NamespaceSandbox) -> None:
        terminal = await sandbox.terminal()
        for question in questions:
            await sandbox.write("q", f"{question} 2>&1\n".encode())
            await terminal.send(b"bash q > t; echo do''ne\n")
            await until(terminal, b"done")
            expected = (await sandbox.exec("bash q", 10)).output
            assert expected and (await sandbox.read("t")).decode() == expected, question
        await terminal.send(b"unshare -Ur true; echo code $?; ls -l /proc/$$/fd > t; echo do''ne\n")
        assert b"code 1\r\n" in await until(terminal, b"done")
        assert set(re.findall(rb"-> (\S+)", await sandbox.read("t"))) == {b"/dev/pts/0"}

    within(body)


def test_what_a_background_job_ignores_is_not_ignored_inside() -> None:
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}

    async def body(sandbox: NamespaceSandbox) -> None:
        mask = int((await sandbox.exec("grep SigIgn /proc/self/status", 10)).output.split()[1], 16)
        assert not [number for number in numbers if mask >> (number - 1) & 1]
        terminal = await sandbox.terminal()
        await terminal.send(b"echo rea''dy; sleep 60\n")
        await until(terminal, b"ready")  # or the key would reach a shell that is not up yet
        code = b""
        async with asyncio.timeout(20):
            while b"code 130" not in code:
                await terminal.send(b"\x03")
                await terminal.send(b"echo code $?\n")
                code += await terminal.receive(0.5)

    try:
        within(body)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_terminal_ends_when_the_sandbox_is_rebuilt() -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        terminal = await sandbox.terminal()
        await terminal.send(b"sleep 76767\n")
        assert (await sandbox.exec("sleep 60", 0.3)).timed_out
        for _ in range(100):
            try:
                await terminal.receive(1)
            except SandboxError:
                break
        else:
            raise AssertionError("the terminal goes on")
        again = await sandbox.terminal()
        await again.send(b"cat a.py; echo do''ne\n")
        assert b"x = 1\r\n" in await until(again, b"done")

    within(body)


def test_unread_floods_and_stuck_programs_leave_the_shell_alone() -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        before = len(os.listdir("/proc/self/fd"))
        terminals = [await sandbox.terminal() for _ in range(3)]
        for terminal in terminals:
            await terminal.send(b"yes\n")
        assert (await sandbox.exec("echo fine", 5)).output == "fine\n"
        for terminal in terminals:
            await terminal.close()
        assert len(os.listdir("/proc/self/fd")) == before
        assert (await sandbox.exec("ps -eo stat,comm | grep -v ^Z | grep -c '[y]es'", 10)).output == "0\n"

    within(body)


def test_closing_reaches_daemons() -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        terminal = await sandbox.terminal()
        await terminal.send(b"setsid nohup sleep 78787 >/dev/null & (sh -c 'sleep 78787 &'); echo do''ne\n")
        await until(terminal, b"done")
        count = "ps ax | grep -c '[s]leep 78787'"  # a busy machine takes a while to start both
        both = f"for i in $(seq 80); do [ $({count}) = 2 ] && break; sleep 0.1; done; {count}"
        assert (await sandbox.exec(both, 20)).output == "2\n"
        await terminal.close()
        assert (await sandbox.exec("ps ax | grep -c '[s]leep 78787'", 10)).output == "0\n"

    within(body)


def test_a_terminal_is_in_its_sandbox_s_groups_and_does_not_delay_its_end() -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        terminal = await sandbox.terminal()
        await terminal.send(b"cat /proc/self/cgroup > t; echo do''ne\n")
        await until(terminal, b"done")
        expected = (await sandbox.exec("cat /proc/self/cgroup", 10)).output
        assert (await sandbox.exec("cat t", 10)).output == expected
        launched = sandbox._launched
        assert launched is not None
        # A shell that nobody reaps would keep its pid namespace, and this would never end.
        await asyncio.wait_for(sandbox.destroy(), 20)
        assert not os.path.exists(f"/proc/{launched.pid}")

    within(body)
