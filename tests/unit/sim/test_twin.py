"""The twin: its clock, the causes that stop jobs, and the recorded outcome. Times are worked out by hand."""

from __future__ import annotations

from math import isnan

import msgspec
import pytest

from shoal.errors import Bug, SpecError
from shoal.model.job import ResourceRequest
from shoal.model.people import DeviceAmounts
from shoal.scheduler import Candidate, Holding, Policy
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.sim.assumptions import CheckpointModel, LimitStamper, NodeFailureModel, NodeFailureTimes
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.twin import VictimBasis, simulate_workload
from shoal.sim.workload import NodeChange, SimulationOutcome, Workload
from tests.support.sim_jobs import gpu_cluster, work_job


def starts(workload: Workload) -> list[float]:
    return list(simulate_workload(workload, Policy()).starts)


def test_jobs_start_when_their_resources_are_free() -> None:
    # Both fit at once. The third waits for the first to end.
    assert starts(gpu_cluster(work_job(0, 100, 4), work_job(0, 200, 4), work_job(10, 50, 4))) == [0, 0, 100]


def test_a_processor_that_is_given_back_is_free_at_the_same_moment() -> None:
    assert starts(gpu_cluster(work_job(0, 100, 8), work_job(100, 5, 8))) == [0, 100]


def test_a_gang_starts_whole_or_not_at_all() -> None:
    workload = gpu_cluster(work_job(0, 100, 8), work_job(1, 10, 8, nodes=2), nodes=2)
    assert starts(workload) == [0, 100]


def test_a_job_that_can_never_fit_is_refused_and_the_others_run() -> None:
    outcome = simulate_workload(gpu_cluster(work_job(0, 10, 9), work_job(0, 10, 8)), Policy())
    assert outcome.refused == [0]
    assert isnan(outcome.starts[0])
    assert outcome.ends[1] == 10


def test_a_project_holds_no_more_than_its_limit_and_what_never_fits_that_is_refused() -> None:
    limited = ProjectInfo(name="default", limit=DeviceAmounts(gpus=4))
    workload = msgspec.structs.replace(
        gpu_cluster(work_job(0, 100, 4), work_job(0, 100, 4), work_job(0, 100, 8)), projects=(limited,)
    )
    outcome = simulate_workload(workload, Policy())
    assert list(outcome.starts)[:2] == [0, 100]
    assert outcome.refused == [2]


def test_a_project_within_its_quota_goes_before_one_that_borrows() -> None:
    jobs = [
        work_job(0, 100, 8),
        *(work_job(at, 100, 8, project="a") for at in (1, 2)),
        work_job(3, 100, 8, project="b"),
    ]
    # The jobs that run first are within their quota too, so that no job takes their devices back.
    guaranteed = tuple(ProjectInfo(name=name, quota=DeviceAmounts(gpus=8)) for name in ("b", "default"))
    workload = msgspec.structs.replace(gpu_cluster(*jobs), projects=guaranteed)
    assert starts(workload) == [0, 200, 300, 100]


def test_jobs_out_of_order_are_a_bug() -> None:
    with pytest.raises(Bug, match="sort the jobs first"):
        simulate_workload(gpu_cluster(work_job(10, 1, 8), work_job(0, 1, 8)), Policy())


def test_a_job_that_waits_for_a_node_that_never_opens_is_a_bug() -> None:
    closed = tuple(
        msgspec.structs.replace(node, closed_because="broken") for node in nodes_of(ClusterShape(1, 8))
    )
    with pytest.raises(Bug, match="1 jobs never start"):
        simulate_workload(Workload(nodes=closed, jobs=[work_job(0, 1)]), Policy())


def test_what_happened_is_noted_over_time() -> None:
    outcome = simulate_workload(gpu_cluster(work_job(0, 100, 8), work_job(10, 50, 4)), Policy())
    line = outcome.timeline
    noted = list(zip(line.at, line.queued, line.used, line.open, strict=True))
    assert noted == [(0, 0, 8, 8), (10, 1, 8, 8), (100, 0, 4, 8), (150, 0, 0, 8)]
    assert outcome.useful == 8 * 100 + 4 * 50


def test_a_node_that_is_taken_away_sends_its_jobs_back_to_the_queue() -> None:
    first, second = nodes_of(ClusterShape(2, 8))
    workload = Workload(
        nodes=(first, second),
        jobs=[work_job(0, 100, 8), work_job(0, 100, 8)],
        changes=[
            NodeChange(at=40, name=first.name, view=None),
            NodeChange(at=60, name=first.name, view=first),
        ],
    )
    outcome = simulate_workload(workload, Policy())
    assert list(outcome.starts) == [0, 0]
    # The job had run 40 s, all of which is lost. Its node is back at 60.
    assert sorted(outcome.ends) == [100, 160]
    assert (outcome.num_interrupted, outcome.lost, outcome.useful) == (1, 8 * 40, 8 * 200)


def test_a_node_that_is_closed_lets_its_jobs_end_and_takes_no_new_ones() -> None:
    (node,) = nodes_of(ClusterShape(1, 8))
    closed = msgspec.structs.replace(node, closed_because="drained")
    workload = Workload(
        nodes=(node,),
        jobs=[work_job(0, 100, 8), work_job(10, 10, 8)],
        changes=[
            NodeChange(at=5, name=node.name, view=closed),
            NodeChange(at=500, name=node.name, view=node),
        ],
    )
    assert starts(workload) == [0, 500]


