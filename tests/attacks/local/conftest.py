"""Real supervisors on shares of a home of their own; every job here is an attacker."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runtime.tasks import StartTask, tasks_in


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartTask]:
    with tasks_in(tmp_path / "home") as make:
        yield make


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user of the machine can reach and write in."""
    place = Path(tempfile.mkdtemp(prefix="shoal-open-", dir="/srv"))
    place.chmod(0o777)
    yield place
    shutil.rmtree(place)
