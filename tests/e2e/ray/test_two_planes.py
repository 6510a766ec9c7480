"""Two control planes over one Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from tests.contract.cluster.takeover import CompetingJobs, TakeoverContract
from tests.support.host.postgres import postgres
from tests.support.planes.real import TAKEOVER_S, until
from tests.support.ray.real_ray import RayLab

__all__ = ["postgres"]  # pytest finds the fixture by its name

pytestmark = [pytest.mark.engines, pytest.mark.soak, pytest.mark.timeout(400)]


class Busy(CompetingJobs):
    """A job of Shoal's own, as Ray has no queue: what waits does so in Shoal's."""

    def fill(self, shoal: Shoal) -> None:
        wide = {"nodes": 3, "cpus": 2}
        until(lambda: sum(one["is_alive"] for one in shoal.nodes()) == 3, "every node is there", TAKEOVER_S)
        self._job = shoal.submit(run="sleep 600", workdir=None, resources=wide, ranks_per_node=1, grace="1s")
        until(lambda: self._job.refresh().status == "running", "it has come", TAKEOVER_S)

    def keeps_waiting(self, job: JobHandle) -> bool:
        return job.refresh().status == "queued"

    def release(self) -> None:
        self._job.stop()


@pytest.fixture
def crowd() -> CompetingJobs:
    return Busy()


@pytest.fixture
def lab(ray_site: RayLab) -> Iterator[RayLab]:
    with ray_site.restarting_daemons():  # a cut of the file before may have ended a raylet
        yield ray_site


class TestTakeover(TakeoverContract):
    pass
