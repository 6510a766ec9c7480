"""The data planes keep their contract: the embedded one and a real HAProxy, directly and through sidecars."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract.data_plane.data_plane_contract import DataPlaneContract
from tests.support.serving.data_plane_lab import DataPlaneLab, request_bytes, running_lab, service
from tests.support.serving.haproxy import needs_haproxy, running_haproxy
from tests.support.serving.sidecars import SidecarAuthority, ThreadSidecars


class TestEmbedded(DataPlaneContract):
    @pytest.fixture
    async def lab(self) -> AsyncIterator[DataPlaneLab]:
        async with running_lab() as running:
            yield running


@needs_haproxy
class TestHaproxy(DataPlaneContract):
    @pytest.fixture
    async def lab(self, tmp_path: Path) -> AsyncIterator[DataPlaneLab]:
        async with running_haproxy(tmp_path) as running:
            yield running


@pytest.fixture
def sidecars() -> Iterator[ThreadSidecars]:
    sidecars = ThreadSidecars(SidecarAuthority())
    yield sidecars
    sidecars.end()


class TestEmbeddedThroughSidecars(DataPlaneContract):
    @pytest.fixture
    async def lab(self, sidecars: ThreadSidecars) -> AsyncIterator[DataPlaneLab]:
        async with running_lab() as running:
            running.sidecars = sidecars
            yield running


@needs_haproxy
@pytest.mark.soak
class TestHaproxyThroughSidecars(DataPlaneContract):
    @pytest.fixture
    async def lab(self, tmp_path: Path, sidecars: ThreadSidecars) -> AsyncIterator[DataPlaneLab]:
        async with running_haproxy(tmp_path) as running:
            running.sidecars = sidecars
            yield running

    async def test_replica_that_is_gone_costs_no_request_of_any_kind(self, lab: DataPlaneLab) -> None:
        """HAProxy ignores the ready byte: while a sidecar outlives its server, a POST may be lost."""
        gone, good = await lab.add_replica("gone"), await lab.add_replica("good")
        lab.serve(service(gone, good))
        await gone.stop()
        answers = [await lab.ask(request_bytes()) for _ in range(10)]
        assert {answer.body for answer in answers} == {b"good"}
        posted = [await lab.ask(request_bytes(method="POST", body=b"x")) for _ in range(10)]
        assert {answer.status for answer in posted} <= {200, 502}
