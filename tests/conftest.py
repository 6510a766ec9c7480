"""What every test shares: one async backend, property tests that are slow rather than flaky, and an order."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from itertools import groupby

import hypothesis
import pytest
import structlog

from tests.support.nothing_skipped import pytest_make_collect_report, pytest_runtest_makereport
from tests.support.ray.real_ray import MakeRay, RayLab, ray_lab, what_is_missing

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]  # pytest finds hooks by their names

# A shell without job control starts what it puts in the background with SIGINT ignored, and programs that
# the tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a shared two-core machine may take a second where it took a millisecond before.
hypothesis.settings.register_profile("shoal", deadline=None, print_blob=True, max_examples=60)
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile("shoal")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first, some to each worker: one that is begun last keeps all others waiting.

    Tests of engines take root, daemons and minutes: they run when they are asked for (`-m engines`), and the
    longest of them and of the others by `-m soak` alone.

    A worker begins with its part of the list, and takes from the end of another's when it is through.
    """
    wanted = [item for item in items if _is_asked_for(item, config.option.markexpr)]
    config.hook.pytest_deselected(items=sorted(set(items) - set(wanted), key=lambda item: item.nodeid))
    items[:] = wanted
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    files = [list(together) for _, together in groupby(slow, key=lambda item: item.path)]
    ordered: list[pytest.Item] = []
    for number in range(workers):
        own = [item for file in files[number::workers] for item in file]
        room = max(0, len(items) // workers - len(own))
        ordered += [*own, *quick[:room]]
        del quick[:room]
    items[:] = [*ordered, *quick]
    _put_last(items)


def _is_asked_for(item: pytest.Item, markexpr: str) -> bool:
    if item.get_closest_marker("soak") is not None:
        return "soak" in markexpr
    return item.get_closest_marker("engines") is None or "engines" in markexpr


def _put_last(items: list[pytest.Item]) -> None:
    """Those that are to come last in their file do, at the places that the file has."""
    for path in {item.path for item in items if item.get_closest_marker("last") is not None}:
        places = [number for number, item in enumerate(items) if item.path == path]
        own = sorted((items[n] for n in places), key=lambda item: item.get_closest_marker("last") is not None)
        for number, item in zip(places, own, strict=True):
            items[number] = item


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def make_ray(tmp_path_factory: pytest.TempPathFactory) -> MakeRay:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    return lambda *args, **more: ray_lab(tmp_path_factory.mktemp("ray"), *args, **more)


@pytest.fixture(scope="session")
def ray_site(make_ray: MakeRay) -> Iterator[RayLab]:
    """One Ray for all files: a head and three nodes. Who is cut off for less than two minutes stays in it."""
    with make_ray(3, lost_after_s=120.0) as lab:
        yield lab


@pytest.fixture(autouse=True)
def same_log_afterwards() -> Iterator[None]:
    """Where logs go is one setting for the whole process: a test that changes it gives it back."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


class _LogRecords(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


@pytest.fixture(autouse=True)
def impossible_moves() -> Iterator[list[str]]:
    """In production, an event that cannot come ends its request in the data plane. In a test it is an error,
    unless the test takes it off this list.
    """
    log, handler = logging.getLogger("shoal.serving.exchange.ending"), _LogRecords()
    log.addHandler(handler)
    yield handler.records
    log.removeHandler(handler)
    assert handler.records == []
