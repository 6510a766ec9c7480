"""A data plane with nothing to serve yet."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.serving import Lab, running_lab


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    async with running_lab() as made:
        yield made
