"""Control groups: memory, processes and processor time of a whole sandbox.

Version 2 needs a group of ours whose parent grants the controllers, version 1 a group of ours in each
hierarchy. Root makes the groups and gives them to the keeper's user, a plain user needs them delegated.
`find` looks for either; where there is neither, the keeper watches memory itself.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NEEDED, _WANTED = ("memory", "pids"), ("memory", "pids", "cpu")
_PERIOD = 100_000  # microseconds
_PATIENCE = 2.0  # seconds for the last processes of a group to end


@dataclass(frozen=True)
class Groups:
    """Where groups of sandboxes are made: our own directory in each hierarchy, by controller."""

    version: int
    bases: dict[str, Path]
    origin: Path | None = None  # group of this process before `enter`, where it has to move

    def give(self, uid: int) -> None:
        """Lets `uid` make groups below, and move processes of its own there."""
        for base in set(self.bases.values()):
            os.chown(base, uid, uid)
            for name in ("cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
                if self.version == 2 and (base / name).exists():
                    os.chown(base / name, uid, uid)

    def enter(self) -> None:
        """Moves this process next to the groups to be: only then it may move others into them."""
        if self.version == 2:
            home = self.bases["memory"] / "keeper"
            home.mkdir(exist_ok=True)
            _write(home / "cgroup.procs", os.getpid())

    def leave(self) -> None:
        """Undoes `enter`."""
        if self.origin is not None:
            with suppress(OSError):
                _write(self.origin / "cgroup.procs", os.getpid())

    def make(self, name: str, limits: dict[str, int]) -> "Group":
        """A group for one sandbox; `limits`: memory (bytes), pids, cpu (millionths of a core)."""
        group = Group(self.version, {key: base / name for key, base in self.bases.items()})
        try:
            for folder in set(group.folders.values()):
                folder.mkdir()
            group.limit(limits)
        except BaseException:
            group.remove()
            raise
        return group

    def remove(self) -> None:
        """Removes all groups, killing what still runs in them."""
        for base in set(self.bases.values()):
            _remove(base)


@dataclass(frozen=True)
class Group:
    """The control group of one sandbox."""

    version: int
    folders: dict[str, Path]

    def limit(self, limits: dict[str, int]) -> None:
        """Sets what may be used by all processes together, with nothing swapped out."""
        memory, pids = self.folders["memory"], self.folders["pids"]
        _write(pids / "pids.max", limits["pids"])
        if self.version == 2:
            _write(memory / "memory.max", limits["memory"])
            _write_if_there(memory / "memory.swap.max", 0)
        else:
            _write(memory / "memory.limit_in_bytes", limits["memory"])
            _write_if_there(memory / "memory.memsw.limit_in_bytes", limits["memory"])
        if cpu := self.folders.get("cpu"):
            quota = max(limits["cpu"] * _PERIOD // 1_000_000, 1000)
            if self.version == 2:
                _write(cpu / "cpu.max", f"{quota} {_PERIOD}")
            else:
                _write(cpu / "cpu.cfs_quota_us", quota)

    def join(self, pid: int) -> None:
        """Moves a process here; what it starts from now on is here, too."""
        for folder in set(self.folders.values()):
            _write(folder / "cgroup.procs", pid)

    def open_counter(self) -> int:
        """Descriptor of a file with a line `oom_kill N`: how many processes were killed for memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return os.open(self.folders["memory"] / name, os.O_RDONLY | os.O_CLOEXEC)

    def remove(self) -> None:
        """Removes the group once its processes have ended."""
        for folder in set(self.folders.values()):
            _remove(folder)


def find(name: str, proc: Path = Path("/proc/self")) -> Groups | None:
    """Makes our groups called `name`, or returns None where that is impossible."""
    own = _own_groups((proc / "cgroup").read_text())
    mounts = list(_mounts((proc / "mountinfo").read_text()))
    return _find_unified(name, own, mounts) or _find_separate(name, own, mounts)


def _find_unified(name: str, own: dict[str, str], mounts: list[tuple[str, Path, str]]) -> Groups | None:
    for kind, point, root in mounts:
        if kind != "cgroup2" or "" not in own:
            continue
        here = _place(point, root, own[""])
        for folder in (here, *here.parents):
            if not folder.is_relative_to(point):
                break
            if granted := _try_unified(folder / name):
                return Groups(2, dict.fromkeys(granted, folder / name), here)
    return None


def _try_unified(base: Path) -> list[str]:
    """Controllers of a new group, which is of use if its parent grants them and it can pass them on."""
    with suppress(OSError):
        if not os.access(base.parent / "cgroup.procs", os.W_OK):
            return []  # then no process can be moved between groups below it
        base.mkdir()
        granted = [key for key in _WANTED if key in (base / "cgroup.controllers").read_text().split()]
        if set(_NEEDED) <= set(granted):
            _write(base / "cgroup.subtree_control", " ".join(f"+{key}" for key in granted))
            return granted
    _remove(base)
    return []


def _find_separate(name: str, own: dict[str, str], mounts: list[tuple[str, Path, str]]) -> Groups | None:
    bases: dict[str, Path] = {}
    for options, point, root in mounts:
        for key in set(_WANTED) & set(options.split(",")) & set(own):
            base = _place(point, root, own[key]) / name
            with suppress(OSError):
                base.mkdir(exist_ok=base in bases.values())
                bases[key] = base
    if set(_NEEDED) <= set(bases):
        return Groups(1, bases)
    for base in set(bases.values()):
        _remove(base)
    return None


def _own_groups(text: str) -> dict[str, str]:
    """Path of this process's group by controller; version 2 is the one without a name."""
    groups = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _mounts(text: str) -> Iterator[tuple[str, Path, str]]:
    """(controllers or "cgroup2", mount point, path of its root) of every mounted hierarchy."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        fields = left.split(" ")
        if kind in ("cgroup", "cgroup2"):
            yield ("cgroup2" if kind == "cgroup2" else options), Path(fields[4]), fields[3]


def _place(point: Path, root: str, group: str) -> Path:
    """The directory of `group` where a hierarchy is mounted from its `root` on."""
    inside = os.path.relpath(group, root)
    return point if inside.startswith("..") else point / inside


def _remove(folder: Path) -> None:
    """Removes a group and those below it, killing what runs in them."""
    with suppress(OSError):
        for inner in list(os.scandir(folder)):
            if inner.is_dir(follow_symlinks=False):
                _remove(Path(inner.path))
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            return folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            _kill_all(folder)
            time.sleep(0.001)


def _kill_all(folder: Path) -> None:
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(OSError):
                os.kill(int(pid), 9)


def _write(path: Path, value: object) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(str(value).encode())


def _write_if_there(path: Path, value: object) -> None:
    if path.exists():
        _write(path, value)
