"""What Slurm's job states mean to Shoal. Pure.

Slurm has no fence: NODE_FAIL means that slurmctld stopped hearing from slurmd, whose tasks may still run.
So no state of Slurm's alone ends a task. The end of a job is evidence only under five conditions:
- Its node has responded for a while. By then slurmd has reported what runs there and been told what to end.
- Slurm tracks processes by control groups. Otherwise a process that a rank started may outlive the job.
- The task has stayed in its control group.
- The node is not drained. That is how Slurm says that it could not kill a process, and it says it only once.
- The node has its old address. Another machine of its name knows nothing of the one before.
"""

from __future__ import annotations

import time

import msgspec

from shoal.engines.remote.cluster_observation import NO_TRACE, ClusterObservation, ClusterTaskState
from shoal.model.evidence import Evidence

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
UNCONFIRMED_ENDS = frozenset({"NODE_FAIL", "BOOT_FAIL", "REVOKED"})
"""Over for this Slurm, which has not looked. REVOKED: another cluster of a federation has the job, and
Slurm knows nothing of that cluster's nodes."""
SETTLE_S = 30.0
"""How long a node must have responded after its job's end, beyond Slurm's KillWait, before that end is
evidence."""
JUST_SUBMITTED = ClusterObservation(
    state=ClusterTaskState.QUEUED, raw="sbatch was run for it a moment ago; squeue has not been asked since"
)
RESTARTED = ClusterObservation(
    raw="Slurm has no trace of it; the node was restarted since", evidence=Evidence.ENDED
)
"""The observation of a task whose job `squeue` has forgotten, after a restart of its node: nothing outlives
that."""


UNREACHABLE_MESSAGES = (
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
"""Messages of commands that could not ask slurmctld or did not get its reply."""
BLOCKED_REASONS = ("reqnodenotavail", "nodes required for job are down", "nodedown", "badconstraints")
"""Parts of Slurm's reasons of jobs that wait for the nodes they name, which may take no work."""
IN_TURN = ("", "none", "resources", "priority")
"""Slurm's reasons of jobs that wait as others do: Slurm has not checked whether their nodes take work, or
does not say. A job that is held or waits for a limit would wait for that on any node."""
ABOUT_NODES = "node configuration is not available"
PERMANENT_MESSAGES = (
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
"""Parts of messages that refuse the request itself. All other refusals may pass: a partition that is
drained, associations that are not loaded, a node that has just gone, limits on our jobs."""


FAR_S = 30 * 86400.0
"""An estimate further away comes only from the year that Slurm assumes for a job ahead without a limit."""


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as Slurm lists it, or as its accounting remembers it."""

    job_id: str
    state: str
    name: str
    user: str = ""
    """The name of the Unix account."""
    start: str = ""
    """In UTC."""
    reason: str = ""
    is_past: bool = False
    """From accounting: `squeue` has forgotten the job."""

    @property
    def is_active(self) -> bool:
        return self.state not in OVER | UNCONFIRMED_ENDS


def task_state_of(state: str) -> ClusterTaskState:
    """Return where a job in this state is; UNKNOWN for a state that is not in our lists."""
    for task_state, names in (
        (ClusterTaskState.QUEUED, QUEUED),
        (ClusterTaskState.RUNNING, RUNNING),
        (ClusterTaskState.SUSPENDED, SUSPENDED),
        (ClusterTaskState.ENDED, OVER | UNCONFIRMED_ENDS),
    ):
        if state in names:
            return task_state
    return ClusterTaskState.UNKNOWN


def is_unreachable(message: str) -> bool:
    """Return whether this message means that slurmctld was not asked, so nothing is known."""
    return any(part in message.lower() for part in UNREACHABLE_MESSAGES)


def is_permanent(message: str) -> bool:
    """Return whether a job that was refused with this message always will be."""
    return any(part in message.lower() for part in PERMANENT_MESSAGES)


def is_about_nodes(message: str) -> bool:
    """Return whether it was refused because of the nodes that it names: other nodes may suit it."""
    return ABOUT_NODES in message.lower()


def is_blocked(job: SlurmJob) -> bool:
    """Return whether it waits, as Slurm says, for nodes that it names and that may take no work."""
    return job.state == "PENDING" and any(part in job.reason.lower() for part in BLOCKED_REASONS)


def is_in_turn(job: SlurmJob) -> bool:
    """Return whether it would wait in the same way on other nodes."""
    return job.state == "PENDING" and (job.reason.lower() in IN_TURN or is_blocked(job))


def is_to_begin(job: SlurmJob) -> bool:
    """Return whether Slurm has given it its nodes: its node agents are there or on their way."""
    return job.state == "CONFIGURING" or task_state_of(job.state) is ClusterTaskState.RUNNING


def describe_job(job: SlurmJob, now: float) -> str:
    """Return Slurm's own reason and estimate, as `squeue` shows them at this time."""
    if job.is_past:
        return f"Slurm's accounting has job {job.job_id} as {job.state}"
    reason = f" ({job.reason})" if job.reason not in ("", "None") else ""
    start = _expected(job.start, now) if task_state_of(job.state) is ClusterTaskState.QUEUED else ""
    return f"Slurm job {job.job_id} is {job.state}{reason}{start}"


def _expected(start: str, now: float) -> str:
    if start in ("", "N/A"):
        return ""
    if start > time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now + FAR_S)):
        return ", and Slurm has no estimate of its start that means anything"
    return f", Slurm expects it to start at {start} UTC"


