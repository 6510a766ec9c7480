"""All that decides a simulation, in one piece that can be handed to another process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec

from shoal.errors import SpecError
from shoal.scheduler import Policy
from shoal.sim.checkpoints import Checkpoints
from shoal.sim.failures import Failures
from shoal.sim.machines import is_pool
from shoal.sim.outcome import Outcome
from shoal.sim.twin import replay
from shoal.sim.workload import Workload

FEW_JOBS = 5000
"""Below this a simulation takes about as long as starting a process for it."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    workload: Workload
    policy: Policy = Policy()
    failures: Failures | None = None
    checkpoints: Checkpoints = Checkpoints()

    def __post_init__(self) -> None:
        if self.failures is not None and is_pool(self.workload.nodes):
            raise SpecError(
                "failures are of nodes; processors in one pool have none, and would all be gone at once",
                hint="leave out `--mtbf`, or say what nodes there are: --nodes 160x8",
            )


def play(scenario: Scenario) -> Outcome:
    """The same scenario has the same outcome, in whatever process."""
    return replay(
        scenario.workload,
        scenario.policy,
        failures=scenario.failures,
        checkpoints=scenario.checkpoints,
    )


def play_all(scenarios: Sequence[Scenario]) -> list[Outcome]:
    """Each in a process of its own, unless that would take longer."""
    if len(scenarios) == 1 or all(len(one.workload.jobs) < FEW_JOBS for one in scenarios):
        return [play(scenario) for scenario in scenarios]
    with pool(len(scenarios)) as workers:
        return list(workers.map(play, scenarios))


def pool(num_processes: int) -> ProcessPoolExecutor:
    """Processes that begin anew: nothing of this one's threads or open files is copied into them."""
    return ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
