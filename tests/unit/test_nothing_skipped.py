"""CI treats a skipped test as a failed one."""

from __future__ import annotations

import pytest

from tests.support import nothing_skipped

pytest_plugins = ["pytester"]

AT_RUN = """
import pytest

def test_it():
    pytest.skip("no such thing here")

@pytest.mark.skipif(True, reason="nor such a one")
def test_other(): ...
"""
AT_COLLECTION = """
import pytest

pytest.skip("no such thing here", allow_module_level=True)
"""


def _run(pytester: pytest.Pytester, program: str) -> dict[str, int]:
    pytester.makepyfile(program)
    done = pytester.runpytest_inprocess("-ra", plugins=[nothing_skipped])
    done.stdout.fnmatch_lines("*no such thing here*")
    return done.parseoutcomes()


@pytest.mark.parametrize(
    "program, skipped, failed",
    [(AT_RUN, {"skipped": 2}, {"failed": 1, "errors": 1}), (AT_COLLECTION, {"skipped": 1}, {"errors": 1})],
    ids=["run", "collection"],
)
def test_skipped_test_fails_where_nothing_may_be_missing(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    skipped: dict[str, int],
    failed: dict[str, int],
) -> None:
    monkeypatch.delenv(nothing_skipped.SKIP, raising=False)
    assert _run(pytester, program) == skipped
    monkeypatch.setenv(nothing_skipped.SKIP, "none")
    assert _run(pytester, program) == failed
