"""Two control planes over one Slurm."""

from __future__ import annotations

import pytest

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from tests.contract.cluster.takeover import CompetingJobs, TakeoverContract
from tests.support.host.postgres import postgres
from tests.support.slurm.real_slurm import SlurmLab

__all__ = ["postgres"]  # pytest finds the fixture by its name

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(400)]


class Fillers(CompetingJobs):
    """Somebody else's jobs, of which Shoal knows nothing: what waits does so in Slurm's queue."""

    def __init__(self, lab: SlurmLab) -> None:
        self._lab = lab

    def fill(self, shoal: Shoal) -> None:
        self._lab.fill(*self._lab.names)

    def keeps_waiting(self, job: JobHandle) -> bool:
        waiting = self._lab.run("squeue", "-h", "-t", "PD", "-o", "%j")
        return job.refresh().data["attempts"][-1]["attempt_id"] in waiting

    def release(self) -> None:
        self._lab.cancel("filler")


@pytest.fixture
def lab(slurm: SlurmLab) -> SlurmLab:
    return slurm


@pytest.fixture
def crowd(lab: SlurmLab) -> CompetingJobs:
    return Fillers(lab)


class TestTakeover(TakeoverContract):
    pass
