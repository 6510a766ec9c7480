"""What an engine, a node agent and the control plane say to each other about a task on another machine."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.wire.outcome import TaskOutcome
from shoal.wire.task_spec import TaskSpec


class TlsIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The TLS identity of one end of a sidecar connection: a certificate, its key, and the authority that
    must have certified the other end. All PEM.
    """

    certificate: str
    key: str
    authority: str


class TaskCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets of a task. They travel on the supervisor's standard input and are never on disk."""

    replica_secret: str = ""
    """Sent by data planes with every request for this replica. The program has it as SHOAL_REPLICA_KEY."""
    proof_key: str = ""
    """Signs the supervisor's messages and verifies the control plane's replies. The key itself is never
    sent."""
    job_token: str | None = None
    secrets: dict[str, str] = {}
    sidecar: TlsIdentity | None = None
    """Set where data planes are on other machines: the replica's sidecar shows this identity."""


AGENT_PATIENCE_S = 300.0
AGENT_PING_S = 5.0
"""A node agent sends a message at least this often."""
AGENT_CONTACT_S = 4.0
"""How long a node agent waits for one control plane before it asks the next: to connect, and to answer where
no piece of a log is in transit. How long a living node agent may be quiet follows from both numbers."""
AGENT_REPLY_S = 20.0
"""How long a node agent waits for the reply to one request for its task spec, or to one piece of its log. A
later reply is lost, and the node agent has to ask again."""


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine hands a node agent on its standard input: where the task spec is, and the right to fetch
    it once. It is a secret until a process has fetched the spec.
    """

    attempt_id: str
    urls: tuple[str, ...]
    """The control planes, tried in turn, because any of them may be the leader."""
    ca: str
    """The certificate of the cluster's own authority (PEM). A server must show a certificate by it."""
    bootstrap_token: str
    replacement: int = 0
    spool: str = ""
    """A directory on the node's own disk that belongs to this user or, like /tmp, to all. Empty: /tmp."""
    devices_variable: str = ""
    """The variable in which the cluster names the devices that it gave. Empty: those of the task spec."""
    patience_s: float = AGENT_PATIENCE_S
    """How long to try to get the task spec."""
    time_limit_s: float | None = None
    """The most that a task spec with a time limit gets, counted from the start of its node agent. The cluster
    ends all of the task soon after. None: the time limit of the task spec holds."""
    can_replace: bool = False
    """Whether a node agent whose supervisor was lost may fetch the spec of the task that replaces it. The
    agent already has room on the node, for which another would have to wait."""
    process: str = ""
    """The name of the process that gets this request, if the engine must recognize the process later. Empty:
    the process makes its own name."""


ProcessName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""A random name that the process itself, or the engine that starts it, makes. Checked when it is received."""


class TaskSpecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A node agent's request for its task spec. The same process may repeat it; another process gets none."""

    attempt_id: str
    node: str
    replacement: int = 0
    """The replacement number that the process was started for."""
    process: ProcessName
    """The name of the requesting process."""
    previous_replacement: int | None = None
    """The replacement number of the lost task, from a node agent that is still alive and asks for the
    next."""


class TaskAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The spec of one task with its secrets. It is given to one process, once."""

    task_spec: TaskSpec
    credentials: TaskCredentials
    has_archive: bool = False


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node agent's report about its task. Bytes of the task's log follow it. May be repeated."""

    attempt_id: str
    epoch: int
    node: str
    replacement: int = 0
    process: ProcessName
    """The process that fetched the task spec."""
    offset: int = 0
    """The offset in the task's log at which the bytes that follow begin."""
    started_at: float | None = None
    outcome: TaskOutcome | None = None
    """Sent once the control plane has the whole log."""
    leftovers: str = ""
    """A description of processes that do not die although the supervisor is dead. Empty: there are none."""
    will_replace: bool = False
    """Set with an outcome: this node agent asks for the spec of the task that replaces the lost one."""


class StatusReply(msgspec.Struct, frozen=True, kw_only=True):
    size: int = 0
    """How many bytes of the task's log the control plane has. The next piece begins there."""
    stop_grace_s: float | None = None
    """Set when the task has to end."""
    is_recorded: bool = False
    """The outcome is on the control plane's disk, so the task's files are no longer needed."""
    control_urls: tuple[str, ...] = ()
    """All control planes known now, as in `RenewalReply`. Here the server's TLS certificate vouches for
    them."""
