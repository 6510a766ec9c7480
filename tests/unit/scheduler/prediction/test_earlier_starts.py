"""Changes that would start a job sooner, in a future that can be worked out by hand."""

from __future__ import annotations

from shoal.scheduler import Candidate, Holding, Policy, Snapshot
from shoal.scheduler.prediction.changes import START_IT, RequestChange
from shoal.scheduler.prediction.forecast import RunTimeSpread
from shoal.scheduler.prediction.sooner import changes_starting_sooner, without
from tests.support.clusters import ALL_GPUS, NOW, candidate, holding, node, nodes, request, snapshot

HOUR = 3600.0


def at_its_limit(work: Candidate | Holding) -> RunTimeSpread:
    limit_s = work.time_limit_s if isinstance(work, Holding) else work.request.time_limit_s
    return RunTimeSpread(expected_s=HOUR, limit_s=limit_s, runs=(limit_s or HOUR,) * 1000)


def sentences(facts: Snapshot, most: int = 3, start_it: str = START_IT) -> list[str]:
    changes = changes_starting_sooner(facts, Policy(), NOW, facts.candidates[0], at_its_limit, most, start_it)
    return [change.sentence for change in changes]


def busy(node_name: str, number: int, hours: float) -> Holding:
    return holding(number, {node_name: ALL_GPUS}, placed_at=NOW, time_limit_s=hours * HOUR)


def test_gang_suggestion_halves_it_when_the_first_node_becomes_free() -> None:
    held = (busy("node-01", 1, 1.0), busy("node-02", 2, 5.0))
    facts = snapshot(nodes(2), (candidate(1, request(gpus=8, nodes=2)),), held)
    assert sentences(facts) == [
        "`nodes: 1..2` would start it about 09:00 UTC instead of 13:00 UTC",
        "`nodes: 1` would start it about 09:00 UTC instead of 13:00 UTC",
    ]
    assert len(sentences(facts, most=1)) == 1


def test_job_that_names_a_gpu_kind_learns_that_another_is_free_first() -> None:
    held = (busy("node-01", 1, 1.0), busy("h", 2, 5.0))
    facts = snapshot((*nodes(1), node("h", kind="H100")), (candidate(1, request(gpus=8, kind="H100")),), held)
    assert sentences(facts) == ["`gpus: 8` would start it about 09:00 UTC instead of 13:00 UTC"]
    handed = sentences(facts, start_it="have it handed to Slurm")
    assert handed == ["`gpus: 8` would have it handed to Slurm about 09:00 UTC instead of 13:00 UTC"]


def test_changes_that_save_little_are_not_offered() -> None:
    held = (busy("node-01", 1, 4.0), busy("node-02", 2, 5.0))
    assert sentences(snapshot(nodes(2), (candidate(1, request(gpus=8, nodes=2)),), held)) == []


def test_changes_already_listed_are_not_listed_again() -> None:
    wanted = request(gpus=8)
    at_once = RequestChange(setting="nodes: 3", sentence="", request=wanted)
    later = [
        RequestChange(setting=setting, sentence="", request=wanted) for setting in ("nodes: 1..4", "gpus: 8")
    ]
    assert [change.setting for change in without(later, [at_once])] == ["gpus: 8"]
