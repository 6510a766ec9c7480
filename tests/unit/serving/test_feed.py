"""What a data plane asks for, by what it has; and what the control plane makes of what it says it has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from shoal.control.services.book import ServiceBook
from shoal.serving import feed as feeding
from shoal.serving.feed import Feed, Reporter
from shoal.serving.plane import DataPlane
from shoal.serving.report import report
from shoal.serving.server import Server
from shoal.serving.table import Replica, Report, Service, Table
from tests.support.serving import until


class Told:
    """A control plane that says these tables, one after the other."""

    every_s = 0.0

    def __init__(self, *tables: Table) -> None:
        self._tables = list(tables)
        self.asked: list[str] = []

    async def read(self, known: str) -> bytes | None:
        self.asked.append(known)
        return msgspec.json.encode(self._tables.pop(0))


async def test_feed_names_the_history_of_what_it_has_and_follows_into_another() -> None:
    older = Table(version=4, epoch="a")
    told = Told(Table(version=5, epoch="a"), older, Table(version=1, epoch="b"), Table(version=2, epoch="b"))
    plane = DataPlane()
    feed = Feed(told, plane)
    for _ in range(4):
        await feed.read()
    assert told.asked == ["0", "a-5", "a-5", "b-1"]
    assert (plane.version, plane.epoch) == (2, "b")


async def test_table_that_was_taken_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "REPORT_EVERY_S", 3600.0)
    plane, file = DataPlane(), tmp_path / "report.json"
    feed = Feed(Told(Table(version=5, epoch="a")), plane)
    reporter = Reporter(lambda: report(plane), Server(""), file)
    feed.on_taken = reporter.soon
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(reporter.keep_telling())
        await feed.read()
        await until(file.exists)
        telling.cancel()
    assert msgspec.json.decode(file.read_bytes(), type=Report).version == 5


@pytest.mark.parametrize(("epoch", "knows"), [("new", True), ("", True), ("old", False)])
def test_data_plane_with_a_table_of_another_history_does_not_know_what_drains(
    epoch: str, knows: bool
) -> None:
    book = ServiceBook()
    replica = Replica(replica_id="r", address="10.0.0.7:1", release=1, is_draining=True)
    served = Service(project="p", name="s", replicas=(replica,))
    book.publish(Table(version=7, epoch="new", services=(served,)))
    for now in range(100):
        book.heard(Report(process_id="one", version=9, epoch=epoch), float(now))
    assert book.is_idle("r", 99.0) is knows
