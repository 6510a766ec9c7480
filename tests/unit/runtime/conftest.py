"""Nodes for tests of the hang detector."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.runtime.rank_boards import WatchedNode


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedNode]:
    watched = WatchedNode(monkeypatch)
    yield watched
    os.close(watched.fd)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedNode]:
    """One of two nodes. Its ranks wait for a rank of the other one."""
    watched = WatchedNode(monkeypatch, nodes=2, waits_for_others=True)
    yield watched
    os.close(watched.fd)
