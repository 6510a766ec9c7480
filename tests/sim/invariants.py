"""What must be true after every event, read from the disk and from what really runs."""

from __future__ import annotations

from collections import defaultdict

from shoal.model.attempt import HOLDING, Attempt, AttemptState
from shoal.model.job import Job
from shoal.store import JobFilter, Tx
from tests.sim.driver import run_now
from tests.sim.world import World


class Auditor:
    """Remembers what it saw, since some promises are about how things change."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._epochs: dict[str, int] = {}
        self._ended: dict[str, Attempt] = {}
        self._numbers: dict[int, str] = {}
        self._looked_at: tuple[int, tuple[object, ...]] = (-1, ())

    def check(self) -> None:
        """Everything, if anything changed since the last look."""
        running = self.world.cluster.running()
        state = (self.world.disk.commits, tuple((o.attempt_id, o.node) for o in running))
        if state == self._looked_at:
            return
        self._looked_at = state
        pairs = run_now(self.world.disk.inner.read(_everything))
        attempts = {a.attempt_id: a for _, tries in pairs for a in tries}
        self._nothing_lost(pairs)
        for job, tries in pairs:
            self._job_is_sound(job, tries)
        self._nothing_runs_twice(running, attempts)
        self._nothing_is_overcommitted(attempts)

    def _nothing_lost(self, pairs: list[tuple[Job, list[Attempt]]]) -> None:
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
        seen = self._numbers.setdefault(job.number, job.job_id)
        assert seen == job.job_id, f"number {job.number} was {seen} and is {job.job_id}"
        epochs = [a.epoch for a in tries]
        assert epochs == list(range(1, job.epoch + 1)), f"{job.job_id}: epochs {epochs}, newest {job.epoch}"
        assert job.epoch >= self._epochs.get(job.job_id, 0), f"{job.job_id}: its epoch went back"
        self._epochs[job.job_id] = job.epoch
        older, newest = tries[:-1], tries[-1]
        assert all(a.state is AttemptState.ENDED for a in older), f"{job.job_id}: an older attempt is alive"
        is_over = newest.state is AttemptState.ENDED
        assert is_over != job.is_open, f"{job.job_id}: outcome {job.outcome}, newest attempt {newest.state}"
        for attempt in tries:
            if attempt.state is AttemptState.ENDED:
                first = self._ended.setdefault(attempt.attempt_id, attempt)
                assert first == attempt, f"{attempt.attempt_id} changed after its end"

    def _nothing_runs_twice(self, running: list, attempts: dict[str, Attempt]) -> None:
        alive: dict[str, set[str]] = defaultdict(set)
        for order in running:
            alive[order.job_id].add(order.attempt_id)
            state = attempts[order.attempt_id].state
            assert state in HOLDING, f"{order.attempt_id} runs on {order.node} and is recorded as {state}"
        twice = {job_id: ids for job_id, ids in alive.items() if len(ids) > 1}
        assert not twice, f"running twice at once: {twice}"

    def _nothing_is_overcommitted(self, attempts: dict[str, Attempt]) -> None:
        gpus: dict[tuple[str, int], str] = {}
        cpus: dict[str, float] = defaultdict(float)
        for attempt in attempts.values():
            if attempt.state not in HOLDING:
                continue
            for share in attempt.allocation:
                cpus[share.node] += share.cpus
                for gpu in share.gpu_ids:
                    holder = gpus.setdefault((share.node, gpu), attempt.attempt_id)
                    assert holder == attempt.attempt_id, f"GPU {gpu} of {share.node} is held twice"
        for node, used in cpus.items():
            assert used <= self.world.cluster.facts[node].cpus, f"{node} gives {used} CPUs"


def _everything(tx: Tx) -> list[tuple[Job, list[Attempt]]]:
    page = tx.jobs.page(JobFilter(), None, 1000)
    return [(job, tx.attempts.of_job(job.job_id)) for job, _ in page]
