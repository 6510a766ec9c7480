"""Nodes that are cut off: from the control plane, from their peers, from both, and healed.

Witness files on a disk that all nodes share show that no attempt runs beside itself or its successor, and
that what is healthy runs on. `python -m tests.soak.cuts` does the same at random. A fence takes two minutes
at least: the node that is cut off past it (`cut_off`) is so while the other tests of a file run elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from shoal.client.handles import JobHandle
from tests.support.faults.witness import since_boot
from tests.support.planes.cluster_plane import ONE_NODE, TWO_NODES, ClusterPlane
from tests.support.planes.real import until

FENCE_S = 60
"""The shortest that a job may have; the control plane waits as long again before it replaces anything."""


class CutOffJob(NamedTuple):
    job: JobHandle
    first_attempt: dict[str, Any]
    """Its attempt that was cut off."""
    node: str


@contextmanager
def cut_off_job(plane: ClusterPlane) -> Iterator[CutOffJob]:
    """A job whose node nobody reaches any more, and which takes no other work."""
    # Its next attempt, whenever that begins, is over at once: what other tests do to nodes is not done to it.
    job = plane.start_witness(ONE_NODE, "--brief", fence=f"{FENCE_S}s")
    first = plane.attempt(job)
    [node] = first["nodes"]
    done = plane.command("nodes", "cordon", node)
    assert done.returncode == 0, done.stderr
    plane.lab.cut(node, plane.lab.others(node))
    plane.wait_for_progress(job)
    yield CutOffJob(job, first, node)
    plane.lab.heal(node)


@contextmanager
def job_on_cut_node(plane: ClusterPlane) -> Iterator[tuple[JobHandle, JobHandle, str]]:
    """A job whose node is cut off from the control plane, one that was given to that node since, and the
    node, which alone takes work meanwhile.
    """
    runs = plane.start_witness(ONE_NODE)
    [cut] = plane.attempt(runs)["nodes"]
    with plane.only_node(cut):
        plane.lab.cut(cut)
        waits = plane.until_status(plane.submit_witness(ONE_NODE), "starting")
        assert plane.attempt(waits)["nodes"] == [cut]
        yield runs, waits, cut


class PartitionContract:
    @pytest.fixture(autouse=True)
    def mended(self, plane: ClusterPlane, cut_off: CutOffJob) -> Iterator[None]:
        """All nodes but the one take work again; a daemon that its cut has ended is started."""
        with plane.lab.restarting_daemons():
            yield
            for name in plane.lab.others(cut_off.node):
                plane.lab.heal(name)
                plane.until_alive(name)

    def test_cut_from_the_control_plane_but_not_from_its_peers_a_node_works_on(
        self, plane: ClusterPlane
    ) -> None:
        gang, other = plane.start_witness(TWO_NODES, "--talk"), plane.start_witness(ONE_NODE)
        cut = plane.attempt(gang)["nodes"][1]
        plane.lab.cut(cut)
        plane.until_explained(gang, f"no sign of life from {cut}")
        assert plane.attempt(gang)["state"] == "running"
        plane.wait_for_progress(gang, 1)
        plane.wait_for_progress(gang, 1, "heard")
        plane.lab.heal(cut)
        until(lambda: not plane.is_reported_silent(gang), f"{cut} is heard again")
        plane.finish(gang)
        plane.finish(other)
        assert plane.attempt(gang)["rendezvous_round"] == 0

    def test_cut_from_its_peers_but_not_from_the_control_plane_nobody_is_killed(
        self, plane: ClusterPlane
    ) -> None:
        gang, witness = plane.start_witness(TWO_NODES, "--talk"), plane.witness
        plane.wait_for_progress(gang, 1, "heard")
        cut = plane.attempt(gang)["nodes"][1]
        plane.lab.cut(cut, plane.lab.others(cut), from_control=False)
        # What was on its way when the cut came has come by then.
        plane.wait_for_progress(gang, 1)
        heard = witness.count(gang.job_id, "heard", 1)
        plane.wait_for_progress(gang, 1)
        plane.wait_for_progress(gang, 0)
        assert witness.count(gang.job_id, "heard", 1) == heard, "the cut lets nothing through"
        assert not plane.is_reported_silent(gang)
        plane.lab.heal(cut)
        plane.wait_for_progress(gang, 1, "heard")
        assert witness.lines(gang.job_id, "deserted") == []  # at the end one of them is the first to go
        plane.finish(gang)
        assert plane.attempt(gang)["rendezvous_round"] == 0

    def test_what_is_given_to_a_node_that_is_cut_off_for_a_moment_begins_there(
        self, plane: ClusterPlane
    ) -> None:
        with job_on_cut_node(plane) as (runs, waits, cut):
            plane.wait_for_progress(runs)
            plane.lab.heal(cut)
            plane.until_starts(waits, 1)
        plane.finish(waits)
        plane.finish(runs)

    @pytest.mark.soak
    def test_what_is_given_to_a_node_that_stays_cut_off_goes_elsewhere(self, plane: ClusterPlane) -> None:
        with job_on_cut_node(plane) as (runs, waits, cut):
            pass
        cut_at = since_boot()
        plane.until_starts(waits, 1)
        elsewhere_s = plane.witness.lines(waits.job_id, "start")[0].at - cut_at
        print(f"what was given to a node that is cut off began elsewhere after {elsewhere_s:.1f} s")
        assert plane.attempts(waits)[0]["reason"] == "lost"
        fresh = plane.start_witness(ONE_NODE)
        assert cut not in (*plane.attempt(waits)["nodes"], *plane.attempt(fresh)["nodes"])
        plane.wait_for_progress(runs)
        plane.lab.heal(cut)
        until(lambda: not plane.is_reported_silent(runs), f"{cut} is heard again")
        for job, attempts in ((runs, 1), (waits, 2), (fresh, 1)):
            plane.finish(job, attempts)

    @pytest.mark.last
    def test_cut_from_both_past_its_fence_a_node_has_stopped_before_its_successor_begins(
        self, plane: ClusterPlane, cut_off: CutOffJob
    ) -> None:
        lost, first, cut = cut_off
        healthy = plane.start_witness(TWO_NODES)
        plane.until_starts(lost, 2, within_s=2 * FENCE_S + 120.0)
        assert cut not in plane.attempt(lost)["nodes"]
        stopped = [line.attempt_id for line in plane.witness.lines(lost.job_id, "stop")]
        assert stopped == [first["attempt_id"]], "its supervisor stopped its rank by its own clock"
        assert plane.attempts(lost)[0]["reason"] == "fenced"
        plane.lab.heal(cut)
        plane.finish(lost, attempts=2)
        plane.finish(healthy)
