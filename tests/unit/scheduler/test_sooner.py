"""What would start a job sooner, in a future that can be worked out by hand."""

from __future__ import annotations

from shoal.scheduler import Candidate, Holding, Policy, Snapshot
from shoal.scheduler.changes import START_IT, Change
from shoal.scheduler.expectation import Spread
from shoal.scheduler.sooner import sooner, without
from tests.support.clusters import ALL_GPUS, NOW, holding, job, node, nodes, request, snapshot

HOUR = 3600.0


def at_its_limit(work: Candidate | Holding) -> Spread:
    limit_s = work.time_limit_s if isinstance(work, Holding) else work.request.time_limit_s
    return Spread(expected_s=HOUR, limit_s=limit_s, runs=(limit_s or HOUR,) * 1000)


def told(facts: Snapshot, most: int = 3, start_it: str = START_IT) -> list[str]:
    found = sooner(facts, Policy(), NOW, facts.candidates[0], at_its_limit, most, start_it)
    return [change.sentence for change in found]


def busy(node_name: str, number: int, hours: float) -> Holding:
    return holding(number, {node_name: ALL_GPUS}, placed_at=NOW, time_limit_s=hours * HOUR)


def test_gang_is_told_that_half_of_it_could_start_when_the_first_node_is_free() -> None:
    held = (busy("node-01", 1, 1.0), busy("node-02", 2, 5.0))
    facts = snapshot(nodes(2), (job(1, request(gpus=8, nodes=2)),), held)
    assert told(facts) == [
        "`nodes: 1..2` would start it about 09:00 UTC instead of 13:00 UTC",
        "`nodes: 1` would start it about 09:00 UTC instead of 13:00 UTC",
    ]
    assert len(told(facts, most=1)) == 1


def test_job_that_names_a_kind_is_told_that_the_other_is_free_first() -> None:
    held = (busy("node-01", 1, 1.0), busy("h", 2, 5.0))
    facts = snapshot((*nodes(1), node("h", kind="H100")), (job(1, request(gpus=8, kind="H100")),), held)
    assert told(facts) == ["`gpus: 8` would start it about 09:00 UTC instead of 13:00 UTC"]
    handed = told(facts, start_it="have it handed to Slurm")
    assert handed == ["`gpus: 8` would have it handed to Slurm about 09:00 UTC instead of 13:00 UTC"]


def test_what_saves_little_is_not_told() -> None:
    held = (busy("node-01", 1, 4.0), busy("node-02", 2, 5.0))
    assert told(snapshot(nodes(2), (job(1, request(gpus=8, nodes=2)),), held)) == []


def test_what_is_told_already_is_not_told_again() -> None:
    asked = request(gpus=8)
    at_once = Change(setting="nodes: 3", sentence="", request=asked)
    later = [Change(setting=one, sentence="", request=asked) for one in ("nodes: 1..4", "gpus: 8")]
    assert [change.setting for change in without(later, [at_once])] == ["gpus: 8"]
