"""A head of Ray's without durable storage: the next one does not know its raylets, which end themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster_plane import LONG_S, ONE, TWO, ClusterPlane, cluster_plane
from tests.support.ray_lab import RayLab, ray_lab, what_is_missing
from tests.support.real_plane import until

pytestmark = [pytest.mark.engines, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLab]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with ray_lab(tmp_path_factory.mktemp("ray")) as lab:
        yield lab


@pytest.fixture
def plane(lab: RayLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterPlane]:
    with cluster_plane(tmp_path_factory.mktemp("plane") / "home", lab) as plane:
        yield plane


def test_what_runs_runs_on_and_what_waits_begins_once_its_raylets_are_started_again(
    plane: ClusterPlane, lab: RayLab
) -> None:
    running = plane.begun(TWO)
    lab.kill_head(is_forgetful=True)
    late = plane.submitted(ONE)
    plane.goes_on(running, 1)
    lab.start_head()
    until(lambda: not any(map(lab.has_ray, lab.names)), "its raylets end themselves", within_s=LONG_S)
    plane.goes_on(running, 0)
    plane.goes_on(running, 1)
    lab.mend()
    plane.until_starts(late, 1)
    plane.ends_well(late, attempts=len(plane.attempts(late)))
    plane.goes_on(running, 1)
    plane.ends_well(running)
