"""A running data plane with an empty table."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.serving.data_plane_lab import EmbeddedLab, running_lab


@pytest.fixture
async def lab() -> AsyncIterator[EmbeddedLab]:
    async with running_lab() as running:
        yield running
