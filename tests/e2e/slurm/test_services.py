"""Services on a real Slurm: replicas on nodes of their own networks, called through the data plane here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.faults.service_faults import PATH, address_of, token_of
from tests.support.planes.cluster_plane import ClusterPlane, cluster_plane
from tests.support.planes.real import until
from tests.support.runtime.tasks import pids_with
from tests.support.serving.service import RepeatingCaller, ServedApp
from tests.support.slurm.real_slurm import SlurmLab

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
WITHIN_S = 150.0
TWO = {"replicas": 2, "resources": {"cpus": 3}}
"""Nodes have four: no two of them fit on one."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, slurm: SlurmLab) -> Iterator[ClusterPlane]:
    home = tmp_path_factory.mktemp("slurm-services") / "home"
    with cluster_plane(home, slurm, "--serve-on", "127.0.0.1:0") as plane:
        yield plane


@pytest.fixture(scope="module")
def served(plane: ClusterPlane, tmp_path_factory: pytest.TempPathFactory) -> ServedApp:
    """Two replicas, on two nodes."""
    served = ServedApp(plane, tmp_path_factory.mktemp("hello"))
    served.serve(**TWO)
    ready(served, 2)
    return served


@pytest.fixture
def called(served: ServedApp) -> tuple[str, str]:
    """Where it is called, and a token for it."""
    return address_of(served), token_of(served)


def ready(served: ServedApp, count: int) -> dict[str, str]:
    until(lambda: len(served.replicas()) == count, f"{count} replicas are ready", within_s=WITHIN_S)
    return served.replicas()


def test_replicas_of_two_nodes_are_called_through_their_porches(
    plane: ClusterPlane, slurm: SlurmLab, served: ServedApp, called: tuple[str, str]
) -> None:
    replicas = ready(served, 2)
    hosts = {address.removeprefix("tls:").rpartition(":")[0] for address in replicas.values()}
    assert len(hosts) == 2
    assert hosts <= {slurm.address_of(name) for name in slurm.names}
    with RepeatingCaller(called[0], PATH, called[1]) as caller:
        until(lambda: sum(caller.statuses.values()) >= 100, "it answers")
    assert set(caller.statuses) == {200}


def server_on(lab: SlurmLab, replica: dict[str, Any]) -> int:
    """The process of its program."""
    found = set(lab.pids_on(replica["nodes"][0])) & set(pids_with("server.py"))
    return max(found)


def servers(plane: ClusterPlane) -> list[dict[str, Any]]:
    shown = plane.shoal.services.show("hello")["servers"]
    return [one for one in shown if one["state"] == "ready"]


def nodes_of(plane: ClusterPlane) -> set[str]:
    return {one["nodes"][0] for one in servers(plane)}


@pytest.mark.soak
def test_no_request_fails_while_a_replica_dies_a_release_rolls_and_it_is_scaled(
    plane: ClusterPlane, slurm: SlurmLab, served: ServedApp, called: tuple[str, str]
) -> None:
    ready(served, 2)
    get, post = RepeatingCaller(called[0], PATH, called[1]), RepeatingCaller(*_posts(called))
    with get, post:
        until(lambda: get.answers["1"] > 20 and post.answers["1"] > 20, "it is answered")
        victim = servers(plane)[0]
        os.kill(server_on(slurm, victim), signal.SIGTERM)  # it ends by itself, and has nothing under way
        until(lambda: victim["job_id"] not in served.replicas(), "it is known to be gone")
        ready(served, 2)
        served.serve(**TWO, env={"VERSION": "2"})
        until(lambda: plane.shoal.services.show("hello")["release"] == 2, "it took over", WITHIN_S)
        until(lambda: set(_versions(served, called)) == {"2"}, "the old one is gone", WITHIN_S)
        assert plane.command("scale", "hello", "3").returncode == 0
        ready(served, 3)
        assert plane.command("scale", "hello", "2").returncode == 0
        ready(served, 2)
        seen = get.answers["2"]
        until(lambda: get.answers["2"] > seen + 20, "it is answered by the new one")
    assert set(get.statuses) == {200}
    assert set(post.statuses) <= {200, 502}
    # A POST that a server had when it was killed is answered 502: nobody knows what it did.
    assert post.statuses[502] <= 1


def _posts(called: tuple[str, str]) -> tuple[str, str, str, bytes]:
    return called[0], PATH, called[1], b"x" * 2000


def _versions(served: ServedApp, called: tuple[str, str]) -> list[str]:
    with RepeatingCaller(called[0], PATH, called[1]) as caller:
        until(lambda: sum(caller.statuses.values()) >= 20, "it answers")
    return list(caller.answers)


def test_a_node_that_is_cut_off_is_passed_over_and_another_replica_takes_its_place(
    plane: ClusterPlane, slurm: SlurmLab, served: ServedApp, called: tuple[str, str]
) -> None:
    ready(served, 2)
    node = servers(plane)[0]["nodes"][0]
    with RepeatingCaller(called[0], PATH, called[1]) as caller:
        until(lambda: sum(caller.statuses.values()) > 50, "both are asked")
        slurm.cut(node)
        try:
            seen = sum(caller.statuses.values())
            until(lambda: sum(caller.statuses.values()) > seen + 200, "the other one answers", 40.0)
            until(lambda: len(nodes_of(plane) - {node}) == 2, "another is ready elsewhere", WITHIN_S)
        finally:
            slurm.heal(node)
    assert set(caller.statuses) == {200}, "a GET is asked again of another one"
