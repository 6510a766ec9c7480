"""One small cluster for all attacks; a test that must break something opens a world of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.world import World, open_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("world")) as opened:
        yield opened
