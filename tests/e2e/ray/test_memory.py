"""Shoal on a real Ray whose head keeps what it knows in memory: the next head knows nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.planes.cluster_plane import ONE_NODE, TWO_NODES, ClusterPlane, cluster_plane
from tests.support.planes.real import until
from tests.support.ray.real_ray import MakeRay, RayLab

pytestmark = [pytest.mark.engines, pytest.mark.soak, pytest.mark.timeout(600)]
NOTICE_S = 240.0
"""How long a raylet may take to hear that its head is another, and to end itself."""


@pytest.fixture
def lab(make_ray: MakeRay) -> Iterator[RayLab]:
    with make_ray(2, has_storage=False) as lab:
        yield lab


@pytest.fixture
def plane(tmp_path_factory: pytest.TempPathFactory, lab: RayLab) -> Iterator[ClusterPlane]:
    with cluster_plane(tmp_path_factory.mktemp("ray-plane") / "home", lab) as plane:
        yield plane


def test_head_without_storage_killed_with_jobs_running_and_just_submitted(
    plane: ClusterPlane, lab: RayLab
) -> None:
    running = plane.start_witness(TWO_NODES)
    lab.kill_head()
    late = plane.submit_witness(ONE_NODE)
    plane.wait_for_progress(running, 1)
    lab.start_head()
    until(lambda: not any(map(lab.has_ray, lab.names)), "raylets end themselves", within_s=NOTICE_S)
    for rank in (0, 1):
        plane.wait_for_progress(running, rank)
    with lab.restarting_daemons():
        plane.until_starts(late, 1)
        # Placed while no head knew a node, it may have been given back, and placed again, before it began.
        plane.finish(late, attempts=None)
    assert len(plane.witness.lines(late.job_id, "start")) == 1
    for rank in (0, 1):
        plane.wait_for_progress(running, rank)
    plane.finish(running)
