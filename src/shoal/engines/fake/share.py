"""One share of one attempt on a fake node: its stages in time, as a supervisor would live them.

Times are monotonic readings of the virtual clock. A share knows nothing of partitions: it goes on
living behind one, which is the point of having them.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from shoal.engines.fake.script import Act
from shoal.wire import EndKind, NodeOutcome, Order, Phase, Renewal, RenewalAnswer

NEVER = float("inf")
LAST_RENEWALS_S = 10.0
"""How long a supervisor goes on telling of its end when nobody answers."""


class Stage(IntEnum):
    SENT = 0
    CLAIMED = 1
    STARTED = 2
    ORPHANED = 3
    ENDED = 4


class Share:
    """Mutable; `FakeCluster` alone holds it."""

    def __init__(self, order: Order, act: Act, native_id: str, arrives_at: float) -> None:
        self.order = order
        self.act = act
        self.native_id = native_id
        self.stage = Stage.SENT
        self.outcome: NodeOutcome | None = None
        self.started_at: float | None = None
        """By the date, as a supervisor would write it."""
        self.log = b""
        self.renew_at = NEVER
        self.claim_at = arrives_at + act.claim_s
        self._start_at = NEVER
        self._first_end = (NEVER, EndKind.LOST)
        """Of the ends that are certain by now: the run's own, its limit's, a fence's."""
        self._asked_at = NEVER
        self._stop_at = NEVER
        self._answered_at = NEVER
        self._quiet_at = NEVER
        self._gone_at = NEVER
        self.generation = order.incarnation
        self.failure: NodeOutcome | None = None
        """How the ranks of this generation failed, until the next begins or is refused."""

    @property
    def can_regroup(self) -> bool:
        """Whether ranks that fail are followed by others in place: it asks, and may be refused."""
        order = self.order
        return len(order.nodes) > 1 and order.max_restarts > 0 and order.control_url is not None

    def fail(self, at: float, failure: NodeOutcome) -> None:
        """Ranks failed: it asks at once whether another group may begin."""
        if self.failure is None:
            self.failure, self.renew_at = failure, at

    def regroup(self, asked: Renewal, answer: RenewalAnswer, now: float, ahead: float) -> None:
        """The control plane has answered: there is another group, or there is none after a failure."""
        if answer.generation > self.generation:
            self.generation, self.failure = answer.generation, None
        elif self.failure is not None and asked.failure == self.failure and not answer.should_stop:
            self.end(now, ahead, self.failure)

    def send_again(self, arrives_at: float) -> None:
        """A supervisor comes of it after all, if none was on its way."""
        if self.stage is Stage.SENT and self.claim_at == NEVER:
            self.claim_at = arrives_at + self.act.claim_s

    @property
    def is_asleep(self) -> bool:
        """It does nothing by itself any more, not even tell of its end."""
        return self.stage is Stage.ENDED and self.renew_at == NEVER

    def next_at(self) -> float:
        """When it does something next by itself."""
        return min(self.changes_at(), self.renew_at)

    def changes_at(self) -> float:
        """When it enters its next stage by itself: later if an answer comes, sooner only if it is told."""
        if self.stage is Stage.ENDED:
            return NEVER
        if self.stage is Stage.SENT:
            return min(self.claim_at, self._asked_at)
        if self.stage is Stage.ORPHANED:
            return self._gone_at
        return min(self._start_at, self._end()[0])

    def live_until(self, now: float, ahead: float) -> None:
        """Pass every stage due by `now`; `ahead` turns a monotonic reading into a date."""
        if self.stage is Stage.SENT and self._asked_at <= min(now, self.claim_at):
            self.end(self._asked_at, ahead, self._told(EndKind.STOPPED, self._asked_at + ahead))
        if self.stage is Stage.SENT and self.claim_at <= now:
            self._claim()
        if self.stage is Stage.CLAIMED and self._start_at <= min(now, self._end()[0]):
            self._start(ahead)
        if self.stage in (Stage.CLAIMED, Stage.STARTED):
            at, kind = self._end()
            if at <= now:
                self.end(at, ahead, self._told(kind, at + ahead))
        if self.stage is Stage.ORPHANED and self._gone_at <= now:
            gone = self.lost(self._gone_at + ahead, "its supervisor died, and at last what it left")
            self.end(self._gone_at, ahead, gone)

    def orphan(self, gone_at: float) -> None:
        """The supervisor is dead; what it started lives until `gone_at`, whatever anybody asks for."""
        self.stage, self.renew_at, self._gone_at = Stage.ORPHANED, NEVER, gone_at

    def stop(self, at: float, grace_s: float) -> None:
        """A cancel arrives at `at`. A share nobody has claimed by then ends there and then."""
        self._asked_at = min(self._asked_at, at)
        self._stop_at = min(self._stop_at, at + min(self.act.stop_s, grace_s))

    def fence(self, at: float) -> None:
        """The control plane called it stale at `at`: it ends there and then."""
        self._will_end(at, EndKind.FENCED)

    def end(self, at: float, ahead: float, outcome: NodeOutcome) -> None:
        """Nothing of it runs from `at` on. The first end counts."""
        if self.stage is Stage.ENDED:
            return
        has_supervisor = self.stage is not Stage.SENT and outcome.kind is not EndKind.LOST
        self.stage = Stage.ENDED
        self.outcome = outcome
        if self.order.control_url is not None and has_supervisor:
            self.renew_at, self._quiet_at = at, at + LAST_RENEWALS_S
        else:
            self.renew_at = NEVER
        self.log += _line(at + ahead, None, outcome.message or str(outcome.kind))

    def lost(self, ended_at: float, message: str) -> NodeOutcome:
        """The outcome an engine writes for it when its supervisor could not."""
        return self._outcome(EndKind.LOST, ended_at, message)

    def renewal(self, now: float) -> Renewal | None:
        """The renewal it would send at `now`, if one is due; the next is due `renew_s` later."""
        if self.renew_at > now:
            return None
        self.renew_at = now + self.order.renew_s
        if self.stage is Stage.ENDED and self.renew_at > self._quiet_at:
            self.renew_at = NEVER
        return Renewal(
            attempt_id=self.order.attempt_id,
            epoch=self.order.epoch,
            node=self.order.node,
            phase=self._phase(),
            started_at=self.started_at,
            outcome=self.outcome,
            incarnation=self.order.incarnation,
            generation=self.generation,
            failure=self.failure if self.stage is Stage.STARTED else None,
        )

    def renewed(self, sent_at: float) -> None:
        """An answer came: the lease counts from when the question was asked, not from the answer."""
        if self.stage is Stage.ENDED:
            self.renew_at = NEVER
        else:
            self._answered_at = max(self._answered_at, sent_at)

    def _claim(self) -> None:
        self.stage = Stage.CLAIMED
        self._start_at = self.claim_at + self.act.prepare_s
        if self.order.time_limit_s is not None:
            self._will_end(self.claim_at + self.order.time_limit_s, EndKind.TIME_LIMIT)
        if self.order.control_url is not None:
            self._answered_at = self.claim_at

    def _start(self, ahead: float) -> None:
        at = self._start_at
        self.stage = Stage.STARTED
        self._start_at = NEVER
        self.started_at = at + ahead
        if self.act.run_s is not None:
            self._will_end(at + self.act.run_s, self.act.kind)
        if self.order.control_url is not None:
            self.renew_at = at
        rank = self.order.node_rank * self.order.ranks_per_node
        self.log += b"".join(_line(at + ahead, rank, text) for text in self.act.lines)

    def _will_end(self, at: float, kind: EndKind) -> None:
        if at < self._first_end[0]:
            self._first_end = at, kind

    def _end(self) -> tuple[float, EndKind]:
        """The first; of two at the same moment, as they are tried here."""
        end = self._first_end
        if self._stop_at < end[0]:
            end = self._stop_at, EndKind.STOPPED
        fenced_at = self._answered_at + self.order.fence_s
        return (fenced_at, EndKind.FENCED) if fenced_at < end[0] else end

    def _told(self, kind: EndKind, ended_at: float) -> NodeOutcome:
        """The outcome in the supervisor's words; its own script's where it ends as scripted."""
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

    def _outcome(self, kind: EndKind, ended_at: float, message: str) -> NodeOutcome:
        return NodeOutcome(
            attempt_id=self.order.attempt_id,
            epoch=self.order.epoch,
            node=self.order.node,
            kind=kind,
            ended_at=ended_at,
            message=message,
            started_at=self.started_at,
            incarnation=self.order.incarnation,
        )

    def _phase(self) -> Phase:
        if self.stage is Stage.ENDED:
            return Phase.ENDED
        if self._stop_at < NEVER:
            return Phase.STOPPING
        return Phase.RUNNING if self.stage is Stage.STARTED else Phase.PREPARING


def _line(at: float, rank: int | None, text: str) -> bytes:
    return f"{at:.6f} {'-' if rank is None else rank} o {text}\n".encode()
