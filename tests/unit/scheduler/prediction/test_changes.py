"""What a waiting job is told that it could ask for instead."""

from __future__ import annotations

import msgspec

from shoal.model.node import Window, WindowKind
from shoal.scheduler import Policy, Snapshot
from shoal.scheduler.prediction.changes import changes_starting_now
from tests.support.clusters import (
    ALL_GPUS,
    NOW,
    candidate,
    holding,
    node,
    nodes,
    request,
    snapshot,
    within_label,
)


def sentences(facts: Snapshot, attempt_id: str = "att-1") -> list[str]:
    return [change.sentence for change in changes_starting_now(facts, Policy(), NOW, attempt_id)]


def test_gang_suggestion_uses_the_number_of_free_nodes() -> None:
    busy = (holding(1, {"node-02": ALL_GPUS, "node-05": ALL_GPUS}), holding(2, {"node-06": (0,)}))
    facts = snapshot(nodes(6), (candidate(1, request(gpus=8, nodes=4)),), busy)
    assert sentences(facts) == [
        "`nodes: 3..4` would start it now (on 3 nodes)",
        "`nodes: 3` would start it now",
    ]


def test_job_behind_a_promise_is_offered_the_longest_limit_that_ends_before_it() -> None:
    """The promise is 90 minutes away. Two minutes are left for reading and typing."""
    head = candidate(1, request(gpus=8, nodes=2), submitted_at=NOW - 1500)
    busy = (holding(1, {"node-01": ALL_GPUS}, time_limit_s=6000.0),)
    facts = snapshot(nodes(2), (head, candidate(2, request(gpus=1))), busy)
    assert sentences(facts, "att-2") == [
        "`time_limit: 1h28m` would start it now (if it needs no more; it would be gone before 09:30 UTC)"
    ]


def test_limit_that_the_job_would_outlast_is_not_offered() -> None:
    head = candidate(1, request(gpus=8, nodes=2), submitted_at=NOW - 1500)
    busy = (holding(1, {"node-01": ALL_GPUS}, time_limit_s=6000.0),)
    behind = candidate(2, request(gpus=1), expected_s=6000.0)
    assert sentences(snapshot(nodes(2), (head, behind), busy), "att-2") == []


def test_job_with_only_a_limit_known_is_offered_a_shorter_limit() -> None:
    head = candidate(1, request(gpus=8, nodes=2), submitted_at=NOW - 1500)
    busy = (holding(1, {"node-01": ALL_GPUS}, time_limit_s=6000.0),)
    behind = candidate(2, request(gpus=1, time_limit_s=7200.0), expected_s=7000.0)
    (change,) = changes_starting_now(snapshot(nodes(2), (head, behind), busy), Policy(), NOW, "att-2")
    assert change.setting == "time_limit: 1h28m"


def test_job_that_would_meet_maintenance_is_offered_a_shorter_limit() -> None:
    window = Window(
        window_id="win-1",
        kind=WindowKind.MAINTENANCE,
        nodes=("node-01",),
        from_at=NOW + 3600,
        until_at=NOW + 7200,
    )
    facts = snapshot(nodes(1), (candidate(1, request(gpus=1, time_limit_s=7200.0)),))
    assert sentences(msgspec.structs.replace(facts, windows=(window,))) == [
        "`time_limit: 58m` would start it now (if it needs no more; it would be gone before 09:00 UTC)"
    ]


def test_gang_with_required_topology_is_offered_preferred_topology() -> None:
    cluster = tuple(node(f"node-{n}", rack=f"r{n // 3}") for n in range(6))
    busy = (holding(1, {"node-0": (0,)}), holding(2, {"node-4": (5,)}))
    close = candidate(1, request(gpus=8, nodes=3, topology=within_label("rack")))
    assert sentences(snapshot(cluster, (close,), busy)) == [
        "`topology.mode: preferred` would start it now",
        "`nodes: 2..3` would start it now (on 2 nodes)",
        "`nodes: 2` would start it now",
    ]


def test_job_that_names_a_gpu_kind_is_offered_another_kind() -> None:
    cluster = (*nodes(1), node("h", kind="H100"))
    facts = snapshot(cluster, (candidate(1, request(gpus=8, kind="H100")),), (holding(1, {"h": ALL_GPUS}),))
    assert sentences(facts) == ["`gpus: 8` would start it now (any kind; now A100)"]


def test_no_change_is_offered_that_works_only_without_a_job_ahead() -> None:
    """Submitted again, it comes last: the job for one GPU takes the free node first."""
    gang = candidate(1, request(gpus=8, nodes=2), submitted_at=NOW - 1500)
    busy = (holding(1, {"node-01": ALL_GPUS}, time_limit_s=6000.0),)
    assert sentences(snapshot(nodes(2), (gang, candidate(2, request(gpus=1))), busy)) == []


def test_no_change_is_offered_to_a_job_that_starts_anyway_or_is_deferred() -> None:
    resting = candidate(2, request(gpus=8, nodes=4), not_before=NOW + 5)
    facts = snapshot(nodes(3), (candidate(1, request(gpus=8)), resting))
    assert sentences(facts, "att-1") == sentences(facts, "att-2") == sentences(facts, "nobody") == []
