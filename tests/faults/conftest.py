"""Where these clusters live: jobs run as other users, which pytest's own directories keep out."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shoal-faults-", ignore_cleanup_errors=True) as place:
        yield Path(place)
