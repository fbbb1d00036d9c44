"""A Debian root by mmdebstrap, for sandboxes that must not see the host's /usr."""

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sandbox.images.cache import built, cache_directory
from sandbox.images.environment import ImageBuildError

PACKAGES = ("bash", "git", "procps", "python3", "python3-pytest")
_LEFT_OUT = ("dev", "proc", "sys", "run", "tmp", "var/cache", "var/lib/apt")


def build_debian(suite: str, packages: Sequence[str] = PACKAGES) -> Path:
    """A root directory of Debian `suite` with `packages`, from the cache if it is there.

    A root of another day may hold newer packages: remove it from the cache to renew it. Raises
    `ImageBuildError` if mmdebstrap is missing or fails.
    """
    program = shutil.which("mmdebstrap")
    if program is None:
        raise ImageBuildError("expected mmdebstrap on PATH to make a Debian root: apt install mmdebstrap")
    wanted = "\0".join((suite, platform.machine(), *sorted(packages)))
    address = hashlib.sha256(wanted.encode()).hexdigest()[:20]

    def build(top: Path) -> None:
        tar = top / "root.tar"
        options = ["--variant=minbase", f"--include={','.join(sorted(packages))}", "--quiet"]
        _run([program, *options, suite, str(tar)], f"make a root of Debian {suite}")
        root = top / "root"
        root.mkdir()
        left_out = [f"--exclude=./{path}/*" for path in _LEFT_OUT]
        _run(
            ["tar", "--extract", "--no-same-owner", *left_out, "--file", str(tar), "--directory", str(root)],
            "unpack the root",
        )
        tar.unlink()

    return built(cache_directory("roots") / address, build) / "root"


def _run(command: Sequence[str], doing: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        words = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ImageBuildError(f"could not {doing}: {command[0]} ended with {done.returncode}: {words}")
