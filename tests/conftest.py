"""Shapes and dtypes are checked where arrays are; in CI a missing service is a failure, not a skip."""

import os

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

CHECKED = ["kernels", "jaxrl.contracts", "jaxrl.rl", "jaxrl.statistics"]
# Ints pass for floats, as in every static checker.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
install_import_hook(CHECKED, CHECKER)

# How long an example takes says more about the machine than about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

IN_CI = os.environ.get("CI") == "true"


def _forbid_skip(report: pytest.CollectReport | pytest.TestReport) -> None:
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if item.get_closest_marker("accelerator") is None:
        _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _forbid_skip(report)
    return report
