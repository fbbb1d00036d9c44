"""Writes the locked requirements: exact pins with hashes, for Linux on x86-64 and aarch64.

    python tools/lock.py [--upgrade]

One universal resolution serves both machines; each is then resolved alone from the pins as a check.
No file names an index: where packages come from is the environment's business.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".uv" / "bin" / "uv"
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
COMMAND = "make lock"


def compile_pins(source: list[str], output: str, *options: str) -> None:
    """Resolves `source` into the lock file `output`. Raises `CalledProcessError` if it can't."""
    subprocess.run(
        [UV, "pip", "compile", *source, "--quiet", "--universal", "--python-version", "3.12"]
        + ["--generate-hashes", "--custom-compile-command", COMMAND, "--output-file", output, *options],
        cwd=ROOT,
        check=True,
    )


def check_platform(lock: str, platform: str, *options: str) -> None:
    """Raises `CalledProcessError` unless every pin of `lock` has a wheel for `platform`."""
    subprocess.run(
        [UV, "pip", "compile", lock, "--quiet", "--python-version", "3.12"]
        + ["--only-binary", ":all:", "--python-platform", platform, "--output-file", "/dev/null", *options],
        cwd=ROOT,
        check=True,
    )
    print(f"{lock}: complete for {platform}")


def main() -> None:
    """Locks, then checks."""
    options = sys.argv[1:]
    compile_pins(["requirements/uv.in"], "requirements/uv.txt", *options)
    extras = ["--extra", "docker", "--extra", "tensorboard", "--extra", "dev"]
    compile_pins(["pyproject.toml"], "requirements/all.txt", *extras, *options)
    compile_pins(["--group", "nojax"], "requirements/nojax.txt", "-c", "requirements/all.txt")
    jetstream = ["pyproject.toml", "--extra", "jetstream", "--group", "jetstream"]
    compile_pins(jetstream, "requirements/jetstream.txt", "-c", "requirements/all.txt")
    for lock in ("requirements/all.txt", "requirements/nojax.txt"):
        for platform in PLATFORMS:
            check_platform(lock, platform)
    for platform in PLATFORMS:  # a package of pure Python that JetStream needs has never had a wheel
        check_platform("requirements/jetstream.txt", platform, "--no-binary", "promise")


if __name__ == "__main__":
    main()
