"""The twin under random workloads: nothing is over-committed, every job ends, gangs stay whole, runs repeat
exactly.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.scheduler import Policy
from shoal.sim.assumptions import CheckpointModel, NodeFailureModel
from shoal.sim.twin import simulate_workload
from shoal.sim.workload import SimulationOutcome, WorkJob, Workload
from tests.support.sim_jobs import gpu_cluster, work_job

NUM_NODES, NUM_GPUS = 3, 4

jobs = st.lists(
    st.builds(
        work_job,
        st.integers(0, 50),
        st.integers(1, 40),
        st.integers(1, NUM_GPUS),
        nodes=st.integers(1, NUM_NODES),
        limit_s=st.integers(40, 80),
        project=st.sampled_from("ab"),
    ),
    min_size=1,
    max_size=12,
)
failures = st.none() | st.builds(
    NodeFailureModel, mtbf_s=st.integers(50, 500), repair_s=st.integers(1, 50), seed=st.integers(0, 9)
)
CHECKPOINTS = CheckpointModel(interval_s=7, cost_s=1, restart_s=2)


def cluster(jobs: list[WorkJob]) -> Workload:
    ordered = sorted(jobs, key=lambda job: job.submitted_at)
    return gpu_cluster(*ordered, nodes=NUM_NODES, gpus=NUM_GPUS)


def most_held(outcome: SimulationOutcome) -> float:
    stays = outcome.holdings
    changes = [*zip(stays.begin, stays.devices, strict=True)]
    changes += [(end, -devices) for end, devices in zip(stays.end, stays.devices, strict=True)]
    held = most = 0.0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


@given(jobs, failures)
def test_every_job_ends_on_a_cluster_that_is_never_over_committed(
    work_jobs: list[WorkJob], failing: NodeFailureModel | None
) -> None:
    outcome = simulate_workload(cluster(work_jobs), Policy(), failures=failing, checkpoints=CHECKPOINTS)
    line = outcome.timeline
    assert most_held(outcome) <= NUM_NODES * NUM_GPUS
    assert all(used <= there for used, there in zip(line.used, line.open, strict=True))
    work_done = 0.0
    for index, job in enumerate(outcome.workload.jobs):
        # Failures are at odd moments: the end less the run may miss the start by a rounding.
        assert job.submitted_at <= outcome.starts[index] <= outcome.ends[index] - job.run_s + 1e-6
        gpus = job.request.gpus.count if job.request.gpus else 0
        work_done += gpus * job.request.min_nodes * job.run_s
    held = sum(
        devices * (end - begin)
        for devices, begin, end in zip(
            outcome.holdings.devices, outcome.holdings.begin, outcome.holdings.end, strict=True
        )
    )
    assert abs(outcome.useful - work_done) < 1e-6
    assert abs(held - outcome.useful - outcome.lost - outcome.overhead) < 1e-6


@given(jobs, failures)
def test_a_gang_holds_all_of_its_devices_or_none(
    work_jobs: list[WorkJob], failing: NodeFailureModel | None
) -> None:
    outcome = simulate_workload(cluster(work_jobs), Policy(), failures=failing, checkpoints=CHECKPOINTS)
    for index, devices in zip(outcome.holdings.job, outcome.holdings.devices, strict=True):
        request = outcome.workload.jobs[index].request
        assert request.gpus is not None
        assert devices == request.min_nodes * request.gpus.count


@given(jobs, failures)
def test_the_same_workload_gives_the_same_outcome(
    work_jobs: list[WorkJob], failing: NodeFailureModel | None
) -> None:
    first, second = (simulate_workload(cluster(work_jobs), Policy(), failures=failing) for _ in range(2))
    assert first.ends == second.ends
    assert first.holdings.begin == second.holdings.begin
    assert first.timeline.queued == second.timeline.queued
