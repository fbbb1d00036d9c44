"""What a sandbox sees of an image: its root, its layers, its environment."""

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.base import Image, SandboxError

PYTHON_MOUNT = "/opt/python"
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64")
_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class Python:
    """The backend's own interpreter inside sandboxes. `prefix` None: it is part of /usr already."""

    executable: str
    prefix: Path | None
    environment: Mapping[str, str]


@dataclass(frozen=True)
class View:
    """An image with the places where the keeper sees its directories. `lower`: below the working one."""

    image: Image
    python: str | None = None
    root: str | None = None
    lower: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict)


def check(image: Image) -> None:
    """Raises `SandboxError` for an image that cannot be shown."""
    inside = {"workdir": image.workdir} | {f"layers[{path!r}]": path for path in image.layers}
    inside |= {f"covered path {path!r}": path for path in (*image.covered_folders, *image.covered_files)}
    for key, path in inside.items():
        if path == "/" or not path.startswith("/") or posixpath.normpath(path) != path:
            raise SandboxError(f"image {key}: expected a normal absolute path other than /, got {path!r}")
    for key, path in (("source", image.source), ("root", image.root)):
        if path is not None and not (path.is_dir() or path.is_file()):
            raise _missing(key, "a directory, squashfs or SIF file", path)
    for target, path in image.layers.items():
        if not path.is_dir():
            raise _missing(f"layers[{target!r}]", "a directory", path)
    for path in (*image.covered_folders, *image.covered_files):
        if _overlap(path, image.workdir):
            raise SandboxError(f"image covered paths: expected none of the working directory, got {path}")


def _overlap(path: str, other: str) -> bool:
    """Whether one of two paths lies in the other."""
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


def _missing(key: str, expected: str, path: Path) -> SandboxError:
    return SandboxError(f"image {key}: expected {expected}, got {path}; build the image first")


def root_arguments(view: View) -> list[str]:
    """Bubblewrap's arguments for all that is read-only. The keeper replaces "{root}" and "{empty}"."""
    result = ["{root}"] if view.root else _host(view.python)
    for target, source in view.layers.items():
        result += ["--ro-bind", source, target]
    for folder in view.image.covered_folders:
        result += ["--perms", "0555", "--tmpfs", folder, "--remount-ro", folder]
    for file in view.image.covered_files:
        result += ["--ro-bind", "{empty}", file]
    return [*result, "--proc", "/proc", "--dev", "/dev"]


def environment(image: Image, python: Python) -> dict[str, str]:
    """The environment of every command."""
    own = image.root is None
    path = f"{PYTHON_MOUNT}/bin:{_PATH}" if own and python.prefix else _PATH
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


def _host(python: str | None) -> list[str]:
    links = [name for name in _LINKED if Path("/", name).is_symlink()]
    folders = [name for name in _LINKED if name not in links]
    result = ["--ro-bind", "/usr", "/usr"]
    for name in links:
        result += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    for name in folders:
        result += ["--ro-bind-try", f"/{name}", f"/{name}"]
    result += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    result += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    return [*result, "--ro-bind", python, PYTHON_MOUNT] if python else result
