"""One small cluster for all attacks; a test that must break something opens a world of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.control.services import serving_table
from shoal.log import configure_log
from shoal.settings import ServerLimits
from tests.support.planes.world import ApiWorld, open_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    many = ServerLimits(max_tokens_per_user=1000)  # of one world for all these tests
    with (
        open_world(tmp_path_factory.mktemp("world"), limits=many) as opened,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(serving_table, "CONFIRM_S", 0.05)  # no data plane listens that could confirm anything
        yield opened


@pytest.fixture(scope="session", autouse=True)
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file to which the servers of these tests log, as real ones do."""
    path = tmp_path_factory.mktemp("logs") / "control.log"
    configure_log(path)
    return path