FAILURES = NodeFailureModel(mtbf_s=900, repair_s=60, seed=24)
FAILS_AT = NodeFailureTimes(FAILURES, "node-00001").time_in_service()
"""After 649.6 s. The next time the node serves for 2,892 s."""


EVERY_MINUTE = CheckpointModel(interval_s=60)


def failing(workload: Workload, checkpoints: CheckpointModel | None = None) -> SimulationOutcome:
    return simulate_workload(workload, Policy(), failures=FAILURES, checkpoints=checkpoints)


def test_a_job_on_a_node_that_fails_begins_again_after_the_repair() -> None:
    assert pytest.approx(649.6217445) == FAILS_AT
    outcome = failing(gpu_cluster(work_job(0, 1000, 8)))
    assert outcome.num_failures == 1
    assert list(outcome.starts) == [0]
    assert list(outcome.ends) == [FAILS_AT + 60 + 1000]
    assert outcome.lost == 8 * FAILS_AT


def test_a_job_with_checkpoints_loses_only_what_came_after_the_last() -> None:
    outcome = failing(
        gpu_cluster(work_job(0, 1000, 8)), CheckpointModel(interval_s=100, cost_s=5, restart_s=20)
    )
    # Six checkpoints in 630 s. Then the job reads for 20 s, works for 400 and writes three more.
    assert outcome.lost == pytest.approx(8 * (FAILS_AT - 630))
    assert outcome.overhead == pytest.approx(8 * (6 * 5 + 20 + 3 * 5))
    assert outcome.useful == pytest.approx(8 * 1000)
    assert outcome.ends[0] == pytest.approx(FAILS_AT + 60 + 20 + 400 + 15)


def test_node_that_the_workload_loses_takes_its_jobs_with_it_and_fails_once() -> None:
    (node,) = nodes_of(ClusterShape(1, 8))
    silent, dead = (msgspec.structs.replace(node, closed_because=why) for why in ("silent", "dead"))
    workload = msgspec.structs.replace(
        gpu_cluster(work_job(0, 100, 8)),
        changes=[
            NodeChange(at=40, name=node.name, view=silent, is_loss=True),
            NodeChange(at=50, name=node.name, view=dead, is_loss=True),
            NodeChange(at=60, name=node.name, view=node),
        ],
    )
    outcome = simulate_workload(workload, Policy())
    assert (outcome.num_failures, outcome.num_interrupted) == (1, 1)
    assert list(outcome.ends) == [160]
    assert outcome.lost == 8 * 40


def test_failures_of_one_node_are_the_same_whatever_the_other_nodes_are() -> None:
    alone = failing(gpu_cluster(work_job(0, 5000, 8)), EVERY_MINUTE)
    jobs = work_job(0, 5000, 8), work_job(0, 5000, 8)
    beside = failing(gpu_cluster(*jobs, nodes=2), EVERY_MINUTE)
    assert beside.holdings.end[list(beside.holdings.job).index(0)] == alone.holdings.end[0]


def test_a_job_that_could_never_end_at_this_failure_rate_is_reported() -> None:
    with pytest.raises(SpecError, match="would never end at this failure rate") as refused:
        failing(gpu_cluster(work_job(0, 1_000_000, 8)))
    assert "--checkpoint" in str(refused.value.hint)


class Notebook(LimitStamper):
    """A stamper that records its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def arrive(self, candidate: Candidate) -> Candidate:
        self.told.append(("submitted", candidate.submitted_at))
        return super().arrive(candidate)

    def ended(self, holding: Holding, request: ResourceRequest, run_s: float, now: float) -> list[Candidate]:
        self.told.append(("ended", now))
        return []


def test_a_stamper_learns_of_an_end_before_the_submissions_of_that_moment() -> None:
    notebook = Notebook()
    simulate_workload(gpu_cluster(work_job(0, 100, 8), work_job(100, 1, 8)), Policy(), stamper=notebook)
    assert notebook.told == [("submitted", 0), ("ended", 100), ("submitted", 100), ("ended", 101)]


def test_production_job_starts_at_once_and_its_victim_continues_from_its_checkpoint() -> None:
    urgent = msgspec.structs.replace(work_job(500, 100, 8), priority=50)
    every = CheckpointModel(interval_s=200.0)
    outcome = simulate_workload(gpu_cluster(work_job(0, 1000, 8), urgent), Policy(), checkpoints=every)
    assert list(outcome.starts) == [0, 500]
    # 400 of 500 s were saved, so the job continues at 600 with 600 s left.
    assert list(outcome.ends) == [1200, 600]
    assert outcome.lost == 100 * 8
    assert outcome.num_interrupted == 1


def test_victim_is_the_job_with_the_newest_checkpoint_or_else_the_newest_job() -> None:
    urgent = msgspec.structs.replace(work_job(990, 10, 8), priority=50)
    jobs = (work_job(0, 5000, 8), work_job(500, 5000, 8), urgent)
    every = CheckpointModel(interval_s=320.0)  # the first saved at 960, the second at 820
    seen = simulate_workload(gpu_cluster(*jobs, nodes=2), Policy(), checkpoints=every)
    unseen = simulate_workload(
        gpu_cluster(*jobs, nodes=2), Policy(), checkpoints=every, victim_basis=VictimBasis.NOTHING
    )
    assert (seen.lost, unseen.lost) == (30 * 8, 170 * 8)
