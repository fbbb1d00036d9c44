"""Makes a private environment from locked requirements. Standard library only; runs on Python 3.8+.

    python3 tools/bootstrap.py [--environment .venv] [--requirements requirements/all.txt]

`uv` comes by pip into `.uv`, a Python >= 3.12 is found or fetched, then every locked package is
installed by hash. Does nothing when the environment already matches the lock.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV_ENVIRONMENT = ROOT / ".uv"
UV = UV_ENVIRONMENT / "bin" / "uv"
OLDEST = (3, 12)
PROBE = "import sys, venv; print(*sys.version_info[:2])"


def run(*command: str | Path) -> None:
    """Runs and shows a command; ends the program with its exit status if it fails."""
    print("+", *command, flush=True)
    status = subprocess.run([str(part) for part in command], cwd=ROOT).returncode
    if status:
        sys.exit(status)


def install_uv() -> None:
    """`uv` in a virtual environment of its own, by pip and hash."""
    stamp = UV_ENVIRONMENT / "lock.sha256"
    digest = digest_of([ROOT / "requirements" / "uv.txt"])
    if UV.exists() and stamp.exists() and stamp.read_text() == digest:
        return
    run(sys.executable, "-m", "venv", "--clear", UV_ENVIRONMENT)
    pip = [UV_ENVIRONMENT / "bin" / "python", "-m", "pip"]
    run(*pip, "install", "--quiet", "--require-hashes", "-r", "requirements/uv.txt")
    stamp.write_text(digest)


def digest_of(files: list[Path]) -> str:
    """SHA-256 of the files' contents, in order."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def candidates() -> list[str]:
    """Interpreters worth a try: this one, those on PATH (the version of the lock first), then pyenv's."""
    minors = range(OLDEST[1], 15)
    found = [sys.executable] + [f"python3.{minor}" for minor in minors] + ["python3"]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    if not os.access(pyenv, os.R_OK | os.X_OK):  # none, or another user's
        return found
    for minor in minors:
        found += [str(path) for path in sorted(pyenv.glob(f"3.{minor}*/bin/python"), reverse=True)]
    return found


def version_of(interpreter: str) -> tuple[int, ...] | None:
    """(major, minor) by running it; None if it does not run (a pyenv shim without its version, say)."""
    path = shutil.which(interpreter)
    if path is None:
        return None
    try:
        result = subprocess.run([path, "-I", "-c", PROBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    fields = result.stdout.split()
    return tuple(map(int, fields)) if result.returncode == 0 and len(fields) == 2 else None


def find_python() -> str:
    """A Python that is new enough, or one that `uv` fetches. Exits with what was tried if neither works."""
    tried = []
    for candidate in candidates():
        version = version_of(candidate)
        if version is not None and version >= OLDEST:
            return shutil.which(candidate) or candidate
        tried.append(f"{candidate} ({'.'.join(map(str, version)) if version else 'does not run'})")
    fetch = [str(UV), "python", "install", "3.12"]
    print("no Python >= 3.12 here; +", *fetch, flush=True)
    if subprocess.run(fetch).returncode == 0:
        return "3.12"
    sys.exit(
        "expected a Python >= 3.12; tried " + ", ".join(tried) + ", and uv could not fetch one.\n"
        "Install Python 3.12 or newer and put `python3.12` on PATH, then run `make setup` again."
    )


def build(environment: Path, requirements: Path) -> None:
    """Creates `environment` with exactly `requirements`, and this checkout in editable form."""
    run(UV, "venv", "--quiet", "--clear", "--no-project", "--python", find_python(), environment)
    python = environment / "bin" / "python"
    run(UV, "pip", "sync", "--quiet", "--require-hashes", "--python", python, requirements)
    if "hatchling==" in requirements.read_text():
        editable = ["--no-deps", "--no-build-isolation", "--editable", "."]
        run(UV, "pip", "install", "--quiet", "--python", python, *editable)


def main() -> None:
    """Brings one environment up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--environment", default=".venv")
    parser.add_argument("--requirements", default="requirements/all.txt")
    arguments = parser.parse_args()
    environment, requirements = ROOT / arguments.environment, ROOT / arguments.requirements
    stamp = environment / "ready.json"
    state = {"digest": digest_of([requirements, ROOT / "pyproject.toml"]), "at": str(ROOT)}
    if stamp.exists() and json.loads(stamp.read_text()) == state:
        stamp.touch()
        return
    install_uv()
    build(environment, requirements)
    stamp.write_text(json.dumps(state))
    print(f"{environment.relative_to(ROOT)} is ready")


if __name__ == "__main__":
    main()
