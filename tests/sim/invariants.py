"""What must be true after every event, read from the disk and from what really runs.

States are spelled out here and not taken from the model: a mistake there must not excuse itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from shoal.control.memory.planner_input import PlannerNodes, PlannerProjects
from shoal.control.memory.queue import JobQueue, StoreChanges, read_changes
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.scheduler import Candidate, Holding, Planner, Stamps, plan
from shoal.store import JobFilter, Tx
from shoal.wire import TaskSpec
from tests.sim.driver import run_now
from tests.sim.world import SimWorld

HOLDING = ("starting", "running", "stopping")
Pairs = list[tuple[Job, list[Attempt]]]


class InvariantChecker:
    """Remembers what it saw, since some promises are about how things change."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self._epochs: dict[str, int] = {}
        self._ended: dict[str, Attempt] = {}
        self._numbers: dict[str, str] = {}
        self._checked_starts: set[str] = set()
        self._outcomes: dict[str, set[str]] = defaultdict(set)
        """By job: every way it ever ended. A job that is tried again unmakes no plan made before."""
        self._checked_state: tuple[int, tuple[object, ...]] = (-1, ())
        self._read: dict[str, tuple[object, list[Attempt]]] = {}

    def check(self, *, should_read_all: bool = False) -> None:
        """Everything, if anything changed since the last look."""
        running = self.world.cluster.running()
        state = (self.world.disk.commits, tuple((o.identity.attempt_id, o.identity.node) for o in running))
        if state == self._checked_state and not should_read_all:
            return
        self._checked_state = state
        if should_read_all:
            self._read.clear()
        pairs: Pairs = run_now(self.world.disk.inner.read(self._everything))
        self._nothing_lost(pairs)
        for job, tries in pairs:
            self._job_is_sound(job, tries)
            if job.outcome is not None:
                self._outcomes[job.job_id].add(job.outcome)
        for job, tries in pairs:
            self._start_was_due(job, tries[-1])
        self._nothing_runs_twice(running, {a.attempt_id: a for _, tries in pairs for a in tries})
        self._nothing_is_overcommitted(pairs)
        self._queue_is_true(pairs)

    def _everything(self, tx: Tx) -> Pairs:
        """Every job with its attempts; those of a job that did not change are not read again."""
        pairs: Pairs = []
        for job, newest in tx.jobs.page(JobFilter(), None, 1000):
            key = (job.version, newest.attempt_id, newest.version)
            known = self._read.get(job.job_id)
            if known is None or known[0] != key:
                known = self._read[job.job_id] = (key, tx.attempts.of_job(job.job_id))
            pairs.append((job, known[1]))
        return pairs

    def _queue_is_true(self, pairs: Pairs) -> None:
        """What is kept in memory, once it is up to date, is what a new control plane would read."""
        core = self.world.core
        now: StoreChanges = run_now(self.world.disk.inner.read(lambda tx: read_changes(tx, None)))
        if core.planning.queue.seen_seq != now.seen_seq or core.planning.planner.has_unconfirmed:
            return
        planner = Planner(core.planning.planner.policy)
        fresh = JobQueue(planner, core.backoff, Stamps())
        at = self.world.clock.now()
        PlannerNodes().update(planner, now.nodes)
        PlannerProjects().update(planner, now.projects or (), ())
        planner.set_windows(now.windows)
        fresh.apply(now)
        fresh.wake(at)
        core.planning.queue.wake(at)
        kept, read = core.planning.planner.snapshot(), planner.snapshot()
        plain = [[_unstamped(one) for one in seen.candidates] for seen in (kept, read)]
        assert plain[0] == plain[1], "the planner forgot or kept a candidate"
        held = [[_unsaved(one) for one in seen.holdings] for seen in (kept, read)]
        assert held[0] == held[1], "the planner forgot or kept a holding"
        assert kept.nodes == read.nodes, "the planner knows a node otherwise than it is"
        assert kept.projects == read.projects, "the planner knows a project otherwise than it is"
        assert kept.windows == read.windows, "the planner forgot or kept a window"
        assert sorted(core.planning.queue.doomed) == sorted(fresh.doomed), (
            "the queue is wrong about who is doomed"
        )
        if core.planning.planner.is_settled and not any(one.not_before for one in read.candidates):
            # As of its own date: a clock that jumped back takes patience away from who had lost it.
            missed = plan(kept, core.planning.planner.policy, core.planning.planner.planned_at).starts
            assert not missed, f"could start and nobody looks: {missed}"

    def _nothing_lost(self, pairs: Pairs) -> None:
        known = {job.job_id for job, _ in pairs}
        for key, ids in self.world.accepted.items():
            missing = set(ids) - known
            assert not missing, f"accepted under {key} and lost: {missing}"
        per_key: dict[str, int] = defaultdict(int)
        for job, _ in pairs:
            if job.array is None:
                per_key[job.name] += 1
        doubled = [key for key, count in per_key.items() if count > 1]
        assert not doubled, f"one key, several jobs: {doubled}"

    def _job_is_sound(self, job: Job, tries: list[Attempt]) -> None:
        seen = self._numbers.setdefault(job.reference, job.job_id)
        assert seen == job.job_id, f"number {job.reference} was {seen} and is {job.job_id}"
        epochs = [a.epoch for a in tries]
        assert epochs == list(range(1, job.epoch + 1)), f"{job.job_id}: epochs {epochs}, newest {job.epoch}"
        assert job.epoch >= self._epochs.get(job.job_id, 0), f"{job.job_id}: its epoch went back"
        self._epochs[job.job_id] = job.epoch
        older, newest = tries[:-1], tries[-1]
        assert all(a.state == "ended" for a in older), f"{job.job_id}: an older attempt is alive"
        is_over = newest.state == "ended"
        assert is_over != job.is_open, f"{job.job_id}: outcome {job.outcome}, newest attempt {newest.state}"
        if job.stop_asked_by is not None:
            assert newest.state in ("stopping", "ended"), f"{job.job_id}: stopped by a person, {newest.state}"
        for attempt in tries:
            if attempt.state == "ended":
                first = self._ended.setdefault(attempt.attempt_id, attempt)
                assert first == attempt, f"{attempt.attempt_id} changed after its end"

    def _start_was_due(self, job: Job, attempt: Attempt) -> None:
        """Looked at once, when it begins to hold: what it waited for may change afterwards."""
        if attempt.state not in HOLDING or attempt.attempt_id in self._checked_starts:
            return
        self._checked_starts.add(attempt.attempt_id)
        nodes = [share.node for share in attempt.allocation]
        asked = job.request
        assert len(set(nodes)) == len(nodes), f"{attempt.attempt_id}: a node twice in {nodes}"
        assert asked.min_nodes <= len(nodes) <= asked.max_nodes, f"{attempt.attempt_id}: half a gang: {nodes}"
        assert not set(nodes) & set(job.excluded_nodes), f"{attempt.attempt_id}: on an excluded node: {nodes}"
        for after in job.after:
            ends = self._outcomes[after.job_id]
            is_met = after.on in ends or (after.on == "ended" and bool(ends))
            assert is_met, f"{job.job_id} began; {after.job_id}, which must have {after.on}, has {ends}"

    def _nothing_runs_twice(self, running: list[TaskSpec], attempts: dict[str, Attempt]) -> None:
        alive: dict[str, set[str]] = defaultdict(set)
        for order in running:
            alive[order.identity.job_id].add(order.identity.attempt_id)
            state = attempts[order.identity.attempt_id].state
            assert state in HOLDING, (
                f"{order.identity.attempt_id} runs on {order.identity.node} and is recorded as {state}"
            )
            self._is_not_replaced(order, attempts[order.identity.attempt_id])
        twice = {job_id: ids for job_id, ids in alive.items() if len(ids) > 1}
        assert not twice, f"running twice at once: {twice}"

    def _is_not_replaced(self, task_spec: TaskSpec, attempt: Attempt) -> None:
        """A share that another was begun in place of does not run beside it."""
        begun_for = [
            one.rendezvous_round for one in attempt.replacements if one.node == task_spec.identity.node
        ]
        identity = task_spec.identity
        told = f"{identity.attempt_id} runs incarnation {identity.replacement} on {identity.node}"
        assert task_spec.identity.node in [share.node for share in attempt.allocation], (
            f"{told}, which was replaced"
        )
        assert task_spec.identity.replacement == max(begun_for, default=0), (
            f"{told}; recorded are {begun_for}"
        )

    def _nothing_is_overcommitted(self, pairs: Pairs) -> None:
        gpus: dict[tuple[str, int], int] = defaultdict(int)
        cpus: dict[str, float] = defaultdict(float)
        memory: dict[str, int] = defaultdict(int)
        elements: dict[str, int] = defaultdict(int)
        for job, attempt in _holding(pairs):
            if job.array is not None:
                elements[job.array.array_id] += 1
                at_once = job.array.at_once or job.array.size
                assert elements[job.array.array_id] <= at_once, f"more than {at_once} of {job.array.array_id}"
            for share in attempt.allocation:
                cpus[share.node] += share.cpus
                memory[share.node] += share.memory_bytes
                for gpu in share.gpu_ids:
                    gpus[share.node, gpu] += share.gpu_milli
                    assert gpus[share.node, gpu] <= 1000, f"GPU {gpu} of {share.node} is given twice"
        for node, facts in self.world.cluster.facts.items():
            assert cpus[node] <= facts.cpus, f"{node} gives {cpus[node]} CPUs"
            assert memory[node] <= facts.memory_bytes, f"{node} gives {memory[node]} bytes"


def _holding(pairs: Pairs) -> Iterator[tuple[Job, Attempt]]:
    return ((job, a) for job, tries in pairs for a in tries if a.state in HOLDING)


def _unstamped(candidate: Candidate) -> Candidate:
    """A control plane that starts has learned less."""
    return msgspec.structs.replace(candidate, expected_s=None, due_at=None, score=None)


def _unsaved(holding: Holding) -> Holding:
    """Nor has it heard of checkpoints."""
    return msgspec.structs.replace(holding, checkpoint_at=None)
