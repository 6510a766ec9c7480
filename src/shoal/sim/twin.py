"""A cluster in virtual time whose only decisions are the production scheduler's.

The twin moves the clock from event to event, tells the planner what happened, and asks it once for each
moment with an event. The twin knows run times and failures. The planner learns of them when they happen.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import msgspec

from shoal.errors import Bug, SpecError
from shoal.model.attempt import Allocation
from shoal.model.job import ResourceRequest
from shoal.scheduler import (
    Candidate,
    EvictionGround,
    Holding,
    NodeInfo,
    Plan,
    Planner,
    Policy,
    Stamps,
    explain_impossible,
)
from shoal.scheduler.facts.amounts import Demand, demand_of, minimum_devices
from shoal.scheduler.order.project_tree import ProjectTree
from shoal.sim.assumptions import CheckpointModel, NodeFailureModel, NodeFailureTimes, Stamper
from shoal.sim.workload import SimulationOutcome, Workload, devices_held, devices_of_node

MAX_ATTEMPTS = 1000
"""A job that is cut short more often than this makes no progress, so its simulation would not end."""
FAILED = "failed, and is being repaired"


class NodeEventKind(StrEnum):
    """What happens to a node."""

    CHANGE = "change"  # the node has the workload's view from then on, or is repaired
    LOSS = "loss"  # the same, and the jobs there are lost
    # drawn at random: the node is gone until it is repaired, unless it is another node by then
    FAILURE = "failure"


class VictimBasis(StrEnum):
    """How victims are chosen. In any case the checkpoint model decides what they lose."""

    CHECKPOINTS = "checkpoints"  # as supervisors report them
    NOTHING = "nothing"  # running jobs count as lost from their start on
    AGE = "age"  # newest first: those that have run the shortest time, whatever they hold


def simulate_workload(
    workload: Workload,
    policy: Policy,
    *,
    stamper: Stamper | None = None,
    failures: NodeFailureModel | None = None,
    checkpoints: CheckpointModel | None = None,
    victim_basis: VictimBasis = VictimBasis.CHECKPOINTS,
) -> SimulationOutcome:
    """Run every job to its end and return the outcome. The same arguments give the same outcome.

    `victim_basis`: what the planner knows when it chooses victims. Jobs that the nodes could never hold are
    refused, as at a submission. `Bug`: a job waits for ever.
    """
    twin = _Twin(workload, policy, stamper or Stamps(), failures, checkpoints or CheckpointModel())
    return twin.run(victim_basis)


class _Running(NamedTuple):
    job: int
    """The job's index."""
    began_at: float
    devices: float
    allocation: Allocation
    work_s: float
    """The work that the attempt does if it is not cut short."""


