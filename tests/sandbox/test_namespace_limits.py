"""Limits of whole sandboxes, and what is left of them when their owner or keeper dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandbox.base import Limits
from sandbox.keeper import cgroups
from sandbox.keeper.cgroups import Groups
from sandbox.namespace import NamespaceProvider, NamespaceSandbox

ROOT = Path(__file__).parents[2]
LIMITS = Limits(memory=128 << 20, pids=24, disk=8 << 20, output=4096)
HOG = "python3 -c 'x = b\"1\" * ({} << 20); import time; time.sleep(3)'"
Body = Callable[[NamespaceSandbox], Awaitable[None]]


def within(body: Body, provider: NamespaceProvider, limits: Limits = LIMITS) -> None:
    async def session() -> None:
        try:
            await body(await provider.create({"a.py": b"x = 1\n"}, limits))
        finally:
            await provider.close()

    asyncio.run(session())


def groups_of(pid: int) -> list[Path]:
    """Directories of control groups that the keeper with that process id made."""
    return [path for path in Path("/sys/fs/cgroup").glob(f"**/jaxrl-{pid}-*") if path.is_dir()]


@pytest.mark.parametrize("use", [True, False], ids=["cgroups", "watchdog"])
def test_memory_is_limited_for_all_processes_together(use: bool) -> None:
    provider = NamespaceProvider(cgroups=use)

    async def body(sandbox: NamespaceSandbox) -> None:
        one = await sandbox.exec(HOG.format(80), 20)
        assert one.exit_code == 0 and not one.oom
        command = " & ".join([HOG.format(80)] * 3)
        three = await sandbox.exec(f"{command} & wait; echo over; false", 20)
        assert three.output.endswith("over\n") and three.oom
        again = await sandbox.exec("echo fine", 10)
        assert again.output == "fine\n" and not again.oom
        assert not (await sandbox.exec("sh -c 'kill -9 $$'", 10)).oom

    within(body, provider)
    if not use:
        assert provider.limits_by == "rlimits and a watchdog"


def test_shared_memory_of_many_processes_is_limited() -> None:
    """Where memory is watched, there is none besides files in /dev/shm."""
    script = "import mmap, time; m = mmap.mmap(-1, 60 << 20); m.write(bytes(60 << 20)); time.sleep(2)"
    both = "import os; " + script.replace("; time", "; os.fork() and os.wait(); print(len(m[:])); time")

    async def body(sandbox: NamespaceSandbox) -> None:
        if not provider.limits_by.startswith("cgroup"):
            pytest.skip("no control groups can be made here")
        shared = await sandbox.exec(f"python3 -c '{both}'", 20)  # the same pages: counted once
        assert shared.exit_code == 0 and not shared.oom, shared
        own = await sandbox.exec(f"for i in 1 2 3 4; do python3 -c '{script}' & done; wait; false", 20)
        assert own.oom

    provider = NamespaceProvider()
    within(body, provider)


@pytest.mark.parametrize("use", [True, False], ids=["cgroups", "watchdog"])
def test_what_hits_the_shell_itself_is_survived(use: bool) -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        await sandbox.exec("echo kept > k; cd /tmp", 10)
        grown = await sandbox.exec("x=1; while :; do x=$x$x; done", 30)
        assert grown.exit_code != 0
        assert (await sandbox.exec("cat /testbed/k", 10)).output == "kept\n"

    within(body, NamespaceProvider(cgroups=use))


def test_full_disks_fit_into_the_memory_limit() -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        fill = "for d in . /tmp /dev/shm; do i=0; while head -c 500000 /dev/zero > $d/f$i; "
        fill += "do i=$((i+1)); done; done 2>/dev/null; "
        result = await sandbox.exec(fill + HOG.format(80), 60)
        assert result.exit_code == 0 and not result.oom
        assert int((await sandbox.exec("cat f* /tmp/f* /dev/shm/f* | wc -c", 20)).output) > 3 * (7 << 20)

    within(body, NamespaceProvider())


def test_processor_time_is_shared_out() -> None:
    provider = NamespaceProvider()
    burn = "python3 -c 'import time\nt = time.time() + 1.5\nwhile time.time() < t: pass'"

    async def body(sandbox: NamespaceSandbox) -> None:
        await sandbox.exec("true", 10)
        assert provider.limits_by
        script = f"{burn} & {burn} & wait; times"
        result = await sandbox.exec(script, 30)
        minutes, seconds = result.output.split()[2].rstrip("s").split("m")
        if provider.limits_by.startswith("cgroup"):
            assert 60 * int(minutes) + float(seconds) < 1.2, result.output

    within(body, provider, Limits(memory=256 << 20, cpu=0.25))


def test_groups_are_removed_with_their_sandboxes() -> None:
    async def session() -> None:
        provider = NamespaceProvider()
        boxes = await asyncio.gather(*(provider.create({}, LIMITS) for _ in range(4)))
        keeper = boxes[0]._launched.keeper.pid  # type: ignore[union-attr]
        made = groups_of(keeper)
        assert bool(made) == provider.limits_by.startswith("cgroup")
        counts = {len([path for path in base.iterdir() if path.is_dir()]) for base in made}
        await boxes[0].destroy()
        await boxes[1].exec("exit", 10)  # a rebuilt sandbox keeps its groups
        after = {len([path for path in base.iterdir() if path.is_dir()]) for base in made}
        assert {count - 1 for count in counts} == after
        await provider.close()
        assert not groups_of(keeper)

    asyncio.run(session())


OWNER = """
import asyncio, sys
from sandbox.base import Limits
from sandbox.namespace import NamespaceProvider
async def main():
    provider = NamespaceProvider(cgroups={cgroups})
    boxes = await asyncio.gather(*(provider.create({{}}, Limits()) for _ in range({count})))
    terminals = [await box.terminal() for box in boxes[:2]]
    print(boxes[0]._launched.keeper.pid, flush=True)
    command = "setsid sleep {mark} & (sleep {mark} &) ; sleep {mark}"
    await asyncio.gather(*(box.exec(command, 60) for box in boxes))
