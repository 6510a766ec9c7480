"""The explanation of each reason for which a job waits.

`SHOAL_GOLDEN=write pytest tests/golden/explanations` rewrites the files; read the difference first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shoal.model.job import DependencyKind, ResourceRequest
from shoal.model.people import DeviceAmounts
from shoal.scheduler import (
    Explanation,
    Plan,
    Planner,
    Policy,
    UnmetDependency,
    WaitReason,
    explain_impossible,
)
from shoal.scheduler.explain.limits import explain_refusal
from shoal.scheduler.facts.amounts import DeviceAmount, ProjectInfo
from shoal.scheduler.order.project_tree import ProjectTree
from tests.support.clusters import (
    ALL_GPUS,
    GIB,
    NOW,
    candidate,
    explanation_of,
    holding,
    make_plan,
    node,
    nodes,
    request,
    snapshot,
    window,
    within_label,
)

HERE = Path(__file__).parent
DRAINED: dict[str, Any] = {
    "closed_because": "drained by ana",
    "closed_at": NOW - 7300.0,
    "closed_note": "bad NVLink",
}


def _unmet(*labels: str) -> tuple[UnmetDependency, ...]:
    return tuple(UnmetDependency(label=label, on=DependencyKind.SUCCEEDED) for label in labels)


def _gang_of_four() -> Plan:
    """Three nodes are free, three are busy, one is drained."""
    busy = (
        holding(1, {"node-02": ALL_GPUS, "node-05": ALL_GPUS}, time_limit_s=23_400.0),
        holding(2, {"node-06": (0,)}),
    )
    cluster = (*nodes(6), node("node-07", **DRAINED))
    return make_plan(cluster, candidate(1, request(gpus=8, nodes=4)), held=busy)


def _behind(project: str, time_limit_s: float | None = None) -> Plan:
    head = candidate(1, request(gpus=8, nodes=2), submitted_at=NOW - 1500, project=project)
    busy = (holding(1, {"node-01": ALL_GPUS}, time_limit_s=time_limit_s),)
    return make_plan(nodes(2), head, candidate(2, request(gpus=1)), held=busy)


def _racks() -> Plan:
    cluster = tuple(node(f"node-{n}", rack=f"r{n // 3}") for n in range(6))
    busy = (holding(1, {"node-0": (0,)}), holding(2, {"node-4": (5,)}))
    return make_plan(
        cluster, candidate(1, request(gpus=8, nodes=3, topology=within_label("rack"))), held=busy
    )


def _short_of_power(cap_watts: float = 10_000.0) -> Plan:
    labels = {"rack": "r1", "gpu_watts": "700", "idle_watts": "400"}
    cluster = tuple(node(f"node-{n}", labels=labels) for n in range(2))
    busy = (holding(1, {"node-0": ALL_GPUS}),)
    return make_plan(
        cluster, candidate(1, request(gpus=8)), held=busy, policy=Policy(power_caps={"r1": cap_watts})
    )


def explanation_for(plan: Plan, attempt_id: str = "att-1") -> Explanation:
    return explanation_of(plan, attempt_id)


def _never(requested: ResourceRequest) -> Explanation:
    cluster = (
        *(node(f"node-{n}", rack=f"r{n // 2}") for n in range(4)),
        node("cpu-1", gpus=0, cpus=128.0, pool="cpu"),
    )
    explanation = explain_impossible(requested, cluster)
    assert explanation is not None
    return explanation


REPAIR = window(("node-01", "node-02"), 7200.0, 14_400.0, because="new NIC")
SPOKEN_FOR = window(("node-02", "node-03"), 20_000.0, 30_000.0, project="secret", because="for secret")


def _refused(gpus: int) -> Explanation:
    """`vision` may have 16 GPUs and holds 8; `research`, above it, may have 64 and holds 60."""
    tree = ProjectTree(
        [
            ProjectInfo(name="research", limit=DeviceAmounts(gpus=64)),
            ProjectInfo(
                name="vision", parent="research", quota=DeviceAmounts(gpus=8), borrow=DeviceAmounts(gpus=8)
            ),
        ]
    )
    tree.take("vision", DeviceAmount(8_000, 0))
    tree.take("research", DeviceAmount(52_000, 0))
    refusal = tree.refusal("vision", DeviceAmount(gpus * 1000, 0))
    assert refusal is not None
    return explain_refusal(candidate(1, request(gpus=gpus)), refusal)


def _small(**fields: Any) -> Explanation:
    """The job has run on one of three nodes for ten minutes, and the others have become idle."""
    held = holding(1, {"node-01": ALL_GPUS}, request=request(gpus=8, nodes=(1, 3)), **fields)
    planner = Planner.of(snapshot(nodes(3), (), (held,)), Policy())
    planner.plan(NOW)
    explanation = planner.explain_growth("held-1", NOW)
    assert explanation is not None
    return explanation


CASES = {
    "fewer_nodes_never_saved": lambda: _small(checkpoint_at=None),
    "fewer_nodes_not_yet": lambda: _small(placed_at=NOW - 180.0, checkpoint_at=NOW - 30.0),
    "fewer_nodes_saved_long_ago": lambda: _small(checkpoint_at=NOW - 400.0),
    "fewer_nodes_now": lambda: _small(checkpoint_at=NOW - 30.0),
    "dependency": lambda: explanation_for(
        make_plan(nodes(1), candidate(1, request(), unmet=_unmet("vision/7")))
    ),
    "dependency_many": lambda: explanation_for(
        make_plan(nodes(1), candidate(1, request(), unmet=_unmet(*(f"vision/{n}" for n in range(2, 9)))))
    ),
    "backoff": lambda: explanation_for(make_plan(nodes(1), candidate(1, request(), not_before=NOW + 39.5))),
    "array_limit": lambda: explanation_for(
        make_plan(
            nodes(1),
            candidate(1, request(), array_id="arr", array_at_once=1),
            held=(holding(1, {"node-01": (0,)}, array_id="arr"),),
        )
    ),
    "no_nodes": lambda: explanation_for(make_plan((), candidate(1, request()))),
    "never_fits_gpus": lambda: _never(request(gpus=16)),
    "never_fits_gpus_anywhere": lambda: _never(request(gpus=64)),
    "never_fits_gpus_unevenly": lambda: _never(request(gpus=9)),
    "never_fits_kind": lambda: _never(request(gpus=8, kind="a-100")),
    "never_fits_cpus": lambda: _never(request(cpus=256.0)),
    "never_fits_memory": lambda: _never(request(memory_bytes=2048 * GIB)),
    "never_fits_disk": lambda: _never(request(disk_bytes=2000 * GIB)),
    "never_fits_together": lambda: _never(request(gpus=8, cpus=128.0)),
    "never_fits_nodes": lambda: _never(request(gpus=8, nodes=5)),
    "never_fits_topology": lambda: _never(request(gpus=8, nodes=3, topology=within_label("rack"))),
    "never_fits_label": lambda: _never(request(gpus=8, nodes=3, topology=within_label("zone"))),
    "nodes_closed": lambda: explanation_for(
        make_plan((*nodes(2), node("node-07", **DRAINED)), candidate(1, request(gpus=8, nodes=3)))
    ),
    "nodes_excluded": lambda: explanation_for(
        make_plan(nodes(2), candidate(1, request(gpus=8, nodes=2), excluded_nodes=("node-02",)))
    ),
    "resources": lambda: explanation_for(_gang_of_four()),
    "resources_one_node": lambda: explanation_for(
        make_plan(
            nodes(1),
            candidate(1, request(cpus=60.0)),
            held=(holding(1, {"node-01": ALL_GPUS}, time_limit_s=1e6),),
        )
    ),
    "resources_memory_taken_with_gpus": lambda: explanation_for(
        make_plan(nodes(1), candidate(2, request(gpus=8)), candidate(1, request(cpus=2.0), priority=-1))
    ),
    "resources_memory_left": lambda: explanation_for(
        make_plan(nodes(1), candidate(2, request(gpus=7)), candidate(1, request(cpus=16.0), priority=-1))
    ),
    "quota": lambda: _refused(9),
    "quota_never": lambda: _refused(17),
    "limit": lambda: _refused(5),
    "making_room": lambda: explanation_for(
        make_plan(
            nodes(1),
            candidate(1, request(gpus=8), priority=50),
            held=(holding(1, {"node-01": (0, 1)}), holding(2, {"node-01": (2, 3)})),
        )
    ),
    "power": lambda: explanation_for(_short_of_power()),
    "power_never": lambda: explanation_for(_short_of_power(6_000.0)),
    "topology": lambda: explanation_for(_racks()),
    "window": lambda: explanation_for(make_plan(nodes(1), candidate(1, request(gpus=1)), windows=(REPAIR,))),
    "window_of_others": lambda: explanation_for(
        make_plan(
            nodes(3),
            candidate(1, request(gpus=8, nodes=2, time_limit_s=40_000.0)),
            windows=(REPAIR, SPOKEN_FOR),
        )
    ),
    "resources_before_a_window": lambda: explanation_for(
        make_plan(
            nodes(3),
            candidate(1, request(gpus=8, nodes=3, time_limit_s=7200.0)),
            held=(holding(1, {"node-03": ALL_GPUS}, time_limit_s=4200.0),),
            windows=(REPAIR,),
        )
    ),
    "window_now": lambda: explanation_for(
        make_plan(
            nodes(2), candidate(1, request(gpus=1)), windows=(window(("node-01", "node-02"), -60.0, 3600.0),)
        )
    ),
    "behind": lambda: explanation_for(_behind("vision"), "att-2"),
    "behind_another_project": lambda: explanation_for(_behind("secret"), "att-2"),
    "behind_a_promise_of_another_project": lambda: explanation_for(
        _behind("secret", time_limit_s=90_000.0), "att-2"
    ),
    "behind_a_promise": lambda: explanation_for(_behind("vision", time_limit_s=90_000.0), "att-2"),
}


def explanation_text(explanation: Explanation) -> str:
    lines = [f"waiting: `train` {explanation.sentence}", *(f"  {line}" for line in explanation.details)]
    return "\n".join([*lines, *([f"hint: {explanation.hint}"] if explanation.hint else [])]) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_the_reason_reads_as_it_was_agreed(case: str) -> None:
    explanation = CASES[case]()
    assert case.startswith(explanation.why)
    path = HERE / "cases" / f"{case}.txt"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(explanation_text(explanation), encoding="utf-8")
    assert explanation_text(explanation) == path.read_text(encoding="utf-8")


def test_every_reason_a_plan_can_give_has_a_text() -> None:
    # These explain placed attempts, so the control plane sets them.
    placed = {WaitReason.NOT_BEGUN, WaitReason.UNREACHABLE, WaitReason.ORPHANED}
    assert {CASES[case]().why for case in CASES} == set(WaitReason) - placed


@pytest.mark.parametrize("case", CASES)
def test_nothing_names_a_project_that_the_reader_may_not_see(case: str) -> None:
    assert "secret" not in str(CASES[case]())


def test_a_job_of_another_project_is_not_named() -> None:
    explanation = CASES["behind_another_project"]()
    assert "vision/1" not in explanation_text(explanation)
    assert explanation.facts == {"behind_job_id": None, "queue": "default", "kept_from": None}
