"""Locked environments: exact pins with hashes, installed once, shown read-only at /opt/env.

An environment is made like a virtual one of the interpreter that sandboxes have: `/opt/env/bin/python`
runs it. The paths in it hold inside sandboxes only. The working directory, and its `src`, are on the
import path, after all that is installed.
"""

import compileall
import hashlib
import os
import platform
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sandbox.base import Image
from sandbox.bubblewrap import locate
from sandbox.images.cache import ImageBuildError, built, cache_directory

MOUNT = "/opt/env"
PYTHON = f"{MOUNT}/bin/python"
_FORMAT = "1"  # of what is built: part of its address
_SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
# Git refuses repositories of another owner; in a sandbox the tree is the image's.
_GIT = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}


def build_environment(requirements: Path, *, workdir: str = "/testbed") -> Path:
    """Directory with what `requirements` (pins with hashes) lists, from the cache if it is there.

    Raises `ImageBuildError` if the file or pip is missing, or pip cannot install a pin.
    """
    if not requirements.is_file():
        raise ImageBuildError(f"{requirements}: expected a file of pins with hashes; there is none")
    interpreter = locate().python.executable
    parts = (_FORMAT, sys.version, interpreter, platform.machine(), workdir, requirements.read_text())
    address = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]

    def build(top: Path) -> None:
        _install(requirements, top / _SITE)
        _scripts(top / _SITE / "bin", top / "bin", interpreter)
        version = ".".join(map(str, sys.version_info[:3]))
        home = os.path.dirname(interpreter)
        text = f"home = {home}\ninclude-system-site-packages = false\nversion = {version}\n"
        (top / "pyvenv.cfg").write_text(text)
        (top / _SITE / "workdir.pth").write_text(f"{workdir}\n{workdir}/src\n")
        _compile(top)

    return built(cache_directory("environments") / address, build)


def environment_image(environment: Path, *, source: Path | None = None, workdir: str = "/testbed") -> Image:
    """The host's /usr and interpreter with `environment` over it, and a working copy of `source`."""
    return Image(layers={MOUNT: environment}, source=source, workdir=workdir, python=PYTHON, environment=_GIT)


def _install(requirements: Path, site: Path) -> None:
    pip(
        ["install", "--quiet", "--require-hashes", "--no-deps", "--no-compile", "--only-binary", ":all:"]
        + ["--target", str(site), "--requirement", str(requirements)],
        doing=f"{requirements}: install its pins",
    )


def pip(arguments: Sequence[str], *, doing: str) -> None:
    """Runs this interpreter's pip. Raises `ImageBuildError` with pip's last words."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        words = "\n".join(done.stderr.strip().splitlines()[-5:]) or f"exit status {done.returncode}"
        raise ImageBuildError(f"could not {doing} with pip: {words}")


def _scripts(made: Path, target: Path, interpreter: str) -> None:
    """Moves what pip put into `made` to `target`, to be run by the environment's own interpreter."""
    target.mkdir(parents=True)
    for name in ("python", "python3"):
        (target / name).symlink_to(interpreter)
    for script in sorted(made.iterdir()) if made.is_dir() else ():
        first, _, rest = script.read_bytes().partition(b"\n")
        if first.startswith(b"#!"):
            (target / script.name).write_bytes(f"#!{PYTHON}\n".encode() + rest)
            (target / script.name).chmod(0o755)
    shutil.rmtree(made, ignore_errors=True)


def _compile(top: Path) -> None:
    """Byte code beside the sources, since nobody can write it later; it names paths inside sandboxes."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(top / _SITE, quiet=2, stripdir=str(top), prependdir=MOUNT, invalidation_mode=mode)
