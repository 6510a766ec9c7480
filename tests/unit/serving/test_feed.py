"""A data plane asks for tables by the version it has, and the control plane uses the versions it reports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from shoal.control.services.state import ServiceState
from shoal.serving import feed as feeding
from shoal.serving.feed import LeaderSource, ServingReporter, TableFeed
from shoal.serving.leader_client import LeaderClient
from shoal.serving.plane import DataPlane
from shoal.serving.report import report
from shoal.serving.table import ReplicaConfig, ServiceConfig, ServingReport, ServingTable
from tests.support.serving.data_plane_lab import until


class FakeTableSource:
    """A control plane that returns these tables, one after the other."""

    every_s = 0.0

    def __init__(self, *tables: ServingTable) -> None:
        self._tables = list(tables)
        self.asked: list[str] = []

    async def read(self, current: str) -> bytes | None:
        self.asked.append(current)
        return msgspec.json.encode(self._tables.pop(0))

    async def keep(self, table: bytes) -> None:
        """Nothing here lasts."""


async def test_feed_sends_the_epoch_it_has_and_follows_into_another() -> None:
    older = ServingTable(version=4, epoch="a")
    source = FakeTableSource(
        ServingTable(version=5, epoch="a"),
        older,
        ServingTable(version=1, epoch="b"),
        ServingTable(version=2, epoch="b"),
    )
    plane = DataPlane()
    feed = TableFeed(source, plane)
    for _ in range(4):
        await feed.read()
    assert source.asked == ["0", "a-5", "a-5", "b-1"]
    assert (plane.version, plane.epoch) == (2, "b")


async def test_only_a_table_that_was_taken_replaces_the_one_in_the_cache(tmp_path: Path) -> None:
    good = msgspec.json.encode(ServingTable(version=5, epoch="a"))
    older = msgspec.json.encode(ServingTable(version=4, epoch="a"))
    replies = [good, older, b"<html>"]
    server = SimpleNamespace(request=lambda *_, **__: (200, replies.pop(0)))
    source = LeaderSource(cast("LeaderClient", server), "/table", tmp_path / "cache")
    feed = TableFeed(source, DataPlane())
    while replies:
        await feed.read()
        assert source.cached_table() == good


async def test_new_table_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "REPORT_EVERY_S", 3600.0)
    plane, file = DataPlane(), tmp_path / "report.json"
    feed = TableFeed(FakeTableSource(ServingTable(version=5, epoch="a")), plane)
    reporter = ServingReporter(lambda: report(plane), LeaderClient(""), file)
    feed.on_new_table = reporter.send_soon
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(reporter.keep_sending())
        await feed.read()
        await until(file.exists)
        telling.cancel()
    assert msgspec.json.decode(file.read_bytes(), type=ServingReport).version == 5


@pytest.mark.parametrize(("epoch", "knows"), [("new", True), ("", True), ("old", False)])
def test_data_plane_with_a_table_of_another_epoch_does_not_know_which_replicas_drain(
    epoch: str, knows: bool
) -> None:
    book = ServiceState()
    replica = ReplicaConfig(replica_id="r", address="10.0.0.7:1", release=1, is_draining=True)
    served = ServiceConfig(project="p", name="s", replicas=(replica,))
    book.publish(ServingTable(version=7, epoch="new", services=(served,)))
    for now in range(100):
        book.note_report(ServingReport(process_id="one", version=9, epoch=epoch), float(now))
    assert book.is_idle("r", 99.0) is knows
