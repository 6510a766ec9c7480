"""`kill -9` of what a job on any cluster depends on: who survives what, counted by witnesses.

What only one of them has (a controller, a database, an agent) is killed in that one's own file.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from typing import NamedTuple

import pytest

from shoal.client.handles import JobHandle
from shoal.control.memory.leases import FENCE_MARGIN_S, QUIET_S
from tests.support.faults.hung_disk import HungDisk
from tests.support.faults.witness import STUCK_OPTIONS, since_boot
from tests.support.planes.cluster_plane import ONE_NODE, TWO_NODES, ClusterPlane, is_running, parent_of
from tests.support.planes.real import until

FENCE_S = 60
"""The shortest that a job may have."""
PAST_FENCE_S = FENCE_S + FENCE_MARGIN_S + 15.0
"""When a fence has passed, and the control plane has looked since."""


class OrphanedJob(NamedTuple):
    job: JobHandle
    killed_at: float
    """When its keeper was killed, in seconds since boot."""


def orphan_job(plane: ClusterPlane) -> OrphanedJob:
    """A job whose keeper was killed, after its next attempt, whose rank ends at once.

    Until that attempt begins, the first share is silent. After 45 s a node with a silent share counts as cut
    off, and a share that waits there is taken back: another test's job would need one attempt more.
    """
    job = plane.start_witness(ONE_NODE)
    first = plane.attempt(job)
    supervisor = plane.supervisor_pid(first, first["nodes"][0])
    at = since_boot()
    os.kill(parent_of(supervisor), signal.SIGKILL)
    until(lambda: not is_running(supervisor), "its supervisor does not outlive it")
    plane.witness.release(job)
    until(lambda: job.refresh().is_ended, "its next attempt is over", within_s=240.0)
    return OrphanedJob(job, at)


def start_stuck_jobs(plane: ClusterPlane, disk: HungDisk) -> list[JobHandle]:
    """Jobs whose ranks do not die, in several ways, with the shortest fence; the last is of two nodes."""
    ways = [*((ONE_NODE, way) for way in STUCK_OPTIONS), (TWO_NODES, STUCK_OPTIONS[0])]
    jobs = [plane.start_witness(resources, way, fence=f"{FENCE_S}s") for resources, way in ways]
    ranks = {f"{job.job_id}.{rank}" for job in jobs for rank in range(num_ranks(plane, job))}
    until(lambda: ranks <= disk.stuck_threads.keys(), "their ranks are stuck")
    return jobs


def num_ranks(plane: ClusterPlane, job: JobHandle) -> int:
    """Of its first attempt: one that waits has no nodes yet."""
    return len(plane.attempts(job)[0]["nodes"])


def assert_not_replaced(plane: ClusterPlane, jobs: Collection[JobHandle], until_s: float) -> None:
    """In place of these, which do not die, until then (in seconds since boot)."""
    while since_boot() < until_s:
        for job in jobs:
            [attempt] = plane.attempts(job)
            assert attempt["state"] in {"running", "stopping"}, attempt  # peers go on for a minute
            assert len(plane.witness.lines(job.job_id, "start", "overlap")) == len(attempt["nodes"])
        time.sleep(1.0)
    assert {plane.attempts(job)[0]["state"] for job in jobs} == {"stopping"}


def assert_restarted(plane: ClusterPlane, jobs: Collection[JobHandle]) -> None:
    """What is stuck no more is lost, and begun anew."""
    for job in jobs:
        plane.until_starts(job, 2 * num_ranks(plane, job))
        plane.finish(job, attempts=2)
        assert plane.attempts(job)[0]["reason"] == "lost"


def declare_dead(plane: ClusterPlane, node: str) -> None:
    """Dead, once what ran there was not heard from for so long that its death is believed."""
    words = ("nodes", "declare-dead", node, "--because", "the test killed it")
    until(lambda: plane.command(*words).returncode == 0, f"{node} is declared dead", within_s=QUIET_S + 10.0)


class SurvivalContract:
    sees_agent_end = True
    """Whether the cluster sees that one keeper of several is gone; else it is the fence that counts."""

    def test_daemon_of_a_node_killed_and_started_again(self, plane: ClusterPlane) -> None:
        job = plane.start_witness(TWO_NODES)
        node = plane.attempt(job)["nodes"][1]
        plane.lab.kill_daemon(node)
        plane.wait_for_progress(job, 1)
        plane.lab.start_node(node)
        plane.until_alive(node)
        plane.wait_for_progress(job, 1)
        plane.finish(job)

    def test_control_plane_killed_with_jobs_running_and_just_submitted(self, plane: ClusterPlane) -> None:
        gang = plane.start_witness(TWO_NODES)
        says = plane.submit("echo begun; sleep 4; echo done", resources=ONE_NODE)
        plane.until_status(says, "running")
        late = plane.submit_witness(ONE_NODE)
        plane.kill()
        plane.wait_for_progress(gang, 1)
        plane.up()
        plane.until_starts(late, 1)
        plane.finish(gang)
        plane.finish(late)
        plane.until_status(says, "succeeded")
        # Its end may be heard before the rest of its log, whose keeper had nobody to hand it in to.
        until(lambda: plane.log_of(says) == ["begun", "done"], "its log comes back whole")
        assert len(plane.attempts(says)) == 1

    def test_supervisor_of_a_job_of_one_node_killed(self, plane: ClusterPlane) -> None:
        job = plane.start_witness(ONE_NODE)
        first = plane.attempt(job)
        os.kill(plane.supervisor_pid(first, first["nodes"][0]), signal.SIGKILL)
        plane.until_starts(job, 2)
        plane.finish(job, attempts=2)
        assert plane.attempts(job)[0]["reason"] == "lost"

    def test_supervisor_of_one_node_of_two_killed(self, plane: ClusterPlane) -> None:
        job = plane.start_witness(TWO_NODES)
        first = plane.attempt(job)
        os.kill(plane.supervisor_pid(first, first["nodes"][1]), signal.SIGKILL)
        plane.until_starts(job, 4)
        plane.finish(job)
        assert plane.attempt(job)["rendezvous_round"] == 1

    @pytest.mark.soak
    def test_supervisor_killed_whose_rank_does_not_die(self, plane: ClusterPlane, disk: HungDisk) -> None:
        jobs = start_stuck_jobs(plane, disk)
        for job in jobs:
            first = plane.attempt(job)
            os.kill(plane.supervisor_pid(first, first["nodes"][0]), signal.SIGKILL)
        killed_at = since_boot()
        for job in jobs:
            plane.until_explained(job, "something of it does not die")
        print(f"on {plane.lab.engine}: said to be stuck after {since_boot() - killed_at:.1f} s")
        assert_not_replaced(plane, jobs, killed_at + PAST_FENCE_S)
        disk.release()
        assert_restarted(plane, jobs)

    @pytest.mark.soak
    def test_keeper_of_one_node_of_two_killed(self, plane: ClusterPlane) -> None:
        job = plane.start_witness(TWO_NODES, fence=f"{FENCE_S}s")
        first = plane.attempt(job)
        supervisor, at = plane.supervisor_pid(first, first["nodes"][1]), since_boot()
        os.kill(parent_of(supervisor), signal.SIGKILL)
        until(lambda: not is_running(supervisor), "its supervisor does not outlive it")
        plane.until_starts(job, 4, within_s=2 * FENCE_S + 120.0)
        again_s = plane.witness.lines(job.job_id, "start")[2].at - at
        print(f"keeper of one node of two killed on {plane.lab.engine}: begun anew after {again_s:.1f} s")
        # Until a fence its node is silent, and takes no work; and no third one is free here.
        plane.finish(job, attempts=1 if self.sees_agent_end else None)
        if self.sees_agent_end:
            assert plane.attempt(job)["rendezvous_round"] == 1
        elif plane.attempts(job)[0]["reason"] == "fenced":
            assert again_s > FENCE_S
        else:  # the supervisor has said that all is over before Slurm killed it, too
            assert plane.attempts(job)[0]["reason"] in {"lost", "succeeded"}

    def test_keeper_killed_alone(self, plane: ClusterPlane, bereft: OrphanedJob) -> None:
        job = bereft.job
        assert len(plane.witness.lines(job.job_id, "start")) == 2
        plane.finish(job, attempts=2)
        again_s = plane.witness.lines(job.job_id, "start")[1].at - bereft.killed_at
        print(f"keeper killed on {plane.lab.engine}: the next attempt began after {again_s:.1f} s")

    @pytest.mark.last
    def test_whole_node_killed_and_declared_dead(self, plane: ClusterPlane) -> None:
        job = plane.start_witness(ONE_NODE)
        node = plane.attempt(job)["nodes"][0]
        plane.lab.crash_node(node)
        plane.lab.report_crash(node)
        try:
            until(lambda: node not in plane.nodes_alive(), f"{node} is not alive", within_s=120.0)
            assert len(plane.witness.lines(job.job_id, "start")) == 1, "nothing is begun without evidence"
            declare_dead(plane, node)
            plane.until_starts(job, 2)
            plane.finish(job, attempts=2)
        finally:
            plane.lab.start_node(node)
            plane.until_alive(node)
            plane.command("nodes", "resume", node)