def job_observation(
    job: SlurmJob,
    *,
    is_settled: bool,
    rebooted: bool,
    now: float,
    unusable: str = "",
    unresponsive: str = "",
    unkilled: str = "",
    is_clear: bool = False,
) -> ClusterObservation:
    """Return the observation of a task from its Slurm job.

    `is_settled`: the task's node has responded for long enough since the job was over. `now`: of the wall
    clock. `rebooted`: the node was restarted after the task had begun. `unusable`: why the node takes no
    work, in words. `unresponsive`: that it has not responded for so long that nothing begins there,
    whatever Slurm says, in words. `unkilled`: that a process did not die there, in words. It may belong to
    this job, over or not, because one step of it may have been given up on one node while others run.
    `is_clear`: Slurm would report such a process, and reports none.
    """
    text = f"{describe_job(job, now)}; the node was restarted since" if rebooted else describe_job(job, now)
    stranded = (unusable or unresponsive) if is_in_turn(job) else unresponsive if is_to_begin(job) else ""
    return ClusterObservation(
        state=task_state_of(job.state),
        raw=f"{text}; {unkilled}" if unkilled and not rebooted else text,
        evidence=_proof(job, is_settled=is_settled, rebooted=rebooted, unkilled=unkilled, is_clear=is_clear),
        stranded_reason=stranded,
    )


def _proof(job: SlurmJob, *, is_settled: bool, rebooted: bool, unkilled: str, is_clear: bool) -> Evidence:
    """Return what Slurm's report of a job proves. Leftovers on the node count more than the job's end, and
    nothing outlives a restart.
    """
    if rebooted:
        return Evidence.ENDED
    if unkilled:
        return Evidence.ORPHANED_PER_CLUSTER if job.state in OVER else Evidence.DOUBTFUL
    if job.state in OVER and is_settled:
        return Evidence.ENDED
    return Evidence.CLEARED if is_clear else Evidence.UNKNOWN


def forgotten_observation(*, rebooted: bool, unkilled: str, is_clear: bool) -> ClusterObservation:
    """Return the observation of a task whose job Slurm has no trace of."""
    if rebooted:
        return RESTARTED
    if unkilled:
        return ClusterObservation(raw=f"Slurm has no trace of it; {unkilled}", evidence=Evidence.DOUBTFUL)
    return msgspec.structs.replace(NO_TRACE, evidence=Evidence.CLEARED) if is_clear else NO_TRACE
