"""Two control planes over one cluster: the leader is killed, and keepers and supervisors find the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from tests.support.faults.witness import Witness
from tests.support.host.cluster_lab import ClusterLab
from tests.support.host.postgres import PostgresServer
from tests.support.planes.cluster_plane import CONNECT_S, MIN_BEATS
from tests.support.planes.real import TAKEOVER_S, TwoPlanes, two_planes, until
from tests.support.runtime.tasks import SOURCE

NODES_PORTS = (7474, 7475)


class CompetingJobs(ABC):
    """Others who take all that is free, so that what is submitted waits."""

    @abstractmethod
    def fill(self, shoal: Shoal) -> None: ...

    @abstractmethod
    def keeps_waiting(self, job: JobHandle) -> bool:
        """Whether the job is where jobs wait on this cluster."""

    @abstractmethod
    def release(self) -> None: ...


@contextmanager
def planes_over(lab: ClusterLab, postgres: PostgresServer, folder: Path) -> Iterator[TwoPlanes]:
    url = postgres.url(postgres.new_database())
    made = TwoPlanes(folder, url, "--mount-roots", str(folder), demo="none")
    for port, one in zip(NODES_PORTS, (made.first, made.second), strict=True):
        one.env |= lab.variables | {"SHOAL_DATABASE_URL": url, "SHOAL_SHARED": str(made.shared)}
        words = ("--python-path", SOURCE, "--spool", str(folder / "spool"))
        at = ("--nodes-on", f"{lab.address}:{port}")
        asked = (lab.engine, *lab.connect_options(), "--as-root", *words, *at)
        done = one.command("connect", *asked, timeout_s=CONNECT_S)
        assert done.returncode == 0, done.stderr
    with two_planes(made):
        yield made


class TakeoverContract:
    """With fixtures `lab` and `crowd`, and `postgres` by its name in the file."""

    @pytest.fixture
    def planes(self, lab: ClusterLab, postgres: PostgresServer, tmp_path: Path) -> Iterator[TwoPlanes]:
        with planes_over(lab, postgres, tmp_path) as planes:
            yield planes

    def test_leader_killed_with_one_job_running_one_waiting_and_one_just_submitted(
        self, planes: TwoPlanes, lab: ClusterLab, crowd: CompetingJobs, tmp_path: Path
    ) -> None:
        witness = Witness(tmp_path / "witness")
        with planes.client() as shoal:
            until(lambda: knows_both_planes(shoal), "the leader has met the other", TAKEOVER_S)
            until(lambda: len(list(shoal.nodes())) == len(lab.names), "it has seen every node", TAKEOVER_S)
            runs = submit(shoal, witness, nodes=2, cpus=1)
            until(lambda: len(witness.lines(runs.job_id, "start")) == 2, "both of its ranks run", TAKEOVER_S)
            crowd.fill(shoal)
            waits = submit(shoal, witness, cpus=3)
            until(lambda: crowd.keeps_waiting(waits), f"{waits.ref} waits")
            fresh = submit(shoal, witness, cpus=1)
            planes.first.kill()
            planes.second.until_role("leader")
            seen = witness.count(runs.job_id, "beat", 1)
            crowd.release()
            for job in (waits, fresh):
                until(lambda job=job: witness.lines(job.job_id, "start"), f"{job.ref} begins", TAKEOVER_S)  # type: ignore[misc]
            until(lambda: witness.count(runs.job_id, "beat", 1) > seen + MIN_BEATS, "what ran runs on")
            for job in (runs, waits, fresh):
                witness.release(job)
            for job in (runs, waits, fresh):
                until(lambda job=job: job.refresh().status == "succeeded", f"{job.ref} ends well", TAKEOVER_S)  # type: ignore[misc]
                assert len(job.data["attempts"]) == 1
                assert witness.overlaps(job.job_id) == []


def submit(shoal: Shoal, witness: Witness, **resources: int) -> JobHandle:
    return shoal.submit(
        **witness.job_fields(), workdir=None, resources=resources, ranks_per_node=1, grace="2s"
    )


def knows_both_planes(shoal: Shoal) -> bool:
    """What is submitted before they have met knows the leader alone, until it speaks to one of them."""
    job = shoal.submit(run="echo at $SHOAL_URL", workdir=None, resources={"cpus": 1}, ranks_per_node=1)
    until(lambda: job.refresh().status == "succeeded", f"{job.ref} ends well", TAKEOVER_S)
    told = until(lambda: [line["text"] for line in shoal.logs(job.job_id)], "its log comes back")
    return "," in told[0]