asyncio.run(main())
"""


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


def alive(pid: int) -> bool:
    """Whether the process exists, not only for a parent that never asked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, f"{pid} was killed and lives"
        time.sleep(0.002)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


@pytest.mark.parametrize(
    ("victim", "use"),
    [("owner", True), ("owner", False), ("keeper", True), ("keeper", False)],
    ids=["owner", "owner without cgroups", "keeper", "keeper without cgroups"],
)
def test_whoever_dies_nothing_is_left_of_32_sandboxes(victim: str, use: bool) -> None:
    mark = str(10_000_000 + os.getpid() * 10 + use)
    mounted = Path("/proc/self/mountinfo").read_text()
    command = [sys.executable, "-c", OWNER.format(cgroups=use, count=32, mark=mark)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        keeper = int(owner.stdout.readline())
        deadline = time.monotonic() + 60
        while len(processes(f"sleep\0{mark}")) < 96 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(processes(f"sleep\0{mark}")) == 96
        below = [keeper, *children(keeper)]
        target = owner.pid if victim == "owner" else (children(keeper) if os.geteuid() == 0 else [keeper])[0]
        os.kill(target, signal.SIGKILL)
        # A killed process still needs a processor in order to end, which takes seconds on a crowded
        # machine. The two seconds are what the clean-up may take from then on, crowded or not.
        wait_for_end(target)
        deadline = time.monotonic() + 2
        left: list[object] = [1]
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = [*processes(f"sleep\0{mark}"), *groups_of(keeper)]
            if victim == "owner":
                left += [pid for pid in below if alive(pid)]
        owner.kill()
    assert not left
    assert Path("/proc/self/mountinfo").read_text() == mounted


def test_version_2_on_a_tree_that_looks_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine of ours has version 2 with these controllers: this checks what is written where."""
    top, proc = tmp_path / "cgroup", tmp_path / "proc"
    (top / "user.slice/session.scope").mkdir(parents=True)
    proc.mkdir()
    (proc / "cgroup").write_text("0::/user.slice/session.scope\n")
    (proc / "mountinfo").write_text(f"30 25 0:26 / {top} rw,relatime - cgroup2 cgroup2 rw\n")
    for folder in (top, top / "user.slice", top / "user.slice/session.scope"):
        (folder / "cgroup.procs").write_text("")
    real = Path.mkdir

    def mkdir(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        real(self, mode, parents, exist_ok)
        granted = "cpu memory pids" if self.parent == top / "user.slice" else ""
        (self / "cgroup.controllers").write_text(granted)
        for name in ("cgroup.procs", "cgroup.subtree_control", "memory.swap.max"):
            (self / name).write_text("")

    def remove(folder: Path) -> None:
        subprocess.run(["rm", "-r", "--", str(folder)], check=True)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(cgroups, "_remove", remove)
    groups = cgroups.find("ours", proc)
    assert groups is not None
    base = top / "user.slice/ours"
    assert groups == Groups(2, dict.fromkeys(("memory", "pids", "cpu"), base), base.parent / "session.scope")
    assert (base / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert not (top / "user.slice/session.scope/ours").exists()  # grants nothing
    groups.enter()
    assert (base / "keeper/cgroup.procs").read_text() == str(os.getpid())
    group = groups.make("7", {"memory": 1000, "pids": 5, "cpu": 1_500_000})
    written = {
        name: (base / "7" / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")
    }
    assert written == {"memory.max": "1000", "memory.swap.max": "0", "pids.max": "5"}
    assert (base / "7/cpu.max").read_text() == "150000 100000"
    group.join(4242)
    assert (base / "7/cgroup.procs").read_text() == "4242"
    group.remove()
    groups.leave()
    assert (top / "user.slice/session.scope/cgroup.procs").read_text() == str(os.getpid())
    groups.remove()
    assert not base.exists()


def test_a_group_that_cannot_be_limited_is_removed(tmp_path: Path) -> None:
    groups = Groups(1, {"memory": tmp_path / "m", "pids": tmp_path / "p"})
    for base in groups.bases.values():
        base.mkdir()
    (tmp_path / "p/0").mkdir()
    with pytest.raises(OSError):
        groups.make("0", {"memory": 1, "pids": 1, "cpu": 1})
    assert not (tmp_path / "m/0").exists()
