"""What tests with real processes share: shares of a supervisor, and a gate where ranks wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_plane import Gate, open_gate
from tests.support.shares import Start, shares_in


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with shares_in(tmp_path / "home") as make:
        yield make


@pytest.fixture
def gate() -> Iterator[Gate]:
    with open_gate() as opened:
        yield opened
