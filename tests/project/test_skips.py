"""A skip is a report on a workstation and a failure in CI."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = """
import pytest

def test_passes():
    pass

def test_misses_a_service():
    pytest.skip("no docker here")

@pytest.mark.accelerator
def test_needs_a_gpu():
    pytest.skip("no GPU here")

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail():
    raise AssertionError
"""


def outcomes(folder: Path, ci: str) -> str:
    environment = os.environ | {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder).stdout


@pytest.fixture
def suite(tmp_path):
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    accelerator: x\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    return tmp_path


def test_elsewhere_it_is_reported(suite):
    output = outcomes(suite, "")
    assert "no docker here" in output
    assert re.search(r"1 passed, 2 skipped, 1 xfailed", output)


def test_in_ci_it_fails_but_for_accelerators(suite):
    output = outcomes(suite, "true")
    assert "skipped, which CI does not allow" in output
    assert re.search(r"1 failed, 1 passed, 1 skipped, 1 xfailed", output)


def test_in_ci_a_whole_module_may_not_be_skipped(suite):
    (suite / "test_cases.py").write_text("import pytest\npytest.importorskip('not_a_module_of_ours')\n")
    assert re.search(r"1 error", outcomes(suite, "true"))
