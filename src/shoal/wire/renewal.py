"""What a supervisor and the control plane say to each other while the task runs."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shoal.curve import Samples
from shoal.wire.drill import DrillCommand, DrillResult
from shoal.wire.outcome import TaskOutcome, World


class TaskPhase(StrEnum):
    """The phase of a task whose supervisor is alive."""

    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's view of the replica that it runs. Every message carries it."""

    address: str
    """`10.0.0.7:8000` if every node can reach it, `unix:/PATH` or `broker:/PATH` on this node only,
    `tls:HOST:PORT` behind a sidecar."""
    is_ready: bool = False
    at: float = 0.0
    """When `is_ready` last changed."""
    because: str = ""
    """Why the last probe failed. Empty while the replica is ready."""
    is_asleep: bool = False
    """The server sleeps because it was told to. It is healthy and cannot take requests."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """How one node got from a failure to its next step. Seconds count from when it noticed the failure."""

    rendezvous_round: int
    """The round that followed the failure."""
    node: str
    failed_at: float
    surviving_ranks: int
    """Ranks that survived."""
    spare_ranks: int
    """Ranks that a spare process became. The others were started."""
    formed_s: float
    """Until every rank of the node had its assignment or was started."""
    joined_s: float | None = None
    """Until all of them had joined the group. None: the program does not report it."""
    stepped_s: float | None = None
    """Until all of them had made a step."""
    steps_lost: int | None = None
    """Complete steps that were repeated."""
    first_step: int | None = None
    """How many steps were complete after the first step of the new round."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranks of one node are, as a program that uses `shoal.runtime` reports it."""

    rendezvous_round: int
    step: int
    """Complete steps."""
    at: float
    """When the ranks had completed that step."""
    step_s: float | None = None
    """How long a recent step of this round took."""


class ActivitySigns(msgspec.Struct, frozen=True, kw_only=True):
    """Signs of activity of the newest rank group on one node, for any program.

    Times are of the node's wall clock.
    """

    rendezvous_round: int
    started_at: float
    """When the processes of the ranks were started."""
    printed_at: float | None = None
    """When the first of them wrote a line."""
    worked_at: float | None = None
    """When the supervisor first saw that they had used a processor."""

    @property
    def ran_at(self) -> float:
        """When the ranks ran again, according to the best of these signs."""
        return self.printed_at or self.worked_at or self.started_at


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor's heartbeat: it is alive, and this is its state. A renewal may be repeated or lost."""

    attempt_id: str
    epoch: int
    node: str
    replacement: int = 0
    phase: TaskPhase
    started_at: float | None = None
    outcome: TaskOutcome | None = None
    """Set once, with phase `ended`. The control plane's reply means that the outcome is safely recorded."""
    saved_s: float | None = None
    """How long ago the job last saved its work, as seen on this node. None: no save was seen."""
    rendezvous_round: int = 0
    """The round of the ranks that run here."""
    master_port: int | None = None
    """The rendezvous port of that round, if this node knows it. Only the first node decides it."""
    failure: TaskOutcome | None = None
    """How this rank group ended on this node. With it the supervisor asks whether another may follow in
    place. The only node of an attempt does not ask: there it is how the group before ended."""
    recovery: Recovery | None = None
    """The newest recovery on this node."""
    metrics: tuple[Samples, ...] = ()
    """Repeated until a reply comes. The same points twice change nothing."""
    progress: Progress | None = None
    signs: ActivitySigns | None = None
    world: World | None = None
    """The largest process group that the current ranks have reported."""
    drill_result: DrillResult | None = None
    """The newest drill on this node."""
    replica_status: ReplicaStatus | None = None
    """Set for a replica once its server was started."""
    wait_s: float = 0.0
    """How long the control plane may hold the reply until it has news."""
    nonce: str = ""
    """New in every message, so that a reply to another message proves nothing about this one."""
    proof_version: int = 1
    """The newest version of the proof that the supervisor knows (see `shoal.proof`)."""


class RenewalReply(msgspec.Struct, frozen=True, kw_only=True):
    """The control plane's reply to a renewal. `should_stop`: stop the ranks within `grace_s`, then report.

    A reply without a valid `proof` (see `shoal.proof`) is ignored.
    """

    should_stop: bool = False
    grace_s: float = 30.0
    because: str = ""
    is_stale: bool = False
    """This attempt may not run, or may no longer run: stop at once, whatever the grace."""
    rendezvous_round: int = 0
    """The round that should run. A supervisor with an older round ends its ranks and starts this one."""
    master_port: int | None = None
    """The rendezvous port of that round. None: the first node still has to report it."""
    is_after_hang: bool = False
    """The round before is ended for a hang. A node that has ranks of it saves their stacks."""
    drill: DrillCommand | None = None
    should_sleep: bool | None = None
    """Whether the server of a replica should sleep. None: no change."""
    control_urls: tuple[str, ...] = ()
    """All control planes known now, this one first. The supervisor asks the others when this one is
    silent."""
    proof: str = ""
