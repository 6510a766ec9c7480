"""Shoal on a real Ray: what it must stand on every cluster, and what only Ray has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.engines.ray.client import BRIDGE
from shoal.home import pid_holding
from tests.contract.cluster.drills import DrillContract
from tests.contract.cluster.listeners import ListenerContract
from tests.contract.cluster.partitions import CutOffJob, PartitionContract
from tests.contract.cluster.survival import (
    PAST_FENCE_S,
    SurvivalContract,
    assert_not_replaced,
    assert_restarted,
    start_stuck_jobs,
)
from tests.support.faults.hung_disk import HungDisk
from tests.support.faults.service_faults import PATH, address_of, token_of
from tests.support.faults.witness import since_boot
from tests.support.host.processes import descendants
from tests.support.planes.cluster_plane import ONE_NODE, TWO_NODES, ClusterPlane, is_running, parent_of
from tests.support.planes.real import until
from tests.support.ray.ports import ALL_REQUESTS, SAFE_REQUESTS, WRONG_TOKEN, probe_listeners, ray_listeners
from tests.support.ray.real_ray import RayLab, command_of, session_pids
from tests.support.serving.service import RepeatingCaller, ServedApp

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # with the start of a Ray, which may take its time
    pytest.mark.usefixtures("cleared"),
]


@pytest.fixture(scope="module")
def lab(ray_site: RayLab) -> RayLab:
    return ray_site


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, lab: RayLab) -> Iterator[ClusterPlane]:
    real = ClusterPlane(tmp_path_factory.mktemp("ray-plane") / "home", lab, "--serve-on", "127.0.0.1:0")
    with lab.restarting_daemons():  # a cut of the file before may have ended a raylet
        wanted = {"nodes": 3, "alive": 3, "gpus": 6, "nodes_on": f"{lab.address}:7464"}
        until(lambda: wanted.items() <= real.connect().items(), "every node is there", within_s=150.0)
    real.up()
    try:
        yield real
    finally:
        real.down()


class TestDrills(DrillContract):
    pass


OPEN = {
    "raylet": {"OK /grpc.health.v1.Health/Check"},
    "gcs_server": {"OK /grpc.health.v1.Health/Check"},
    "bridge.py": {"OK /grpc.health.v1.Health/Check"},
    "ray::Agent": {"OK /grpc.health.v1.Health/Check"},
    "ray::IDLE": {"OK /grpc.health.v1.Health/Check"},
    "ray::DashboardAgent": {"200 GET /api/healthz", "200 GET /api/local_raylet_healthz"},
}
"""What Ray 2.60 answers to anybody, by process, with token authentication on: whether it is well."""
METRICS = {f"200 {asked}" for asked in ALL_REQUESTS if asked.startswith("GET ")}
"""At a port of their own, open at every address of a node, metrics are the answer to everything."""


class TestListeners(ListenerContract):
    def test_rays_own_ports_tell_strangers_nothing_but_health_and_metrics(
        self, plane: ClusterPlane, lab: RayLab, jobs: object
    ) -> None:
        """`jobs`: with agents and what they do on the nodes."""
        here = [*session_pids(lab.started["head"].pid), *bridges(plane)]
        answered: dict[str, set[str]] = {}
        for place, found in ray_listeners(lab, here).items():
            for role, told in probe_listeners(lab, place, found, (None, WRONG_TOKEN), ALL_REQUESTS).items():
                answered.setdefault(role, set()).update(told)
        assert {"gcs_server", "raylet", "bridge.py", "ray::Agent"} <= set(answered)
        metrics = {"ray::DashboardAgent", "dashboard.py"}
        strange = {
            role: told - OPEN.get(role, set()) - (METRICS if role in metrics else set())
            for role, told in answered.items()
        }
        assert {role: told for role, told in strange.items() if told} == {}

    def test_who_has_rays_token_is_answered_at_the_same_ports(
        self, plane: ClusterPlane, lab: RayLab, jobs: object
    ) -> None:
        """Else the other test would pass for questions that Ray does not know."""
        token = lab.token_file.read_text()
        found = ray_listeners(lab, [*session_pids(lab.started["head"].pid), *bridges(plane)])[""]
        told = set[str]().union(*probe_listeners(lab, "", found, (token,), SAFE_REQUESTS).values())
        asked = [one for one in SAFE_REQUESTS if one.startswith("/ray.rpc.") and "RayletDriver" not in one]
        assert {f"OK {one}" for one in asked} <= told


class TestSurvival(SurvivalContract):
    pass


class TestCuts(PartitionContract):
    pass


def bridges(plane: ClusterPlane) -> list[int]:
    """Of the control plane that runs."""
    pid = pid_holding(plane.home)
    assert pid is not None
    return [one for one in descendants(pid) if str(BRIDGE) in command_of(one)]


class TestRay:
    def test_head_killed_right_after_a_submission_and_started_again(
        self, plane: ClusterPlane, lab: RayLab
    ) -> None:
        running = plane.start_witness(TWO_NODES)
        lab.kill_head()
        late = plane.submit_witness(ONE_NODE)
        plane.wait_for_progress(running, 1)
        lab.start_head()
        plane.until_starts(late, 1)
        plane.finish(late)
        plane.wait_for_progress(running, 1)
        plane.finish(running)

    def test_agent_killed(self, plane: ClusterPlane, lab: RayLab) -> None:
        running = plane.start_witness(TWO_NODES)
        node = plane.attempt(running)["nodes"][1]
        agents = lab.agents_on(node)  # with those of homes of other tests, which nobody starts again
        assert agents
        for agent in agents:
            os.kill(agent, signal.SIGKILL)
        plane.wait_for_progress(running, 1)
        until(lambda: set(lab.agents_on(node)) - set(agents), "another is there", within_s=120.0)
        after = plane.start_witness(TWO_NODES)
        plane.finish(after)
        plane.finish(running)

    @pytest.mark.soak
    def test_keeper_killed_whose_rank_does_not_die(self, plane: ClusterPlane, disk: HungDisk) -> None:
        jobs = start_stuck_jobs(plane, disk)
        for job in jobs:
            first = plane.attempt(job)
            os.kill(parent_of(plane.supervisor_pid(first, first["nodes"][0])), signal.SIGKILL)
        killed_at = since_boot()
        for job in jobs:
            plane.until_explained(job, "something of it does not die")
        print(f"agents say that something is stuck {since_boot() - killed_at:.1f} s after the keeper's end")
        assert_not_replaced(plane, jobs, killed_at + PAST_FENCE_S)
        disk.release()
        assert_restarted(plane, jobs)

    def test_bridge_killed(self, plane: ClusterPlane) -> None:
        running = plane.start_witness(TWO_NODES)
        before = until(lambda: bridges(plane), "there is one")
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(is_running, before)), "it is gone")
        plane.wait_for_progress(running, 1)
        after = plane.start_witness(ONE_NODE)
        assert set(bridges(plane)) - set(before)
        plane.finish(after)
        plane.finish(running)

    def test_a_service_on_nodes_of_ray_is_called_through_the_data_plane_here(
        self, plane: ClusterPlane, lab: RayLab, cut_off: CutOffJob, tmp_path: Path
    ) -> None:
        served = ServedApp(plane, tmp_path)
        served.serve(replicas=2, resources={"gpus": 2, "cpus": 1})  # as many GPUs as a node has
        until(lambda: len(served.replicas()) == 2, "two replicas are ready", within_s=150.0)
        hosts = {address.rpartition(":")[0] for address in served.addresses()}
        assert hosts == {f"tls:{lab.address_of(name)}" for name in lab.others(cut_off.node)}
        with RepeatingCaller(address_of(served), PATH, token_of(served)) as caller:
            until(lambda: sum(caller.statuses.values()) >= 100, "it answers")
        assert set(caller.statuses) == {200}
        assert plane.command("stop", "hello").returncode == 0
        until(lambda: (told := served.table()) is not None and not told.services, "it is gone")
