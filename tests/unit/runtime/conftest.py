"""The nodes that tests of the lookout share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.watched_node import Node


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(monkeypatch)
    yield made
    os.close(made.fd)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """One of two nodes; its ranks wait for one of the other."""
    made = Node(monkeypatch, nodes=2, is_elsewhere=True)
    yield made
    os.close(made.fd)
