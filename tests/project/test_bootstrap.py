"""The bootstrap finds a Python that runs, and the lock it installs is complete and names no index."""

import importlib.util
import os
import re
import stat
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def load_tool():
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = load_tool()


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_only_interpreters_that_run_have_a_version(tmp_path):
    assert bootstrap.version_of(sys.executable) == sys.version_info[:2]
    assert bootstrap.version_of(script(tmp_path / "shim", "echo 'not installed' >&2; exit 127")) is None
    assert bootstrap.version_of(script(tmp_path / "noise", "echo hello")) is None
    assert bootstrap.version_of(str(tmp_path / "missing")) is None


def test_a_broken_shim_is_passed_over_for_an_interpreter_of_pyenv(tmp_path, monkeypatch):
    script(tmp_path / "shims" / "python3.12", "exit 127")
    script(tmp_path / "shims" / "python3", "echo 3 11")
    real = script(tmp_path / "versions" / "3.13.0" / "bin" / "python", "echo 3 13")
    script(tmp_path / "versions" / "3.9.1" / "bin" / "python", "echo 3 9")
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(bootstrap.sys, "executable", script(tmp_path / "old", "echo 3 8"))
    assert bootstrap.find_python() == real


def test_pyenv_of_another_user_is_passed_over(tmp_path, monkeypatch):
    script(tmp_path / "versions" / "3.13.0" / "bin" / "python", "echo 3 13")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert any(str(tmp_path) in each for each in bootstrap.candidates())
    monkeypatch.setattr(bootstrap.os, "access", lambda path, mode: False)  # as root, nothing is unreadable
    assert not any(str(tmp_path) in each for each in bootstrap.candidates())


def test_without_any_interpreter_the_error_says_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(bootstrap.sys, "executable", script(tmp_path / "old", "echo 3 8"))
    monkeypatch.setattr(bootstrap, "UV", script(tmp_path / "uv", "exit 1"))
    with pytest.raises(SystemExit) as caught:
        bootstrap.find_python()
    assert f"{tmp_path / 'old'} (3.8)" in str(caught.value)
    assert "python3.12 (does not run)" in str(caught.value)
    assert "Install Python 3.12" in str(caught.value)


def test_an_environment_that_matches_its_lock_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/all.txt", "pyproject.toml"):
        (tmp_path / name).write_text("x")
    built = []

    def build(environment: Path, requirements: Path) -> None:
        environment.mkdir(exist_ok=True)
        built.append(requirements.name)

    monkeypatch.setattr(bootstrap, "install_uv", lambda: None)
    monkeypatch.setattr(bootstrap, "build", build)
    monkeypatch.setattr(bootstrap.sys, "argv", ["bootstrap.py"])
    bootstrap.main()
    os.utime(tmp_path / "pyproject.toml")
    bootstrap.main()
    assert built == ["all.txt"]
    (tmp_path / "requirements" / "all.txt").write_text("y")
    bootstrap.main()
    assert built == ["all.txt", "all.txt"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_locks_are_exact_pins_with_hashes_and_name_no_index(lock):
    text = lock.read_text()
    assert not re.search(r"://|index-url|find-links|trusted-host", text)
    entries = [entry for entry in re.split(r"\n(?=\S)", text) if not entry.startswith("#")]
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==[\w.]+(?: ; [^\\]+)? \\\n    --hash=sha256:[0-9a-f]{64}", entry), entry


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([\w.]+)", text, re.MULTILINE))


def test_the_environments_have_the_same_pins():
    assert pins("nojax.txt").items() < pins("all.txt").items()
    assert not pins("nojax.txt").keys() & {"jax", "jaxlib", "flax", "optax"}
    jetstream = pins("jetstream.txt")
    assert {"google-jetstream", "tensorflow"} <= jetstream.keys() - pins("all.txt").keys()
    shared = jetstream.keys() & pins("all.txt").keys()
    assert "jax" in shared and {name: jetstream[name] for name in shared}.items() <= pins("all.txt").items()
