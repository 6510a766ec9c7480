"""One task of one attempt on a fake node: its stages in time, as a supervisor would run them.

Times are monotonic times of the virtual clock. A task does not know about partitions: it continues behind
one, which is the purpose of simulated partitions.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from shoal.engines.fake.scenario import Act
from shoal.wire import EndKind, Renewal, RenewalReply, TaskOutcome, TaskPhase, TaskSpec

NEVER = float("inf")
LAST_RENEWALS_S = 10.0
"""How long a supervisor repeats the report of its end without a reply."""


class FakeTaskStage(IntEnum):
    SENT = 0
    CLAIMED = 1
    STARTED = 2
    ORPHANED = 3
    ENDED = 4


class FakeTask:
    """Mutable; only `FakeCluster` holds it."""

    def __init__(self, task_spec: TaskSpec, act: Act, native_id: str, arrives_at: float) -> None:
        self.task_spec = task_spec
        self.act = act
        self.native_id = native_id
        self.stage = FakeTaskStage.SENT
        self.outcome: TaskOutcome | None = None
        self.started_at: float | None = None
        """A date, as a supervisor would write it."""
        self.log = b""
        self.renew_at = NEVER
        self.claim_at = arrives_at + act.claim_s
        self._start_at = NEVER
        self._first_end = (NEVER, EndKind.LOST)
        """The earliest end that is certain by now: the run's own, its time limit's or a fence's."""
        self._stop_asked_at = NEVER
        self._stop_at = NEVER
        self._renewed_at = NEVER
        self._quiet_at = NEVER
        self._gone_at = NEVER
        self.rendezvous_round = task_spec.identity.replacement
        self.failure: TaskOutcome | None = None
        """How the ranks of this rendezvous round failed, until the next round begins or is refused."""

    @property
    def can_regroup(self) -> bool:
        """Return whether ranks that fail are restarted in place. The supervisor asks, and may be refused."""
        task_spec = self.task_spec
        return (
            len(task_spec.ranks.nodes) > 1
            and task_spec.ranks.max_restarts > 0
            and task_spec.lease.control_url is not None
        )

    def fail(self, at: float, failure: TaskOutcome) -> None:
        """Record that ranks failed. The supervisor asks at once whether another round may begin."""
        if self.failure is None:
            self.failure, self.renew_at = failure, at

    def regroup(self, renewal: Renewal, reply: RenewalReply, now: float, ahead: float) -> None:
        """Apply the control plane's reply: another round begins, or the failure ends the task."""
        if reply.rendezvous_round > self.rendezvous_round:
            self.rendezvous_round, self.failure = reply.rendezvous_round, None
        elif self.failure is not None and renewal.failure == self.failure and not reply.should_stop:
            self.end(now, ahead, self.failure)

    def send_again(self, arrives_at: float) -> None:
        """Let a supervisor start after all, if none was on its way."""
        if self.stage is FakeTaskStage.SENT and self.claim_at == NEVER:
            self.claim_at = arrives_at + self.act.claim_s

    @property
    def is_asleep(self) -> bool:
        """Whether it changes nothing by itself any more and does not even report its end."""
        return self.stage is FakeTaskStage.ENDED and self.renew_at == NEVER

    def next_at(self) -> float:
        """Return the time of its next change or renewal."""
        return min(self.changes_at(), self.renew_at)

    def changes_at(self) -> float:
        """Return the time of its next stage: later if a reply comes, sooner only if it is stopped."""
        if self.stage is FakeTaskStage.ENDED:
            return NEVER
        if self.stage is FakeTaskStage.SENT:
            return min(self.claim_at, self._stop_asked_at)
        if self.stage is FakeTaskStage.ORPHANED:
            return self._gone_at
        return min(self._start_at, self._end()[0])

    def live_until(self, now: float, ahead: float) -> None:
        """Pass every stage due by `now`; `ahead` turns a monotonic time into a date."""
        if self.stage is FakeTaskStage.SENT and self._stop_asked_at <= min(now, self.claim_at):
            self.end(
                self._stop_asked_at,
                ahead,
                self._supervisor_outcome(EndKind.STOPPED, self._stop_asked_at + ahead),
            )
        if self.stage is FakeTaskStage.SENT and self.claim_at <= now:
            self._claim()
        if self.stage is FakeTaskStage.CLAIMED and self._start_at <= min(now, self._end()[0]):
            self._start(ahead)
        if self.stage in (FakeTaskStage.CLAIMED, FakeTaskStage.STARTED):
            at, kind = self._end()
            if at <= now:
                self.end(at, ahead, self._supervisor_outcome(kind, at + ahead))
        if self.stage is FakeTaskStage.ORPHANED and self._gone_at <= now:
            gone = self.lost_outcome(self._gone_at + ahead, "its supervisor died, and at last what it left")
            self.end(self._gone_at, ahead, gone)

    def orphan(self, gone_at: float) -> None:
        """Kill the supervisor; what it started lives until `gone_at`, whatever is requested."""
        self.stage, self.renew_at, self._gone_at = FakeTaskStage.ORPHANED, NEVER, gone_at

    def stop(self, at: float, grace_s: float) -> None:
        """Let a cancel arrive at `at`. A task that no supervisor has claimed by then ends there and then."""
        self._stop_asked_at = min(self._stop_asked_at, at)
        self._stop_at = min(self._stop_at, at + min(self.act.stop_s, grace_s))

    def fence(self, at: float) -> None:
        """Let the rejection as stale arrive at `at`: the task ends there and then."""
        self._will_end(at, EndKind.FENCED)

    def end(self, at: float, ahead: float, outcome: TaskOutcome) -> None:
        """End the task at `at`: nothing of it runs any more. The first end counts."""
        if self.stage is FakeTaskStage.ENDED:
            return
        has_supervisor = self.stage is not FakeTaskStage.SENT and outcome.kind is not EndKind.LOST
        self.stage = FakeTaskStage.ENDED
        self.outcome = outcome
        if self.task_spec.lease.control_url is not None and has_supervisor:
            self.renew_at, self._quiet_at = at, at + LAST_RENEWALS_S
        else:
            self.renew_at = NEVER
        self.log += _line(at + ahead, None, outcome.message or str(outcome.kind))

    def lost_outcome(self, ended_at: float, message: str) -> TaskOutcome:
        """Return the outcome that an engine writes because the supervisor could not."""
        return self._outcome(EndKind.LOST, ended_at, message)

    def renewal(self, now: float) -> Renewal | None:
        """Return the renewal that it sends at `now`, if one is due; the next is due `renew_s` later."""
        if self.renew_at > now:
            return None
        self.renew_at = now + self.task_spec.lease.renew_s
        if self.stage is FakeTaskStage.ENDED and self.renew_at > self._quiet_at:
            self.renew_at = NEVER
        return Renewal(
            attempt_id=self.task_spec.identity.attempt_id,
            epoch=self.task_spec.identity.epoch,
            node=self.task_spec.identity.node,
            phase=self._phase(),
            started_at=self.started_at,
            outcome=self.outcome,
            replacement=self.task_spec.identity.replacement,
            rendezvous_round=self.rendezvous_round,
            failure=self.failure if self.stage is FakeTaskStage.STARTED else None,
        )

    def renewed(self, sent_at: float) -> None:
        """Record a reply. The lease counts from the time of the renewal, not of the reply."""
        if self.stage is FakeTaskStage.ENDED:
            self.renew_at = NEVER
        else:
            self._renewed_at = max(self._renewed_at, sent_at)

    def _claim(self) -> None:
        self.stage = FakeTaskStage.CLAIMED
        self._start_at = self.claim_at + self.act.prepare_s
        if self.task_spec.resources.time_limit_s is not None:
            self._will_end(self.claim_at + self.task_spec.resources.time_limit_s, EndKind.TIME_LIMIT)
        if self.task_spec.lease.control_url is not None:
            self._renewed_at = self.claim_at

    def _start(self, ahead: float) -> None:
        at = self._start_at
        self.stage = FakeTaskStage.STARTED
        self._start_at = NEVER
        self.started_at = at + ahead
        if self.act.run_s is not None:
            self._will_end(at + self.act.run_s, self.act.kind)
        if self.task_spec.lease.control_url is not None:
            self.renew_at = at
        rank = self.task_spec.ranks.node_rank * self.task_spec.ranks.ranks_per_node
        self.log += b"".join(_line(at + ahead, rank, text) for text in self.act.lines)

    def _will_end(self, at: float, kind: EndKind) -> None:
        if at < self._first_end[0]:
            self._first_end = at, kind

    def _end(self) -> tuple[float, EndKind]:
        """Return the earliest end; of two at the same moment, the first in this order."""
        end = self._first_end
        if self._stop_at < end[0]:
            end = self._stop_at, EndKind.STOPPED
        fenced_at = self._renewed_at + self.task_spec.lease.fence_s
        return (fenced_at, EndKind.FENCED) if fenced_at < end[0] else end

    def _supervisor_outcome(self, kind: EndKind, ended_at: float) -> TaskOutcome:
        """Return the supervisor's outcome: the script's, if the task ends as scripted."""
        act = self.act
        if kind is not act.kind or kind is EndKind.STOPPED:
            return self._outcome(kind, ended_at, str(kind))
        return msgspec.structs.replace(
            self._outcome(kind, ended_at, act.message),
            exit_code=act.exit_code,
            signal=act.signal,
            rank=act.rank,
            rules_hit=act.rules_hit,
        )

    def _outcome(self, kind: EndKind, ended_at: float, message: str) -> TaskOutcome:
        return TaskOutcome(
            attempt_id=self.task_spec.identity.attempt_id,
            epoch=self.task_spec.identity.epoch,
            node=self.task_spec.identity.node,
            kind=kind,
            ended_at=ended_at,
            message=message,
            started_at=self.started_at,
            replacement=self.task_spec.identity.replacement,
        )

    def _phase(self) -> TaskPhase:
        if self.stage is FakeTaskStage.ENDED:
            return TaskPhase.ENDED
        if self._stop_at < NEVER:
            return TaskPhase.STOPPING
        return TaskPhase.RUNNING if self.stage is FakeTaskStage.STARTED else TaskPhase.PREPARING


def _line(at: float, rank: int | None, text: str) -> bytes:
    return f"{at:.6f} {'-' if rank is None else rank} o {text}\n".encode()
