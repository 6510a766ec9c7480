"""The data planes keep their contract: the embedded one, and a real HAProxy; also through porches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract.data_plane_contract import DataPlaneContract
from tests.support.haproxy import needs_haproxy, running_haproxy
from tests.support.porches import Cluster, ThreadPorches
from tests.support.serving import AnyLab, get, running_lab, service


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


@pytest.fixture
def porches() -> Iterator[ThreadPorches]:
    made = ThreadPorches(Cluster())
    yield made
    made.end()


class TestEmbeddedThroughPorches(DataPlaneContract):
    @pytest.fixture
    async def lab(self, porches: ThreadPorches) -> AsyncIterator[AnyLab]:
        async with running_lab() as made:
            made.porches = porches
            yield made


@needs_haproxy
@pytest.mark.soak
class TestHaproxyThroughPorches(DataPlaneContract):
    @pytest.fixture
    async def lab(self, tmp_path: Path, porches: ThreadPorches) -> AsyncIterator[AnyLab]:
        async with running_haproxy(tmp_path) as made:
            made.porches = porches
            yield made

    async def test_replica_that_is_gone_costs_no_request_of_any_kind(self, lab: AnyLab) -> None:
        """HAProxy does not hear the porch's word: while a porch outlives its server, a POST may be lost."""
        gone, good = await lab.replica("gone"), await lab.replica("good")
        lab.serve(service(gone, good))
        await gone.stop()
        answers = [await lab.ask(get()) for _ in range(10)]
        assert {answer.body for answer in answers} == {b"good"}
        posted = [await lab.ask(get(method="POST", body=b"x")) for _ in range(10)]
        assert {answer.status for answer in posted} <= {200, 502}
