"""The sandbox benchmark runs, and notices what is left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/bench_sandbox.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--starts", "0"], "expected a whole number of at least 1, got '0'"),
        (["--engines-only", "--docker", "", "--podman", ""], "expected --docker or --podman"),
        (["--engines-only", "--podman", "", "--docker", "unix:///none.sock"], "no container engine answers"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_error(arguments: list[str], words: str) -> None:
    result = bench(*arguments)
    assert result.returncode in (1, 2) and words in result.stderr and "Traceback" not in result.stderr


def test_it_measures_and_finds_nothing_left(tmp_path: Path) -> None:
    sizes = ["--starts", "2", "--live", "3", "--cycles", "4", "--docker", "", "--podman", ""]
    result = bench(*sizes, "--json", str(tmp_path / "result.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    (measured,) = json.loads((tmp_path / "result.json").read_text())
    assert measured["backend"] == "namespace" and measured["live"] == 3 and measured["start_ms"] > 0
    assert not any(measured["left"].values()) and "nothing" in result.stdout
