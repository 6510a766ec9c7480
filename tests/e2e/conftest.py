"""What tests with real processes share: shares of a supervisor, and a gate where ranks wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.cluster_cuts import CutOff, cutting_off
from tests.support.cluster_plane import ClusterPlane
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


@pytest.fixture(scope="module")
def cut_off(plane: ClusterPlane) -> Iterator[CutOff]:
    """From before the first test of a file until its last."""
    with cutting_off(plane) as cut:
        yield cut


@pytest.fixture
def cleared(plane: ClusterPlane, cut_off: CutOff) -> Iterator[None]:
    """What a test submitted has ended afterwards, and nothing but the one node is cut off."""
    before = list(plane.submissions)
    yield
    for name in plane.lab.others(cut_off.node):
        plane.lab.heal(name)
    plane.end_all_but(before)
