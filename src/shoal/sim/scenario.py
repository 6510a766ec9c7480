"""Everything that decides a simulation, in one object that can be handed to another process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec

from shoal.errors import SpecError
from shoal.scheduler import Policy
from shoal.sim.assumptions import CheckpointModel, NodeFailureModel
from shoal.sim.cluster_shapes import is_pool
from shoal.sim.twin import simulate_workload
from shoal.sim.workload import SimulationOutcome, Workload

FEW_JOBS = 5000
"""Below this number of jobs a simulation takes about as long as starting a process for it."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    workload: Workload
    policy: Policy = Policy()
    failures: NodeFailureModel | None = None
    checkpoints: CheckpointModel = CheckpointModel()

    def __post_init__(self) -> None:
        if self.failures is not None and is_pool(self.workload.nodes):
            raise SpecError(
                "`--mtbf` is for nodes; processors in one pool would all fail at once",
                hint="leave out `--mtbf`, or describe the nodes: --nodes 160x8",
            )


def play(scenario: Scenario) -> SimulationOutcome:
    """Run the simulation. The same scenario has the same outcome, in any process."""
    return simulate_workload(
        scenario.workload,
        scenario.policy,
        failures=scenario.failures,
        checkpoints=scenario.checkpoints,
    )


def play_all(scenarios: Sequence[Scenario]) -> list[SimulationOutcome]:
    """Run each simulation in a process of its own, unless that would take longer."""
    if len(scenarios) == 1 or all(len(scenario.workload.jobs) < FEW_JOBS for scenario in scenarios):
        return [play(scenario) for scenario in scenarios]
    with pool(len(scenarios)) as workers:
        return list(workers.map(play, scenarios))


def pool(num_processes: int) -> ProcessPoolExecutor:
    """A pool of fresh processes. They inherit nothing of this process's threads or open files."""
    return ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
