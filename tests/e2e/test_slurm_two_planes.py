"""Two control planes over one Slurm."""

from __future__ import annotations

import pytest

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from tests.contract.cluster_takeover import Crowd, TakeoverContract
from tests.support.postgres import postgres
from tests.support.slurm_lab import SlurmLab

__all__ = ["postgres"]  # pytest finds the fixture by its name

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(400)]


class Fillers(Crowd):
    """Somebody else's jobs, of which Shoal knows nothing: what waits does so in Slurm's queue."""

    def __init__(self, lab: SlurmLab) -> None:
        self._lab = lab

    def come(self, shoal: Shoal) -> None:
        self._lab.fill(*self._lab.names)

    def keeps_waiting(self, job: JobHandle) -> bool:
        waiting = self._lab.run("squeue", "-h", "-t", "PD", "-o", "%j")
        return job.refresh().data["attempts"][-1]["attempt_id"] in waiting

    def go(self) -> None:
        self._lab.cancel("filler")


@pytest.fixture
def lab(slurm: SlurmLab) -> SlurmLab:
    return slurm


@pytest.fixture
def crowd(lab: SlurmLab) -> Crowd:
    return Fillers(lab)


class TestTakeover(TakeoverContract):
    pass
