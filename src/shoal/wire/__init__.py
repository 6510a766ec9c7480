"""The messages between the control plane, node agents and supervisors.

- `task_spec`: what a supervisor has to do.
- `renewal`: the heartbeat of a supervisor and the control plane's reply, with orders for a `drill`.
- `outcome`: how the task of one node ended.
- `node_agent`: how a task reaches another machine, with its secrets, and how its log comes back.

Workers install this package without the control plane, so it imports nothing else of Shoal but `curve`, and
no pydantic. Both sides ignore unknown fields, so either side may be upgraded first.
"""

from shoal.wire.drill import DrillAct, DrillCommand, DrillResult
from shoal.wire.node_agent import (
    AGENT_CONTACT_S,
    AGENT_PATIENCE_S,
    AGENT_PING_S,
    AGENT_REPLY_S,
    LaunchRequest,
    ProcessName,
    StatusReply,
    StatusReport,
    TaskAssignment,
    TaskCredentials,
    TaskSpecRequest,
    TlsIdentity,
)
from shoal.wire.outcome import MAX_EARLY_ENDS, MAX_OUTCOME_MESSAGE, EndKind, TaskOutcome, World, WrittenFiles
from shoal.wire.renewal import (
    ActivitySigns,
    Progress,
    Recovery,
    Renewal,
    RenewalReply,
    ReplicaStatus,
    TaskPhase,
)
from shoal.wire.task_spec import (
    GpuHandle,
    LeftBehind,
    LogRule,
    Mount,
    ProbeSpec,
    RuleAction,
    TaskFolders,
    TaskIdentity,
    TaskIsolation,
    TaskLease,
    TaskProgram,
    TaskRanks,
    TaskResources,
    TaskSpec,
)

__all__ = [
    "AGENT_CONTACT_S",
    "AGENT_PATIENCE_S",
    "AGENT_PING_S",
    "AGENT_REPLY_S",
    "MAX_EARLY_ENDS",
    "MAX_OUTCOME_MESSAGE",
    "ActivitySigns",
    "DrillAct",
    "DrillCommand",
    "DrillResult",
    "EndKind",
    "GpuHandle",
    "LaunchRequest",
    "LeftBehind",
    "LogRule",
    "Mount",
    "ProbeSpec",
    "ProcessName",
    "Progress",
    "Recovery",
    "Renewal",
    "RenewalReply",
    "ReplicaStatus",
    "RuleAction",
    "StatusReply",
    "StatusReport",
    "TaskAssignment",
    "TaskCredentials",
    "TaskFolders",
    "TaskIdentity",
    "TaskIsolation",
    "TaskLease",
    "TaskOutcome",
    "TaskPhase",
    "TaskProgram",
    "TaskRanks",
    "TaskResources",
    "TaskSpec",
    "TaskSpecRequest",
    "TlsIdentity",
    "World",
    "WrittenFiles",
]
