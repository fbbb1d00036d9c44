"""What a sandbox sees of an image: its root, its layers, its environment."""

import os
import posixpath
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import Image, SandboxError

PYTHON_MOUNT = "/opt/python"
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_OWN = ("proc", "dev", "tmp", "sys")  # of every sandbox, never of an image


@dataclass(frozen=True)
class Python:
    """The interpreter inside sandboxes. `source` None: it is part of /usr already."""

    executable: str
    source: str | None
    environment: Mapping[str, str]


def check(image: Image) -> None:
    """Raises `SandboxError` for an image that cannot be shown."""
    for key, path in (("workdir", image.workdir), *((f"layers[{p!r}]", p) for p in image.layers)):
        if (
            not path.startswith("/")
            or posixpath.normpath(path) != path
            or path.count("/") > 32
            or path == "/"
        ):
            raise SandboxError(f"image {key}: expected a normal absolute path other than /, got {path!r}")
    folders = [("source", image.source), ("root", image.root)]
    folders += [(f"layers[{path!r}]", source) for path, source in image.layers.items()]
    for key, folder in folders:
        if folder is not None and not folder.is_dir():
            raise SandboxError(
                f"image {key}: expected a directory, got {str(folder)!r}; build the image first"
            )


def root_arguments(image: Image, python: Python) -> list[str]:
    """Bubblewrap's arguments for all that is read-only."""
    targets = [image.workdir, *image.layers]
    result = _host(python) if image.root is None else _expanded(image.root, "", targets)
    for target, source in image.layers.items():
        result += ["--ro-bind", str(source), target]
    return [*result, "--proc", "/proc", "--dev", "/dev"]


def environment(image: Image, python: Python) -> dict[str, str]:
    """The environment of every command."""
    own = image.root is None
    path = f"{PYTHON_MOUNT}/bin:{_PATH}" if own and python.source else _PATH
    if image.python:
        path = f"{posixpath.dirname(image.python)}:{path}"
    return {
        "PATH": path,
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONDONTWRITEBYTECODE": "1",
        **(python.environment if own else {}),
        **image.environment,
    }


def _host(python: Python) -> list[str]:
    links = [name for name in _LINKED if Path("/", name).is_symlink()]
    folders = [name for name in _LINKED if name not in links]
    result = ["--ro-bind", "/usr", "/usr"]
    for name in links:
        result += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    for name in folders:
        result += ["--ro-bind-try", f"/{name}", f"/{name}"]
    result += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    result += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    if python.source:
        result += ["--ro-bind", python.source, PYTHON_MOUNT]
    return result


def _expanded(folder: Path, place: str, targets: list[str]) -> list[str]:
    """Binds what is in `folder`, one level at a time where a mount point is missing below it."""
    result = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = f"{place}/{entry.name}"
        if path in targets or (not place and entry.name in _OWN):
            continue
        if entry.is_symlink():
            result += ["--symlink", os.readlink(entry.path), path]
        elif entry.is_dir() and any(
            target.startswith(path + "/") and not (folder / target[len(place) + 1 :]).is_dir()
            for target in targets
        ):
            result += _expanded(Path(entry.path), path, targets)
        elif stat.S_IFMT(entry.stat().st_mode) in (stat.S_IFDIR, stat.S_IFREG):
            result += ["--ro-bind", entry.path, path]
    return result
