"""All kinds of failure of a service under load: every request gets a whole and correct reply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults.service_faults import ServiceUnderFire
from tests.support.planes.real import RealPlane
from tests.support.serving.service import ServedApp, get, post, post_with_key, stream

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def fire(tmp_path: Path) -> Iterator[ServiceUnderFire]:
    plane = RealPlane(tmp_path / "home", "--serve-on", "127.0.0.1:0", "--serve-processes", "2", demo="2x4")
    plane.up()
    folder = tmp_path / "hello"
    folder.mkdir()
    yield ServiceUnderFire(ServedApp(plane, folder))
    plane.down()


def test_no_request_of_any_kind_fails_while_releases_roll_planes_restart_and_nodes_drain(
    fire: ServiceUnderFire,
) -> None:
    with fire.start_callers(get, post, stream, stream) as crowd:
        crowd.wait_for_more()
        for fault in (
            fire.roll_out,
            fire.change_table,
            fire.replace_data_plane,
            fire.kill_control_plane,
            fire.drain_node,
            fire.replace_one_process,
        ):
            fault()
            crowd.wait_for_more()
    assert crowd.failures() == []
    assert crowd.num_sent == crowd.num_right
    assert crowd.versions == {"1", "2"}


def test_killed_replicas_lose_no_repeatable_request_and_only_their_own_streams(
    fire: ServiceUnderFire,
) -> None:
    with fire.start_callers(get, get, post_with_key, stream) as crowd:
        crowd.wait_for_more()
        for fault in (
            fire.kill_replica,
            fire.kill_replica_without_a_control_plane,
            fire.kill_control_plane_and_take_its_port,
            fire.kill_replica,
        ):
            fault()
            crowd.wait_for_more()
    assert crowd.failures(except_replicas=frozenset(fire.killed_replicas)) == []
    assert crowd.num_sent == crowd.num_right + len(crowd.failures())
    assert {fault.kind for fault in crowd.failures()} <= {"stream"}
