"""Faults of the host, hostile trees and unusual users: the namespace backend explains or survives them."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox import namespace
from sandbox.base import Limits, RejectedDiff, Sandbox, SandboxError
from sandbox.bubblewrap import UNPRIVILEGED_UID, _mapped, arguments
from sandbox.namespace import NamespaceProvider
from sandbox.pipes import Pipes
from sandbox.shell import Finished, Shell

ROOT = Path(__file__).parents[2]
FILES = {"a.py": b"x = 1\n", "pkg/b.py": b"y = 2\n"}
LIMITS = Limits(memory=256 << 20, pids=24, disk=8 << 20, output=4096)
Body = Callable[[Sandbox], Awaitable[None]]


def within(provider: type[NamespaceProvider], body: Body, limits: Limits = LIMITS) -> None:
    async def session() -> None:
        backend = provider()
        try:
            await body(await backend.create(FILES, limits))
        finally:
            await backend.close()

    asyncio.run(session())


async def say(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.exec(command, 10)).output


@pytest.fixture(params=[NamespaceProvider], ids=["namespace"])
def provider(request: pytest.FixtureRequest) -> type[NamespaceProvider]:
    return request.param


def test_unreadable_folder_rejects_the_diff_and_not_the_sandbox(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        await say(sandbox, "mkdir d; touch d/f; chmod 000 d")
        assert isinstance(await sandbox.diff(), RejectedDiff)
        assert (await sandbox.exec("sleep 60", 0.2)).timed_out
        assert await say(sandbox, "cat a.py") == "x = 1\n"

    within(provider, body)


def test_faults_of_the_host_are_sandbox_errors(
    provider: type[NamespaceProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(sandbox: Sandbox) -> None:
        backend = provider()
        try:
            with pytest.raises(SandboxError, match="No space left"):
                await backend.create({"big": bytes(3 << 20)}, Limits(disk=1 << 20))
            opened = len(os.listdir("/proc/self/fd"))
            real, made = os.pipe, []

            def pipe() -> tuple[int, int]:
                if made:
                    raise OSError(24, "Too many open files")
                made.append(real())
                return made[0]

            with monkeypatch.context() as patch:
                patch.setattr(os, "pipe", pipe)
                with pytest.raises(SandboxError, match="limit of open files"):
                    await backend.create(FILES, LIMITS)
            assert len(os.listdir("/proc/self/fd")) == opened
        finally:
            await backend.close()

    within(provider, body)


def test_uid_is_dropped_only_where_there_is_another(tmp_path: Path) -> None:
    table = tmp_path / "uid_map"
    for text, mapped in (
        ("0 0 4294967295\n", True),
        ("0 1000 1\n", False),
        ("0 9 1\n1 100000 65536\n", True),
    ):
        table.write_text(text)
        assert _mapped(UNPRIVILEGED_UID, table) is mapped


def test_lower_limits_of_the_owner_stay(provider: type[NamespaceProvider]) -> None:
    script = (
        "import asyncio, resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from sandbox.base import Limits\n"
        "from sandbox.namespace import NamespaceProvider\n"
        "async def main():\n"
        "    backend = NamespaceProvider()\n"
        "    sandbox = await backend.create({}, Limits(disk=8 << 20))\n"
        "    print((await sandbox.exec('ulimit -f; ulimit -n', 10)).output.split())\n"
        "    await backend.close()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "['2048', '1024']\n", result.stderr


def test_last_words_of_a_shell_that_ended_before_it_read() -> None:
    async def body() -> Finished:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        os.write(theirs_out, b"No permissions to create a new namespace")
        for fd in (theirs_in, theirs_out):
            os.close(fd)
        pipes = Pipes(ours_in, ours_out)
        try:
            return await Shell(pipes).start(5)
        finally:
            pipes.close()

    assert asyncio.run(body()) == Finished("No permissions to create a new namespace", None)


def test_missing_user_namespaces_are_explained(
    provider: type[NamespaceProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = NamespaceProvider.launch

    async def launch(self: NamespaceProvider, program: list[str], limits: Limits, **options: Any):
        return await real(self, ["/no/such/program"], limits, **options)

    monkeypatch.setattr(NamespaceProvider, "launch", launch)
    with pytest.raises(SandboxError, match="user.max_user_namespaces"):
        within(provider, lambda sandbox: sandbox.destroy())


@pytest.mark.parametrize("link", ["/proc/sys/user/max_ipc_namespaces", "/proc/1/coredump_filter"])
def test_writes_through_links_do_not_reach_the_kernel(provider: type[NamespaceProvider], link: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await say(sandbox, f"ln -s {link} link")
        with pytest.raises(OSError, match="expected a regular file"):
            await sandbox.write("link", b"0\n")
        with pytest.raises(OSError, match="expected a regular file"):
            await sandbox.read("link")

    within(provider, body)


def test_a_start_that_fails_leaves_other_sandboxes_alone(
    provider: type[NamespaceProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **fields: Any) -> list[str]:
        return ["--ro-bind", "/nowhere", "/nowhere", *arguments(*args, **fields)]

    async def body(first: Sandbox) -> None:
        backend = first._provider  # type: ignore[attr-defined]
        with monkeypatch.context() as patched:
            patched.setattr(namespace, "arguments", broken)
            with pytest.raises(SandboxError, match="nowhere"):
                await backend.create(FILES, LIMITS)
        assert await say(first, "cat a.py") == "x = 1\n"
        second = await backend.create(FILES, LIMITS)
        assert await say(second, "cat a.py") == "x = 1\n"

    within(provider, body)
