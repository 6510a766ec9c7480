"""Everything that can befall a service, under load: every request sent is answered, all of it and rightly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import get, post, post_with_key, stream
from tests.support.real_plane import RealPlane
from tests.support.service_faults import Fire
from tests.support.services import Served

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def fire(tmp_path: Path) -> Iterator[Fire]:
    plane = RealPlane(tmp_path / "home", "--serve-on", "127.0.0.1:0", "--serve-processes", "2", demo="2x4")
    plane.up()
    folder = tmp_path / "hello"
    folder.mkdir()
    yield Fire(Served(plane, folder))
    plane.down()


def test_no_request_of_any_kind_fails_while_releases_roll_planes_restart_and_nodes_drain(fire: Fire) -> None:
    with fire.crowd(get, post, stream, stream) as crowd:
        crowd.until_more()
        for fault in (
            fire.roll,
            fire.change_table,
            fire.replace_data_plane,
            fire.kill_control_plane,
            fire.drain_node,
            fire.replace_one_process,
        ):
            fault()
            crowd.until_more()
    assert crowd.faults() == []
    assert crowd.sent == crowd.right
    assert crowd.versions == {"1", "2"}


def test_killed_replicas_cost_no_request_that_may_be_sent_again_and_only_the_streams_in_them(
    fire: Fire,
) -> None:
    with fire.crowd(get, get, post_with_key, stream) as crowd:
        crowd.until_more()
        for fault in (
            fire.kill_replica,
            fire.kill_replica_without_a_control_plane,
            fire.kill_control_plane_and_take_its_port,
            fire.kill_replica,
        ):
            fault()
            crowd.until_more()
    assert crowd.faults(but_of=frozenset(fire.killed)) == []
    assert crowd.sent == crowd.right + len(crowd.faults())
    assert {fault.what for fault in crowd.faults()} <= {"stream"}