class _Twin:
    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        stamper: Stamper,
        failures: NodeFailureModel | None,
        checkpoints: CheckpointModel,
    ) -> None:
        self._jobs = workload.jobs
        self._device = workload.device
        self._stamper = stamper
        self._failures = failures
        self._checkpoints = checkpoints
        self._planner = Planner(policy)
        self._planner.set_projects(workload.projects)
        self._ceilings = ProjectTree(workload.projects)
        self._outcome = SimulationOutcome(workload)
        self._num_arrived = 0
        self._num_open = len(workload.jobs)
        self._ends: list[tuple[float, int, str]] = []
        """(end, number of the start, attempt). If two end together, the earlier start goes first."""
        self._node_events: list[tuple[float, int, str, NodeInfo | None, NodeEventKind]] = []
        """(time, number, name, new view, kind): scheduled in advance or drawn at random."""
        self._num_events = 0
        self._windows = workload.windows
        self._num_declared = 0
        """How many changes of windows the planner has received."""
        self._running: dict[str, _Running] = {}
        self._queued: dict[str, int] = {}
        self._left: dict[int, tuple[float, int]] = {}
        """By job that was cut short: the work left, and how often it was cut short."""
        self._evicted: Counter[int] = Counter()
        """How often each job was evicted."""
        self._used = 0.0
        self._victim_basis = VictimBasis.CHECKPOINTS
        self._nodes: dict[str, NodeInfo] = {}
        self._luck: dict[str, NodeFailureTimes] = {}
        self._is_possible: dict[tuple[str, Demand], bool] = {}
        self._all_nodes = {node.name: node for node in workload.nodes}
        for change in workload.changes:
            turn = NodeEventKind.LOSS if change.is_loss else NodeEventKind.CHANGE
            self._node_event(change.at, change.name, change.view, turn)
            if change.view is not None:
                self._all_nodes.setdefault(change.name, change.view)
        begin = workload.jobs[0].submitted_at if workload.jobs else 0.0
        self._declare(begin)
        for node in workload.nodes:
            self._set_node(node.name, node, begin)
        self._count_nodes()

    def run(self, victim_basis: VictimBasis) -> SimulationOutcome:
        self._victim_basis = victim_basis
        jobs, ends, timeline = self._jobs, self._ends, self._outcome.timeline
        count, again_at = len(jobs), inf
        while self._num_open:
            arrival = jobs[self._num_arrived].submitted_at if self._num_arrived < count else inf
            declared = self._next_windows
            now = min(
                arrival,
                ends[0][0] if ends else inf,
                self._node_events[0][0] if self._node_events else inf,
                declared,
                again_at,
            )
            if now == inf or not (
                self._running or min(arrival, declared, again_at) < inf or self._has_plans_for_nodes
            ):
                raise self._stuck()
            while ends and ends[0][0] == now:
                self._end(heappop(ends)[2], now)
            while self._node_events and self._node_events[0][0] == now:
                self._turn_node(now)
            if declared == now:
                self._declare(now)
            if arrival == now:
                self._arrive(now)
            again_at = self._decide(now)
            timeline.note(now, len(self._queued), self._used, self._open_devices)
        return self._outcome

    @property
    def _next_windows(self) -> float:
        return self._windows[self._num_declared].at if self._num_declared < len(self._windows) else inf

    def _declare(self, now: float) -> None:
        """Pass the maintenance and reservations from now on to the planner."""
        while self._next_windows <= now:
            self._planner.set_windows(self._windows[self._num_declared].windows)
            self._num_declared += 1

    @property
    def _has_plans_for_nodes(self) -> bool:
        """Whether a node will change, other than by failing. No job can wait for a failure."""
        return any(turn is NodeEventKind.CHANGE for *_, turn in self._node_events)

    def _stuck(self) -> Bug:
        index = next(iter(self._queued.values()))
        named = f"{len(self._queued)} jobs never start, the first is {self._jobs[index].job_id}"
        return Bug(named, index=index)

    # --- what happens -----------------------------------------------------------------------------------
    def _arrive(self, now: float) -> None:
        """Queue everything submitted at this moment, or refuse it for ever."""
        jobs = self._jobs
        index = self._num_arrived
        while index < len(jobs) and jobs[index].submitted_at <= now:
            job = jobs[index]
            if job.submitted_at < now:
                raise Bug(f"job {job.job_id} was submitted before the one ahead of it: sort the jobs first")
            if self._can_ever_run(job.project, job.request):
                self._enqueue(index, str(index), job.run_s, now)
            else:
                self._outcome.refused.append(index)
                self._num_open -= 1
            index += 1
        self._num_arrived = index

    def _can_ever_run(self, project: str, request: ResourceRequest) -> bool:
        """Whether the job fits all nodes that this cluster ever has, and its project's limit."""
        # Limits do not matter here, so few demands differ.
        demand = demand_of(request)
        remembered = self._is_possible.get((project, demand))
        if remembered is None:
            is_allowed = self._ceilings.refusal(project, minimum_devices(demand)) is None
            remembered = is_allowed and explain_impossible(request, self._all_nodes.values()) is None
            self._is_possible[project, demand] = remembered
        return remembered

    def _enqueue(self, index: int, attempt_id: str, work_s: float, now: float) -> None:
        job = self._jobs[index]
        request = job.request
        extra_s = self._checkpoints.overhead_s(work_s, is_restart=index in self._left)
        if extra_s and request.time_limit_s is not None:
            # A program that writes checkpoints asks for the time that they take.
            request = msgspec.structs.replace(request, time_limit_s=request.time_limit_s + extra_s)
        self._queued[attempt_id] = index
        candidate = Candidate(
            attempt_id=attempt_id,
            job_id=job.job_id,
            project=job.project,
            queue=job.queue,
            priority=job.priority,
            order=index,
            submitted_at=job.submitted_at,
            request=request,
            owner=job.user,
            name=job.name,
            num_evicted=self._evicted.get(index, 0),
            array_id=job.array_id,
            array_at_once=job.array_at_once,
            deadline_at=job.deadline_at,
        )
        self._planner.add(self._stamper.arrive(candidate))

    def _learn(self, attempt_id: str, was: _Running, now: float) -> None:
        """Learn from an end how long such jobs run. Waiting jobs may get new stamps."""
        job = self._jobs[was.job]
        holding = Holding(
            attempt_id=attempt_id,
            job_id=job.job_id,
            project=job.project,
            priority=job.priority,
            allocation=was.allocation,
            placed_at=was.began_at,
            time_limit_s=job.request.time_limit_s,
            owner=job.user,
            name=job.name,
        )
        for changed in self._stamper.ended(holding, job.request, now - was.began_at, now):
            self._planner.add(changed)

    def _end(self, attempt_id: str, now: float) -> None:
        """Process a scheduled end; do nothing if the attempt was cut short before it."""
        was = self._running.pop(attempt_id, None)
        if was is None:
            return
        self._planner.release(attempt_id, now)
        index, began_at, devices, _, work_s = was
        outcome = self._outcome
        outcome.ends[index] = now
        outcome.useful += devices * work_s
        outcome.overhead += devices * (now - began_at - work_s)
        outcome.holdings.note(index, devices, began_at, now)
        self._used -= devices
        self._num_open -= 1
        self._learn(attempt_id, was, now)

    def _cut_short(self, attempt_id: str, now: float) -> None:
        """Take the attempt off its nodes and queue the rest of its work."""
        was = self._running.pop(attempt_id)
        self._planner.release(attempt_id, now)
        left_s, cuts = self._left.get(was.job, (was.work_s, 0))
        progress = self._checkpoints.cut_short(now - was.began_at, is_restart=cuts > 0)
        outcome = self._outcome
        outcome.useful += was.devices * progress.kept_s
        outcome.lost += was.devices * progress.lost_s
        outcome.overhead += was.devices * progress.overhead_s
        outcome.num_interrupted += 1
        outcome.holdings.note(was.job, was.devices, was.began_at, now)
        self._used -= was.devices
        if cuts >= MAX_ATTEMPTS:
            job = self._jobs[was.job]
            raise SpecError(
                f"job {job.name or job.job_id} of {job.project} ({job.run_s:,.0f} s of work) was cut"
                f" short {MAX_ATTEMPTS:,} times and would never end at this failure rate",
                hint="give it checkpoints: --checkpoint 1h,30s,2m",
            )
        self._left[was.job] = left_s - progress.kept_s, cuts + 1
        self._enqueue(was.job, f"{was.job}.{cuts + 1}", left_s - progress.kept_s, now)

    # --- nodes ------------------------------------------------------------------------------------------
    def _node_event(self, at: float, name: str, view: NodeInfo | None, turn: NodeEventKind) -> None:
        self._num_events += 1
        heappush(self._node_events, (at, self._num_events, name, view, turn))

    def _set_node(self, name: str, view: NodeInfo | None, now: float) -> None:
        if view is None:
            self._nodes.pop(name, None)
            self._planner.drop_node(name)
        else:
            self._nodes[name] = view
            self._planner.set_node(view)
            if self._failures and view.closed_because is None:
                luck = self._luck.setdefault(name, NodeFailureTimes(self._failures, name))
                self._node_event(now + luck.time_in_service(), name, view, NodeEventKind.FAILURE)

    def _count_nodes(self) -> None:
        self._stamper.see(self._nodes.values())
        self._open_devices = sum(
            devices_of_node(node, self._device)
            for node in self._nodes.values()
            if node.closed_because is None
        )

    def _turn_node(self, now: float) -> None:
        """One node fails, is repaired, or changes as the workload says."""
        _, _, name, view, turn = heappop(self._node_events)
        if turn is NodeEventKind.FAILURE:
            if self._nodes.get(name) is not view or self._failures is None or view is None:
                return  # the node was replaced or removed by then
            self._node_event(now + self._failures.repair_s, name, view, NodeEventKind.CHANGE)
            view = msgspec.structs.replace(view, closed_because=FAILED)
        if turn is not NodeEventKind.CHANGE:
            # A node that is lost and then declared dead failed once.
            self._outcome.num_failures += name in self._nodes and self._nodes[name].closed_because is None
        self._set_node(name, view, now)
        self._count_nodes()
        if view is None or turn is not NodeEventKind.CHANGE:
            for attempt_id in [
                attempt_id
                for attempt_id, was in self._running.items()
                if any(task.node == name for task in was.allocation)
            ]:
                self._cut_short(attempt_id, now)

    # --- decisions --------------------------------------------------------------------------------------
    def _decide(self, now: float) -> float:
        """Let the planner decide and apply its plan. Return when it wants to plan again without an event."""
        if not self._queued:
            return inf
        plan = self._plan(now)
        has_told = self._victim_basis is VictimBasis.NOTHING
        while plan.evictions:
            if has_told:
                for eviction in plan.evictions:
                    if eviction.ground is not EvictionGround.GROWTH:
                        self._evicted[self._running[eviction.attempt_id].job] += 1
                    self._cut_short(eviction.attempt_id, now)
            else:
                self._report_checkpoints(now)
                has_told = True
            plan = self._plan(now)
        again_at = plan.replan_at
        return inf if again_at is None or again_at <= now or not self._queued else again_at

    def _plan(self, now: float) -> Plan:
        plan = self._planner.plan(now)
        for start in plan.starts:
            self._start(start.attempt_id, start.allocation, now)
        return plan

    def _report_checkpoints(self, now: float) -> None:
        """Report checkpoints as supervisors would have done by now. Only called before an eviction."""
        for attempt_id, was in self._running.items():
            if self._victim_basis is VictimBasis.AGE:
                age_s = (now - was.began_at) / max(was.devices, 1.0)
                self._planner.save(attempt_id, now - age_s)
                continue
            last_s = self._checkpoints.last_s(now - was.began_at, is_restart=was.job in self._left)
            if last_s is not None:
                self._planner.save(attempt_id, was.began_at + last_s)

    def _start(self, attempt_id: str, allocation: Allocation, now: float) -> None:
        index = self._queued.pop(attempt_id)
        self._stamper.leave(attempt_id)
        left = self._left.get(index) if self._left else None
        work_s = self._jobs[index].run_s if left is None else left[0]
        took_s = work_s + self._checkpoints.overhead_s(work_s, is_restart=left is not None)
        if left is None:
            self._outcome.starts[index] = now
        devices = devices_held(allocation, self._device)
        self._used += devices
        self._running[attempt_id] = _Running(index, now, devices, allocation, work_s)
        self._num_events += 1
        heappush(self._ends, (now + took_s, self._num_events, attempt_id))
