"""`make setup` in a fresh clone gives a working environment, and the second call does nothing."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    result = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fresh_clone_sets_itself_up(tmp_path):
    clone = tmp_path / "clone"
    run("git", "clone", "--quiet", str(ROOT), str(clone), cwd=tmp_path)
    assert ".venv is ready" in run("make", "setup", cwd=clone)
    assert "bootstrap" not in run("make", "setup", cwd=clone)
    where = run(
        str(clone / ".venv/bin/python"),
        "-c",
        "import jax, jaxrl.config as c; print(c.__file__)",
        cwd=tmp_path,
    )
    assert where.strip() == str(clone / "jaxrl" / "config.py")
    run(".venv/bin/python", "tools/bootstrap.py", cwd=clone)
    assert run("git", "status", "--porcelain", cwd=clone) == ""
