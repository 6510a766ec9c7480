"""Evictions over Microsoft's ITP: what stops for every tenth job, by lost work and newest first."""

from __future__ import annotations

from statistics import fmean

import msgspec

from benchmarks.yardsticks.beat import Beat, report
from benchmarks.yardsticks.policy_itp import JOBS, MACHINE
from benchmarks.yardsticks.section import Report, Section, Traces
from shoal.scheduler import Policy
from shoal.sim.assumptions import CheckpointModel
from shoal.sim.cluster_shapes import nodes_of
from shoal.sim.from_trace import workload_of
from shoal.sim.traces.table import ITP, read_table
from shoal.sim.twin import VictimBasis, simulate_workload
from shoal.sim.workload import SimulationOutcome

EVERY, PRODUCTION = 10, 50
MODELLED = CheckpointModel(interval_s=3600.0, cost_s=30.0, restart_s=120.0)
NEWEST = "newest first"


def run(traces: Traces) -> Report:
    jobs = [msgspec.structs.replace(job, project=None) for job in read_table(traces.path(JOBS), ITP)]
    whole = workload_of(jobs, nodes_of(MACHINE))
    urgent = tuple(
        msgspec.structs.replace(job, priority=PRODUCTION) if index % EVERY == 0 else job
        for index, job in enumerate(whole.jobs)
    )
    workload = msgspec.structs.replace(whole, jobs=urgent)
    newest = simulate_workload(workload, Policy(), checkpoints=MODELLED, victim_basis=VictimBasis.AGE)
    ours = simulate_workload(workload, Policy(), checkpoints=MODELLED)
    rows = [
        Beat("ITP", "device-hours lost", NEWEST, newest.lost / 3600, ours.lost / 3600),
        Beat("ITP", "evictions", NEWEST, newest.num_interrupted, ours.num_interrupted, is_goal=False),
        Beat("ITP", "mean queue s of the others", NEWEST, _wait(newest), _wait(ours)),
    ]
    notes = [
        f"every {EVERY}th job is `production`; all save hourly, for 30 s, and need 2 min to go on (modelled)",
        (
            f"`production` queues {_wait(ours, is_urgent=True):.1f} s in the mean, with {NEWEST} "
            f"{_wait(newest, is_urgent=True):.1f} s"
        ),
    ]
    return report(SECTION.title, rows, notes)


def _wait(outcome: SimulationOutcome, *, is_urgent: bool = False) -> float:
    jobs = zip(outcome.workload.jobs, outcome.starts, strict=True)
    return fmean(at - job.submitted_at for job, at in jobs if (job.priority > 0) == is_urgent)


SECTION = Section(
    name="preemption",
    title="Preemption, ITP pooled on 160 nodes of 8 GPUs: what is lost to evictions",
    needs=(JOBS,),
    run=run,
)
