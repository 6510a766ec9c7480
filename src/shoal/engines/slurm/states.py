"""What Slurm's words for a job mean to us. Pure.

Slurm has no fence: NODE_FAIL means that slurmctld stopped hearing from slurmd, whose tasks may run on. So no
word of its own ends a share. That a job is over is evidence only together with a node that answers, for a
while: its slurmd has by then told what runs there and been told to end what should not. And only where Slurm
knows all that runs there, by control groups: else what a rank had started may outlive the job. And only on a
node that is not drained: that is how Slurm says that it could not kill something, and it says it of no other.
And only at the address that the node had: another machine of its name knows nothing of the one before.
"""

from __future__ import annotations

import time

import msgspec

from shoal.engines.glimpses import NO_TRACE, Glimpse, Stage

QUEUED = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    }
)
RUNNING = frozenset({"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"})
SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED"})
BELIEFS = frozenset({"NODE_FAIL", "BOOT_FAIL", "REVOKED"})
"""Over for this Slurm, which has not looked. REVOKED: another cluster of a federation has the job, whose
nodes it knows nothing of."""
SETTLE_S = 30.0
"""How long a node must have answered since its job was over, beyond Slurm's KillWait, before that is
evidence."""
HANDED = Glimpse(
    stage=Stage.QUEUED, raw="sbatch was run for it a moment ago; squeue has not been asked since"
)
RESTARTED = Glimpse(raw="Slurm has no trace of it; the node was restarted since", is_over=True)
"""Of a share whose job `squeue` has forgotten: nothing outlives a restart, whoever remembers it."""


AWAY = (
    "unable to contact slurm controller",
    "socket timed out",
    "zero bytes were transmitted",
    "connection refused",
    "communication connection failure",
    "unexpected message received",
    "transport endpoint",
    "resource temporarily unavailable",
    "slurm backup controller in standby mode",
    "munge",
    "protocol authentication error",
    "unspecified error",
)
"""In the words of somebody who could not ask slurmctld, or did not hear its answer."""
BARRED = ("reqnodenotavail", "nodes required for job are down", "nodedown", "badconstraints")
"""In Slurm's reasons why a job waits: for nodes that it names, and that may take no work."""
IN_TURN = ("", "none", "resources", "priority")
"""Its reasons for one that waits as others do: whether its nodes take work Slurm has not looked, or does not
say. What was held, or waits for a limit, waits for that wherever it is to run."""
ABOUT_NODES = "node configuration is not available"
FOR_EVER = (
    ABOUT_NODES,
    "time limit is invalid",
    "memory specification can not be satisfied",
    "invalid generic resource",
    "cpu count per node",
    "more processors requested than permitted",
    "node count specification invalid",
    "pathname of a file",
    "script size",
    "unrecognized option",
    "invalid numeric value",
)
"""In the words of who refuses a job: about the request itself. All else may pass: a partition that is
drained, associations that are not loaded yet, a node that has just gone, limits on jobs of ours."""


FAR_S = 30 * 86400.0
"""An estimate further away goes by nothing but the year that Slurm gives a job ahead which has no limit."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """As Slurm lists it, or as its accounting remembers it."""

    job_id: str
    state: str
    name: str
    user: str = ""
    """The name of the Unix account."""
    start: str = ""
    """In UTC."""
    reason: str = ""
    is_past: bool = False
    """From the accounting: what lists jobs has forgotten it."""

    @property
    def is_active(self) -> bool:
        return self.state not in OVER | BELIEFS


def stage_of(state: str) -> Stage:
    """Where a job in this state is; a word nobody here knows is UNKNOWN."""
    for stage, words in (
        (Stage.QUEUED, QUEUED),
        (Stage.RUNNING, RUNNING),
        (Stage.SUSPENDED, SUSPENDED),
        (Stage.ENDED, OVER | BELIEFS),
    ):
        if state in words:
            return stage
    return Stage.UNKNOWN


def is_away(said: str) -> bool:
    """Whether these words of Slurm's mean that nobody was asked: nothing is known then."""
    return any(words in said.lower() for words in AWAY)


def is_for_ever(said: str) -> bool:
    """Whether a job that was refused in these words will always be."""
    return any(words in said.lower() for words in FOR_EVER)


def is_about_nodes(said: str) -> bool:
    """Whether it was refused because of nodes that it names: others may have what it asks for."""
    return ABOUT_NODES in said.lower()


def is_barred(job: Job) -> bool:
    """Whether it waits, in Slurm's words, for nodes that it names and that may take no work."""
    return job.state == "PENDING" and any(words in job.reason.lower() for words in BARRED)


def is_in_turn(job: Job) -> bool:
    """Whether it waits for nothing that it would not wait for elsewhere, too."""
    return job.state == "PENDING" and (job.reason.lower() in IN_TURN or is_barred(job))


def is_to_begin(job: Job) -> bool:
    """Whether Slurm has given it its nodes: keepers are there by now, or on their way."""
    return job.state == "CONFIGURING" or stage_of(job.state) is Stage.RUNNING


def words(job: Job, now: float) -> str:
    """Slurm's own reason and estimate, as `squeue` says them, at this hour of the wall clock."""
    if job.is_past:
        return f"Slurm's accounting has job {job.job_id} as {job.state}"
    reason = f" ({job.reason})" if job.reason not in ("", "None") else ""
    start = _expected(job.start, now) if stage_of(job.state) is Stage.QUEUED else ""
    return f"Slurm job {job.job_id} is {job.state}{reason}{start}"


def _expected(start: str, now: float) -> str:
    if start in ("", "N/A"):
        return ""
    if start > time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now + FAR_S)):
        return ", and Slurm has no estimate of its start that means anything"
    return f", Slurm expects it to start at {start} UTC"


def glimpse(
    job: Job,
    *,
    is_settled: bool,
    rebooted: bool,
    now: float,
    shut: str = "",
    mute: str = "",
    unkilled: str = "",
    is_clear: bool = False,
) -> Glimpse:
    """`is_settled`: the share's node has answered for long enough since the job was over.

    `now`: the wall clock's. `rebooted`: the node was started anew after the share had begun.
    `shut`: why it takes no work, in words.
    `mute`: that it has not answered for so long that nothing begins there, in words, whatever Slurm says.
    `unkilled`: that something did not die there, in words. It may be of this job, over or not: a step of it
    may have been given up on one node while others of it run. `is_clear`: Slurm would say so, and does not.
    """
    is_doubtful = bool(unkilled) and not rebooted
    told = f"{words(job, now)}; the node was restarted since" if rebooted else words(job, now)
    stranded = (shut or mute) if is_in_turn(job) else mute if is_to_begin(job) else ""
    return Glimpse(
        stage=stage_of(job.state),
        raw=f"{told}; {unkilled}" if is_doubtful else told,
        is_over=rebooted or (job.state in OVER and is_settled and not unkilled),
        is_left=is_doubtful and job.state in OVER,
        is_doubtful=is_doubtful,
        is_clear=is_clear,
        stranded=stranded,
    )


def forgotten(*, rebooted: bool, unkilled: str, is_clear: bool) -> Glimpse:
    """Of a share whose job Slurm has no trace of."""
    if rebooted:
        return RESTARTED
    if unkilled:
        return Glimpse(raw=f"Slurm has no trace of it; {unkilled}", is_doubtful=True)
    return msgspec.structs.replace(NO_TRACE, is_clear=is_clear)
