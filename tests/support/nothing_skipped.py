"""Where `SHOAL_TESTS_SKIP=none` is set, as CI does, a test that skips has failed.

What a machine lacks is skipped elsewhere, and said. In CI everything can be had: if a package does not come,
whole suites would pass for having run nothing.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

SKIP = "SHOAL_TESTS_SKIP"
"""In the environment: `none`, or nothing."""


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get(SKIP) == "none":
        report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judge(report)
    return report
