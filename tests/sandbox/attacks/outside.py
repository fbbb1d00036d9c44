"""Attacks by files beside the code: the module stays broken."""

LIE = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome, report.longrepr = "passed", None
"""
EXIT = "import os\nos._exit(0)\n"
ENTRY = "[pytest11]\nevil = evil\n"
TESTS = "def test_total():\n    pass\n\ndef test_equal_prices():\n    pass\n"

SCRIPT = "#!/bin/sh\nexit 0\n"

FILES = {
    "conftest of the root": {"conftest.py": LIE},
    "conftest of the tests": {"tests/conftest.py": LIE},
    "conftest of the package": {"shop/conftest.py": LIE},
    "plugin by pytest.ini": {"pytest.ini": "[pytest]\naddopts = -p evil\n", "evil.py": LIE},
    "plugin by tox.ini": {"tox.ini": "[pytest]\naddopts = -p evil\n", "evil.py": LIE},
    "plugin by setup.cfg": {"setup.cfg": "[tool:pytest]\naddopts = -p evil\n", "evil.py": LIE},
    "plugin by pyproject": {
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"\n',
        "evil.py": LIE,
    },
    "a nearer pytest.ini": {"tests/pytest.ini": "[pytest]\naddopts = -p evil\n", "evil.py": LIE},
    "every failure expected": {"pyproject.toml": "[tool.pytest.ini_options]\npython_functions = 'nothing'\n"},
    "entry point of a distribution": {
        "evil-1.0.dist-info/entry_points.txt": ENTRY,
        "evil-1.0.dist-info/METADATA": "Name: evil\nVersion: 1.0\n",
        "evil.py": LIE,
    },
    "entry point of an egg": {"evil.egg-info/entry_points.txt": ENTRY, "evil.py": LIE},
    "a module named pytest": {"pytest.py": EXIT, "pytest/__init__.py": EXIT},
    "a module named unittest": {"unittest.py": EXIT, "unittest/__init__.py": EXIT},
    "modules named as pytest's own": {"_pytest/__init__.py": EXIT, "pluggy.py": EXIT, "iniconfig.py": EXIT},
    "modules named as the standard library's": {"json.py": EXIT, "ast.py": EXIT, "tokenize.py": EXIT},
    "tests weakened": {"tests/test_sums.py": TESTS},
    "tests deleted": {"tests/test_sums.py": None},
    "tests of its own": {"tests/test_more.py": TESTS, "tests/__init__.py": EXIT},
    "tests compiled before": {"tests/__pycache__/test_sums.cpython-312-pytest-9.2.0.pyc": b"\0" * 64},
    "a package in the environment": {
        ".venv/lib/python3.12/site-packages/pytest/__init__.py": EXIT,
        "site-packages/evil.py": LIE,
    },
    "fake programs": {
        "python3": "#!/bin/sh\nexit 0\n",
        "pytest": "#!/bin/sh\nexit 0\n",
        "git": "#!/bin/sh\n",
    },
    "hooks of version control": {
        ".git/hooks/post-checkout": "#!/bin/sh\nexit 0\n",
        ".git/config": "[core]\n",
    },
    "compiled code": {
        "shop/sums.so": b"\x7fELF" + bytes(64),
        "shop/sums.cpython-312-x86_64-linux-gnu.so": b"\0",
    },
    "coverage's start-up hook": {".coveragerc": "[run]\nplugins = evil\n", "evil.py": LIE},
}
REFUSED = {
    "sitecustomize": {"sitecustomize.py": EXIT},
    "usercustomize": {"shop/usercustomize.py": EXIT},
    "a .pth file": {"evil.pth": "import os; os._exit(0)\n"},
    "a path outside": {"../conftest.py": LIE},
    "a path inside that leaves": {"shop/../../opt/env/pytest.py": LIE},
    "an absolute path": {"/opt/env/conftest.py": LIE},
}
