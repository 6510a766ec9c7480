"""The data planes keep their contract: the embedded one, and a real HAProxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.data_plane_contract import DataPlaneContract
from tests.support.haproxy import needs_haproxy, running_haproxy
from tests.support.serving import AnyLab, running_lab


class TestEmbedded(DataPlaneContract):
    @pytest.fixture
    async def lab(self) -> AsyncIterator[AnyLab]:
        async with running_lab() as made:
            yield made


@needs_haproxy
class TestHaproxy(DataPlaneContract):
    @pytest.fixture
    async def lab(self, tmp_path: Path) -> AsyncIterator[AnyLab]:
        async with running_haproxy(tmp_path) as made:
            yield made
