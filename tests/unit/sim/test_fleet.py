"""The nodes of a cluster that a plan counts."""

from __future__ import annotations

import msgspec
import pytest

from shoal.errors import SpecError
from shoal.scheduler.facts.snapshot import NodeInfo
from shoal.sim.cluster_shapes import ClusterShape, PlannedFleet, fleet_of, nodes_of

H100 = nodes_of(ClusterShape(4, 8, "H100"), prefix="h")
A100 = nodes_of(ClusterShape(2, 8, "A100"), prefix="a")
HEAD = NodeInfo(name="head", cpus=16, memory_bytes=1 << 30)


def test_nodes_with_gpus_are_counted_and_the_others_stay() -> None:
    closed = msgspec.structs.replace(H100[0], closed_because="drained")
    fleet = fleet_of((HEAD, closed, *H100[1:]), None)
    assert (str(fleet), fleet.unit, fleet.others) == ("4xH100:8", "nodes", (HEAD,))
    nodes = fleet.of(6).nodes()
    assert len(nodes) == len({node.name for node in nodes}) == 7
    assert all(node.closed_because is None for node in nodes)
    assert fleet.of(6).devices == 48


def test_nodes_of_several_kinds_are_asked_about() -> None:
    with pytest.raises(SpecError, match="4xH100:8, 2xA100:8; choose the ones to count") as caught:
        fleet_of((*H100, *A100), None)
    assert caught.value.hint == "--nodes 4xH100:8"
    chosen = fleet_of((*H100, *A100), ClusterShape(1, 8, "A100"))
    assert (chosen.count, chosen.others, chosen.devices) == (2, H100, 48)
    for nodes, hint in ((H100, "--nodes 4xH100:8"), ((HEAD,), "leave `--nodes` out: all are counted")):
        with pytest.raises(SpecError, match="none of those") as caught:
            fleet_of(nodes, ClusterShape(1, 8, "B200"))
        assert caught.value.hint == hint


def test_cluster_without_gpus_is_counted_in_nodes_of_its_own() -> None:
    nodes = [msgspec.structs.replace(HEAD, name=f"n{number}") for number in range(3)]
    fleet = fleet_of(nodes, None)
    assert (str(fleet), fleet.devices, fleet.each) == ("3 nodes of 16 CPUs", 48, 16)


def test_processors_of_a_trace_are_one_pool() -> None:
    fleet = PlannedFleet(ClusterShape(240))
    assert (fleet.unit, fleet.devices, len(fleet.nodes())) == ("processors", 240, 1)
