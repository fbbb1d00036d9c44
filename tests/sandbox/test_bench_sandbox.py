"""The sandbox benchmark runs, and notices what is left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_measures_and_finds_nothing_left(tmp_path: Path) -> None:
    sizes = ["--starts", "2", "--live", "3", "--cycles", "4", "--docker", "", "--podman", ""]
    command = [sys.executable, "tools/bench_sandbox.py", *sizes, "--json", str(tmp_path / "result.json")]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (measured,) = json.loads((tmp_path / "result.json").read_text())
    assert measured["backend"] == "namespace" and measured["live"] == 3 and measured["start_ms"] > 0
    assert not any(measured["left"].values()) and "nothing" in result.stdout
