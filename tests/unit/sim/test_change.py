"""What-if changes to the nodes and quotas of a workload."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from shoal.errors import SpecError
from shoal.model.people import DeviceAmounts
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.workload import NodeChange, Workload
from shoal.sim.workload_changes import parse_quotas, with_nodes, with_quotas, without_nodes
from tests.support.sim_jobs import gpu_cluster, work_job

TWO = gpu_cluster(work_job(0, 1), nodes=2)
POOL = Workload(nodes=nodes_of(ClusterShape(100)), jobs=[])


def names(workload: Workload) -> list[str]:
    return [node.name for node in workload.nodes]


def test_added_nodes_have_names_of_their_own() -> None:
    more = with_nodes(TWO, [ClusterShape(1, 8, "H100"), ClusterShape(2, 4)])
    assert names(more) == ["node-00001", "node-00002", "added-00001", "added-00002", "added-00003"]
    assert more.capacity == 16 + 8 + 8
    assert more.nodes[2].gpus[0].kind == "H100"


def test_an_added_node_is_like_those_of_its_kind() -> None:
    assert with_nodes(TWO, [ClusterShape(1, 8)]).nodes[2].cpus == TWO.nodes[0].cpus


def test_nodes_are_removed_by_name_or_by_what_they_are() -> None:
    assert names(without_nodes(TWO, ["node-00001"])) == ["node-00002"]
    assert names(without_nodes(TWO, ["1x8"])) == ["node-00001"]


def test_changes_of_a_removed_node_are_dropped() -> None:
    change = NodeChange(at=5, name="node-00001", view=None)
    workload = Workload(nodes=TWO.nodes, jobs=TWO.jobs, changes=[change])
    assert without_nodes(workload, ["node-00001"]).changes == []
    assert without_nodes(workload, ["node-00002"]).changes == [change]


def test_a_pool_gains_and_loses_processors() -> None:
    assert with_nodes(POOL, [ClusterShape(20)]).capacity == 120
    assert without_nodes(POOL, ["20"]).capacity == 80


def test_a_quota_is_of_the_devices_that_the_cluster_is_counted_in() -> None:
    (view,) = with_quotas(TWO, parse_quotas(["default=8"])).projects
    assert (view.name, view.quota) == ("default", DeviceAmounts(gpus=8))
    pool = Workload(nodes=POOL.nodes, jobs=TWO.jobs)
    assert with_quotas(pool, {"default": 8}).projects[0].quota == DeviceAmounts(cpus=8)


LAB = msgspec.structs.replace(
    TWO,
    projects=(
        ProjectInfo(name="lab", limit=DeviceAmounts(gpus=16)),
        ProjectInfo(name="default", parent="lab"),
    ),
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda: with_quotas(TWO, {"defualt": 8}), "no project `defualt`; there are default"),
        (lambda: with_quotas(LAB, {"default": 64}), "--quota default=64`: the projects in `lab` would have"),
        (lambda: with_quotas(TWO, parse_quotas(["vision"])), "a quota is PROJECT=DEVICES"),
        (lambda: without_nodes(TWO, ["node-1"]), "no node has that name; there are node-00001, node-00002"),
        (lambda: without_nodes(TWO, ["3x8"]), "there are 2 such nodes"),
        (lambda: without_nodes(TWO, ["2x8"]), "no node would be left"),
        (lambda: without_nodes(POOL, ["100"]), "there are 100 processors"),
        (lambda: with_nodes(POOL, [ClusterShape(2, 8)]), "100 processors in one pool, not nodes"),
        (lambda: with_nodes(TWO, [ClusterShape(2)]), "how many GPUs has a node"),
    ],
)
def test_a_change_that_cannot_be_made_says_why(change: Callable[[], Workload], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence) as refused:
        change()
    assert refused.value.hint


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("node-00007x", "--remove node-00007"), ("vm", "`--remove NAME`, one of those")],
)
def test_node_that_is_not_there_is_answered_with_names_and_no_guess(typed: str, hint: str) -> None:
    many = gpu_cluster(work_job(0, 60, 8), nodes=11)
    with pytest.raises(SpecError, match=r"node-00008 and 3 more$") as refused:
        without_nodes(many, [typed])
    assert refused.value.hint == hint
