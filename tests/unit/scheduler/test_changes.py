"""What a waiting job is told that it could ask for instead."""

from __future__ import annotations

import msgspec

from shoal.model.window import Window, WindowKind
from shoal.scheduler import Policy, Snapshot
from shoal.scheduler.changes import changes
from tests.support.clusters import ALL_GPUS, NOW, holding, job, node, nodes, request, snapshot, within


def told(facts: Snapshot, attempt_id: str = "att-1") -> list[str]:
    return [change.sentence for change in changes(facts, Policy(), NOW, attempt_id)]


def test_gang_is_told_how_many_nodes_are_free() -> None:
    busy = (holding(1, {"node-02": ALL_GPUS, "node-05": ALL_GPUS}), holding(2, {"node-06": (0,)}))
    facts = snapshot(nodes(6), (job(1, request(gpus=8, nodes=4)),), busy)
    assert told(facts) == [
        "`nodes: 3..4` would start it now (on 3 nodes)",
        "`nodes: 3` would start it now",
    ]


def test_job_behind_a_promise_is_told_the_longest_limit_that_ends_before_it() -> None:
    """The promise is 90 minutes away; two are left for reading and typing."""
    head = job(1, request(gpus=8, nodes=2), submitted_at=NOW - 1500)
    busy = (holding(1, {"node-01": ALL_GPUS}, time_limit_s=6000.0),)
    facts = snapshot(nodes(2), (head, job(2, request(gpus=1))), busy)
    assert told(facts, "att-2") == [
        "`time_limit: 1h28m` would start it now (if it needs no more; it would be gone before 09:30 UTC)"
    ]


def test_limit_that_the_job_would_outlast_is_not_told() -> None:
    head = job(1, request(gpus=8, nodes=2), submitted_at=NOW - 1500)
    busy = (holding(1, {"node-01": ALL_GPUS}, time_limit_s=6000.0),)
    behind = job(2, request(gpus=1), expected_s=6000.0)
    assert told(snapshot(nodes(2), (head, behind), busy), "att-2") == []


def test_job_of_which_nothing_is_known_but_its_limit_is_told_of_a_shorter_one() -> None:
    head = job(1, request(gpus=8, nodes=2), submitted_at=NOW - 1500)
    busy = (holding(1, {"node-01": ALL_GPUS}, time_limit_s=6000.0),)
    behind = job(2, request(gpus=1, time_limit_s=7200.0), expected_s=7000.0)
    (change,) = changes(snapshot(nodes(2), (head, behind), busy), Policy(), NOW, "att-2")
    assert change.setting == "time_limit: 1h28m"


def test_job_that_maintenance_comes_too_soon_for_is_told_the_limit_that_ends_before_it() -> None:
    window = Window(
        window_id="win-1",
        kind=WindowKind.MAINTENANCE,
        nodes=("node-01",),
        from_at=NOW + 3600,
        until_at=NOW + 7200,
    )
    facts = snapshot(nodes(1), (job(1, request(gpus=1, time_limit_s=7200.0)),))
    assert told(msgspec.structs.replace(facts, windows=(window,))) == [
        "`time_limit: 58m` would start it now (if it needs no more; it would be gone before 09:00 UTC)"
    ]


def test_gang_that_must_be_close_is_told_that_it_need_not() -> None:
    cluster = tuple(node(f"node-{n}", rack=f"r{n // 3}") for n in range(6))
    busy = (holding(1, {"node-0": (0,)}), holding(2, {"node-4": (5,)}))
    close = job(1, request(gpus=8, nodes=3, topology=within("rack")))
    assert told(snapshot(cluster, (close,), busy)) == [
        "`topology.mode: preferred` would start it now",
        "`nodes: 2..3` would start it now (on 2 nodes)",
        "`nodes: 2` would start it now",
    ]


def test_job_that_names_a_kind_is_told_of_the_other() -> None:
    cluster = (*nodes(1), node("h", kind="H100"))
    facts = snapshot(cluster, (job(1, request(gpus=8, kind="H100")),), (holding(1, {"h": ALL_GPUS}),))
    assert told(facts) == ["`gpus: 8` would start it now (any kind; now A100)"]


def test_job_that_another_comes_before_is_not_told_what_would_start_only_without_that_one() -> None:
    """Asked for again it comes last: the one GPU job takes the free node first."""
    gang = job(1, request(gpus=8, nodes=2), submitted_at=NOW - 1500)
    busy = (holding(1, {"node-01": ALL_GPUS}, time_limit_s=6000.0),)
    assert told(snapshot(nodes(2), (gang, job(2, request(gpus=1))), busy)) == []


def test_job_that_starts_anyway_or_does_not_wait_for_room_is_told_nothing() -> None:
    resting = job(2, request(gpus=8, nodes=4), not_before=NOW + 5)
    facts = snapshot(nodes(3), (job(1, request(gpus=8)), resting))
    assert told(facts, "att-1") == told(facts, "att-2") == told(facts, "nobody") == []
