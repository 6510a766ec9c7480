"""A service on a real control plane: served, listed in the table, scaled, repaired and stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes.real import RealPlane, until
from tests.support.serving.service import ServedApp, get_text, server_pid

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedApp]:
    plane = RealPlane(tmp_path / "home", demo="2x4")
    plane.up()
    folder = tmp_path / "hello"
    folder.mkdir()
    yield ServedApp(plane, folder)
    plane.down()


def test_service_is_served_scaled_by_hand_and_stopped(served: ServedApp) -> None:
    created = served.serve(replicas=2)
    assert (created["ref"], created["newest_release"]) == ("default/hello", 1)
    addresses = served.until_ready(2)
    assert len({get_text(address) for address in addresses}) == 2
    assert all(get_text(address).startswith("1 ") for address in addresses)
    shown = served.plane.command("services", "hello").stdout
    assert shown.count("ready") == 3
    assert "hello@1.2" in served.plane.command("queue").stdout
    served.plane.command("scale", "hello", "3")
    served.until_ready(3)
    served.plane.command("scale", "hello", "1")
    served.until_ready(1)
    table = served.table()
    assert table is not None
    assert served.table(after=table.version) is None
    assert "stopping" in served.plane.command("stop", "hello").stdout
    until(lambda: not served.plane.shoal.services.all(), "the service is gone")
    newer = served.table(after=table.version, wait_s=20.0)
    assert newer is not None
    assert newer.services == ()
    assert served.plane.command("queue").stdout.startswith("no open jobs")


def test_replica_that_dies_or_stops_answering_is_replaced_once(served: ServedApp) -> None:
    readiness = {"path": "/health", "interval": 0.1, "timeout": 1, "failures": 1, "dead_after": "1s"}
    served.serve(replicas=1, readiness=readiness)
    served.until_ready(1)
    for harm in (signal.SIGKILL, signal.SIGSTOP):
        [(before, address)] = served.replicas().items()
        os.kill(server_pid(address), harm)
        served.until_other(before)
    assert len(served.plane.shoal.services.show("hello")["servers"]) == 1


def test_killed_control_plane_continues_with_the_existing_replicas(served: ServedApp) -> None:
    served.serve(replicas=2)
    before = sorted(map(get_text, served.until_ready(2)))
    served.plane.kill()
    served.plane.up()
    assert sorted(map(get_text, served.addresses())) == before
    served.plane.command("scale", "hello", "3")
    served.until_ready(3)
    jobs = served.plane.shoal.jobs(name="hello")
    assert sum(1 for _ in jobs) == 3


def test_control_plane_killed_at_any_moment_starts_no_replica_twice(served: ServedApp) -> None:
    served.serve(replicas=1)
    for count, version in ((3, "1"), (2, "2"), (4, "3"), (3, "4")):
        served.serve(replicas=count, env={"VERSION": version})
        served.plane.kill()
        served.plane.up()
    settled = {"release": 5, "ready": 3, "replicas": 3}

    def is_settled() -> bool:
        shown = served.plane.shoal.services.show("hello")
        return {name: shown[name] for name in settled} == settled and len(shown["servers"]) == 3

    until(is_settled, "three replicas of the last release, and no other")
    assert {get_text(address).partition(" ")[0] for address in served.addresses()} == {"4"}
    open_jobs = served.plane.shoal.jobs(status=("queued", "starting", "running", "stopping"))
    assert sum(1 for _ in open_jobs) == 3
