"""Run one task on a node where a cluster started us, and report for it to the control plane.

Started as `python -m shoal.runtime.agent.bootstrap NODE` with a `LaunchRequest` on standard input. NODE may
be `$NAME`, a variable of the cluster that holds the node's name. The node agent fetches the task spec over
TLS and forks the supervisor, which then runs as on the control plane's own machine, with its task in a spool
on this node's disk. The node agent sends what the supervisor writes there: the log in chunks, which the disk
holds while no control plane can be reached, and the outcome. It passes a stop on to the supervisor. If the
supervisor dies without an outcome, the node agent kills what is left and reports that, which is evidence of
the end. If it gets no task spec, it says why on standard error, which the engine keeps.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from types import FrameType

import msgspec

from shoal import bounded_file
from shoal.clock import BootClock
from shoal.runtime.agent import spool_root
from shoal.runtime.agent.control_plane_client import (
    ControlPlaneClient,
    ControlPlaneRefused,
    ControlPlaneUnreachable,
)
from shoal.runtime.files import removal, spool
from shoal.runtime.process import kernel, tree
from shoal.runtime.supervisor import entry
from shoal.wire import (
    AGENT_PING_S,
    MAX_OUTCOME_MESSAGE,
    EndKind,
    GpuHandle,
    LaunchRequest,
    StatusReply,
    StatusReport,
    TaskAssignment,
    TaskCredentials,
    TaskOutcome,
    TaskResources,
    TaskSpec,
    TaskSpecRequest,
)

DONE, NO_ORDER, STOPPED, UNDELIVERED, USAGE = 0, 3, 143, 75, 64
TURN_S = 0.1
CHUNK_BYTES = 512 << 10
PING_S, LONE_PING_S = AGENT_PING_S, 1.0
"""How often to report when there is no news. A supervisor that renews a lease learns of a stop there. Without
a lease, a stop comes only in the reply to this report.
"""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.3, 5.0
REPLACEMENT_WAIT_S = 75.0
"""How long to wait for the task spec that replaces a lost task: a little longer than the control plane tries.
"""
DELIVER_S = 120.0
"""How long beyond the fence to try to deliver an outcome to a control plane that is away. It is longer than
the control plane waits before it takes the task for fenced, and until then a late outcome still counts.
"""
KILL_AFTER_S = 10.0
"""A supervisor that is still running this long after its grace is killed."""
UNREAD_S = 30.0
"""How long the outcome waits for a disk that does not give the rest of the log."""
ROUND_S = 2.0
"""How long one round of killing may take before the next report."""
STOPPED_BY_SIGNAL = "SIGTERM came to its node agent, from the cluster or from a person on the node"
MAX_ERROR_BYTES = 4000
UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
"""How CUDA names a whole GPU, or a slice of one."""


def main(arguments: list[str]) -> int:
    """Return 0 if the task ended and that is recorded, 3 if there was no task spec, 75 if its end could not
    be delivered.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m shoal.runtime.agent.bootstrap NODE < LAUNCH_REQUEST\n")
        return USAGE
    node = os.environ.get(arguments[0][1:], "") if arguments[0].startswith("$") else arguments[0]
    kernel.hide_memory()
    kernel.become_subreaper()
    os.umask(0o077)
    try:
        launch_request = msgspec.json.decode(sys.stdin.buffer.read(), type=LaunchRequest)
    except msgspec.DecodeError as error:
        _say(f"standard input holds no launch request: {error}")
        return USAGE
    agent = NodeAgent(launch_request, node, ControlPlaneClient(launch_request.urls, launch_request.ca))
    code = agent.run()
    while code == DONE and agent.lost_replacement is not None and not agent.should_stop:
        agent = NodeAgent(
            launch_request,
            node,
            agent.client,
            previous_replacement=agent.lost_replacement,
            began_at=agent.began_at,
        )
        code = agent.run()
    return code


class AllocationMismatch(Exception):
    """The cluster gave other devices than the task spec is for."""


class NodeAgent:
    """Runs one task, from fetching its task spec to the delivery of its outcome."""

    def __init__(
        self,
        launch_request: LaunchRequest,
        node: str,
        client: ControlPlaneClient,
        previous_replacement: int | None = None,
        began_at: float | None = None,
    ) -> None:
        """`after`: the replacement whose share was lost here; what follows it is ours, if anything does.
        `began_at`: when the cluster started the one who had it, and us with it.
        """
        self._launch_request = launch_request
        self._node = node
        self._clock = BootClock()
        self.began_at = self._clock.monotonic() if began_at is None else began_at
        self.client = client
        self.lost_replacement: int | None = None
        """The replacement of the share, once it was lost beside others, who may go on with another."""
        self.should_stop = False
        self._sent_bytes = 0
        self._next_report_at = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._is_reachable = True
        self._unread_since: float | None = None
        """Since when the disk does not give what there is to report."""
        self._unread_reason = ""
        """The last error on reading the outcome, so that it is logged once."""
        self._has_reported_start = False
        self._is_stale = False
        self._leftovers = ""
        """A message about processes of a dead supervisor that do not die; empty if there are none."""
        self._kill_at: float | None = None
        self._grace_s: float | None = None
        self._directory_lock: int | None = None
        """Keeps the sweepers of old files out of the task's directory."""
        self._request = TaskSpecRequest(
            attempt_id=launch_request.attempt_id,
            node=node,
            replacement=launch_request.replacement,
            process=launch_request.process or os.urandom(16).hex(),
            previous_replacement=previous_replacement,
        )

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            root = spool_root.prepare_root(self._launch_request.spool)
        except OSError as error:
            # Without the task spec nothing is lost: the engine submits the task again, or gives it up if
            # other nodes already have their task specs.
            _say(f"no task spec is fetched for {self._request.attempt_id}: no room on {self._node}: {error}")
            return NO_ORDER
        fetched = self._fetch_task()
        if fetched is None and self._request.previous_replacement is not None:
            return DONE  # the earlier task has ended, and that is recorded
        if fetched is None:
            return STOPPED if self.should_stop else NO_ORDER
        assignment, asked_at = fetched
        self._request = msgspec.structs.replace(
            self._request, replacement=assignment.task_spec.identity.replacement
        )
        try:
            return self._run_task(
                spool.SpoolTask(spool_root.task_directory(root, self._request)), assignment, asked_at
            )
        finally:
            if self._directory_lock is not None:
                os.close(self._directory_lock)

    def _run_task(self, task: spool.SpoolTask, assignment: TaskAssignment, asked_at: float) -> int:
        """Run the task. No other process will ever get this task spec, so its end is always reported."""
        task_spec, credentials = assignment.task_spec, assignment.credentials
        self.client.add_urls(task_spec.lease.control_urls)
        try:
            task_spec = self._adapted_to_node(task_spec)
            self._prepare(task, task_spec, assignment)
            pid = self._fork(task, credentials, asked_at)
        except (OSError, ControlPlaneRefused, ControlPlaneUnreachable, AllocationMismatch) as error:
            problem = f"{self._node} could not start its task: {error}"
            _say(problem)
            return self._deliver(task, task_spec, credentials, self._lost_outcome(task, task_spec, problem))
        return self._deliver(
            task, task_spec, credentials, self._follow_supervisor(task, task_spec, credentials, pid)
        )

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        self.should_stop = True

    def _fetch_task(self) -> tuple[TaskAssignment, float] | None:
        """Return the task spec and when it was asked for. None: there is none, and standard error
        says why.
        """
        is_first = self._request.previous_replacement is None
        patience_s = self._launch_request.patience_s if is_first else REPLACEMENT_WAIT_S
        deadline, pause, last = (
            self._clock.monotonic() + patience_s,
            FIRST_BACKOFF_S if is_first else TURN_S,
            "",
        )
        while not self.should_stop:
            asked_at = self._clock.monotonic()
            try:
                return self.client.fetch_task(self._launch_request.bootstrap_token, self._request), asked_at
            except ControlPlaneRefused as error:
                _say(f"no task spec for {self._request.attempt_id} on {self._node}: {error}")
                return None
            except ControlPlaneUnreachable as error:
                if str(error) != last and is_first:
                    last = str(error)
                    _say(f"cannot reach the control plane yet: {last}")
            if self._clock.monotonic() >= deadline:
                _say(f"gave up: got no task spec in {patience_s:g} s")
                return None
            time.sleep(pause)
            pause = min(pause * 2, MAX_BACKOFF_S)
        return None

    def _adapted_to_node(self, task_spec: TaskSpec) -> TaskSpec:
        """Return the task spec with the devices and within the time that the cluster gave.

        The cluster chooses among equal devices by itself. The task gets no standby, because no engine runs on
        this machine that could call or reap one.
        """
        replace = msgspec.structs.replace
        resources = replace(task_spec.resources, time_limit_s=self._time_limit_s(task_spec.resources))
        return replace(
            task_spec,
            ranks=replace(task_spec.ranks, has_standby=False),
            resources=self._with_given_devices(resources),
        )

    def _with_given_devices(self, resources: TaskResources) -> TaskResources:
        name = self._launch_request.devices_variable
        if not name or not resources.gpu_ids:
            return resources
        devices = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
        are_numbers = all(part.isdigit() for part in devices)
        if len(devices) != len(resources.gpu_ids) or not (are_numbers or all(map(UUID.fullmatch, devices))):
            seen = f"{name}={','.join(devices)}"
            raise AllocationMismatch(
                f"its task spec is for {len(resources.gpu_ids)} GPUs; the cluster gave {seen!r}"
            )
        handles = tuple(
            GpuHandle(index=int(part)) if are_numbers else GpuHandle(index=place, uuid=part)
            for place, part in enumerate(devices)
        )
        return msgspec.structs.replace(
            resources,
            gpu_ids=tuple(handle.index for handle in handles),
            gpus=handles,
            are_gpus_chosen_by_cluster=True,
        )

    def _time_limit_s(self, resources: TaskResources) -> float | None:
        if resources.time_limit_s is None or self._launch_request.time_limit_s is None:
            return resources.time_limit_s
        left_s = self._launch_request.time_limit_s - (self._clock.monotonic() - self.began_at)
        return min(resources.time_limit_s, max(0.0, left_s // 1))  # in whole seconds: people read it

    def _prepare(self, task: spool.SpoolTask, task_spec: TaskSpec, assignment: TaskAssignment) -> None:
        """Make the task's directory on this node with all that the supervisor needs.

        The task spec comes first: without one it would be unknown whether something of the task runs.
        """
        os.makedirs(os.path.dirname(task.directory), mode=0o700, exist_ok=True)
        os.mkdir(task.directory, 0o700)
        spool.write_task_spec(task, task_spec)
        with contextlib.suppress(OSError):  # NFS cannot lock directories; sweepers there need their own rule
            self._directory_lock = spool.lock_directory(task)
        if assignment.has_archive:
            self._fetch_archive(task)
        authority = f"{task.directory}/ca.pem"
        spool.durable_write(authority, self._launch_request.ca.encode())
        first, *others = self._launch_request.urls
        server = {"url": first, "others": others, "tls_cert": authority}
        spool.durable_write(f"{task.directory}/server.json", msgspec.json.encode(server))

    def _fetch_archive(self, task: spool.SpoolTask) -> None:
        deadline, pause = self._clock.monotonic() + self._launch_request.patience_s, FIRST_BACKOFF_S
        while True:
            try:
                self.client.fetch_archive(self._launch_request.bootstrap_token, self._request, task.archive)
                return
            except ControlPlaneUnreachable:
                if self.should_stop or self._clock.monotonic() >= deadline:
                    raise
            time.sleep(pause)
            pause = min(pause * 2, MAX_BACKOFF_S)

    def _fork(self, task: spool.SpoolTask, credentials: TaskCredentials, asked_at: float) -> int:
        reader, writer = os.pipe()
        agent_pid, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(writer)
            _become_supervisor(task, reader, asked_at, agent_pid)
        os.close(reader)
        # If the supervisor is dead already, `_follow_supervisor` finds that.
        with contextlib.suppress(BrokenPipeError), open(writer, "wb") as pipe:
            pipe.write(msgspec.json.encode(credentials))
        return pid

    def _follow_supervisor(
        self, task: spool.SpoolTask, task_spec: TaskSpec, credentials: TaskCredentials, pid: int
    ) -> TaskOutcome:
        """Report news until the supervisor has ended, and return the outcome."""
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if self.should_stop and self._grace_s is None:
                self._stop(task, task_spec.resources.grace_s, STOPPED_BY_SIGNAL, is_external_stop=True)
            if self._kill_at is not None and self._clock.monotonic() >= self._kill_at:
                os.kill(pid, signal.SIGKILL)
            self._report_news(task, task_spec, credentials)
            time.sleep(TURN_S)
        return self._reap_supervisor(task, task_spec, credentials)

    def _report_news(self, task: spool.SpoolTask, task_spec: TaskSpec, credentials: TaskCredentials) -> None:
        """Send the next chunk of the log if there is one, or a heartbeat if it is time."""
        has_news = not self._has_reported_start and os.path.exists(task.started)
        with contextlib.suppress(OSError):  # the disk does not say: the next sign of life tries to read it
            has_news = has_news or _size_of(task.log) > self._sent_bytes
        is_time = self._clock.monotonic() >= self._next_report_at
        # News does not shorten the pause if the control plane does not answer or the disk does not give it.
        can_be_told = self._is_reachable and self._unread_since is None
        if not self._is_stale and (is_time or (has_news and can_be_told)):
            self._send_report(task, task_spec, credentials, None)

    def _send_report(
        self,
        task: spool.SpoolTask,
        task_spec: TaskSpec,
        credentials: TaskCredentials,
        outcome: TaskOutcome | None,
    ) -> StatusReply | None:
        """Send one report, and the outcome with the last chunk of the log. Sets when to report next.

        None: no control plane took it, or the disk does not give what there is to report.
        """
        identity = task_spec.identity
        now = self._clock.monotonic()
        offset = self._sent_bytes
        try:
            started, data = spool.read_started(task), _read_chunk(task.log, offset)
            self._unread_since = None
        except OSError as error:
            if self._unread_since is None:
                _say(f"cannot read what there is to report: {error}")
            self._unread_since = self._unread_since or now
            if outcome is not None and now < self._unread_since + UNREAD_S:
                self._back_off(now)
                return None
            started, data = None, b""  # the report still shows that this agent lives
        piece, is_rest = data[:CHUNK_BYTES], len(data) <= CHUNK_BYTES
        report = StatusReport(
            attempt_id=identity.attempt_id,
            epoch=identity.epoch,
            node=self._node,
            replacement=identity.replacement,
            process=self._request.process,
            offset=offset,
            started_at=None if started is None else started.at,
            outcome=outcome if is_rest else None,
            leftovers=self._leftovers if outcome is None else "",
            will_replace=is_rest and self._will_be_replaced(task_spec, outcome),
        )
        try:
            reply = self.client.send_report(credentials.proof_key, report, piece)
        except (ControlPlaneUnreachable, ControlPlaneRefused) as error:
            if isinstance(error, ControlPlaneRefused) and error.is_stale:
                _say(f"another process has this task now: {error}")
                self._is_stale = True
                self._stop(task, 0.0)
            self._back_off(now)
            return None
        self._sent_bytes, self._backoff_s, self._is_reachable = reply.size, FIRST_BACKOFF_S, True
        self._has_reported_start = self._has_reported_start or started is not None
        self._next_report_at = now + (LONE_PING_S if task_spec.lease.control_url is None else PING_S)
        if reply.stop_grace_s is not None and outcome is None:
            self._stop(task, reply.stop_grace_s)
        return reply

    def _back_off(self, now: float) -> None:
        self._is_reachable = False
        self._next_report_at = now + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)

    def _will_be_replaced(self, task_spec: TaskSpec, outcome: TaskOutcome | None) -> bool:
        """Whether the rest of the gang may go on with a replacement for this task, started by this
        process.
        """
        is_lost = outcome is not None and outcome.kind in (EndKind.LOST, EndKind.FENCED)
        may_stay = self._launch_request.can_replace and not self.should_stop and self._grace_s is None
        return is_lost and may_stay and len(task_spec.ranks.nodes) > 1 and task_spec.ranks.max_restarts > 0

    def _stop(
        self, task: spool.SpoolTask, grace_s: float, because: str = "", *, is_external_stop: bool = False
    ) -> None:
        """Ask the supervisor to stop, as an engine on its own machine would. The shortest grace counts."""
        if self._grace_s is not None and self._grace_s <= grace_s:
            return
        self._grace_s = grace_s
        self._kill_at = self._clock.monotonic() + grace_s + KILL_AFTER_S
        stop = spool.SpoolStop(
            grace_s=grace_s, at=self._clock.now(), because=because, is_external_stop=is_external_stop
        )
        try:
            spool.write_stop(task, stop)
        except OSError as error:
            _say(f"cannot write the stop, so only a signal is sent: {error}")
        with contextlib.suppress(
            OSError
        ):  # the disk may not name the supervisor; the later kill needs no name
            spool.signal_supervisor(task)

    def _reap_supervisor(
        self, task: spool.SpoolTask, task_spec: TaskSpec, credentials: TaskCredentials
    ) -> TaskOutcome:
        """Return the outcome of a supervisor that has ended.

        If it left none, kill the rest of the task, then return and write a `lost` outcome, even if the disk
        refuses the write. Until everything is dead, report that something does not die, because no process is
        left that could keep the fence.
        """
        patience_ends_at = self._clock.monotonic() + KILL_AFTER_S
        while (outcome := self._read_outcome(task, patience_ends_at)) is None:
            if _kill_leftovers(task, task_spec):
                output = _last_output(task.errors)
                _say(f"the supervisor died without an outcome: {output or 'it said nothing'}")
                last = f"; it last said: {output}" if output else ""
                lost = self._lost_outcome(task, task_spec, f"its supervisor died without an outcome{last}")
                try:
                    spool.write_outcome(task, lost)
                except OSError as error:
                    _say(f"cannot write the outcome, but it is still reported: {error}")
                return lost
            if not self._leftovers and self._clock.monotonic() >= patience_ends_at:
                self._leftovers = f"the supervisor on {self._node} is dead, and something of it does not die"
                self._next_report_at = 0.0
                _say(self._leftovers)
            self._report_news(task, task_spec, credentials)
            time.sleep(TURN_S)
        return outcome

    def _read_outcome(self, task: spool.SpoolTask, until: float) -> TaskOutcome | None:
        """Return the supervisor's outcome. None: it left none, or the disk does not give it in time."""
        while True:
            try:
                return spool.read_outcome(task)
            except OSError as error:
                if self._clock.monotonic() >= until:
                    if str(error) != self._unread_reason:
                        self._unread_reason = str(error)
                        _say(f"cannot read how the supervisor ended: {error}")
                    return None
            time.sleep(TURN_S)

    def _lost_outcome(self, task: spool.SpoolTask, task_spec: TaskSpec, message: str) -> TaskOutcome:
        identity = task_spec.identity
        started = None
        with contextlib.suppress(OSError):
            started = spool.read_started(task)
        return TaskOutcome(
            attempt_id=identity.attempt_id,
            epoch=identity.epoch,
            node=identity.node,
            kind=EndKind.LOST,
            ended_at=self._clock.now(),
            message=message[:MAX_OUTCOME_MESSAGE],
            started_at=None if started is None else started.at,
            replacement=identity.replacement,
        )

    def _deliver(
        self, task: spool.SpoolTask, task_spec: TaskSpec, credentials: TaskCredentials, outcome: TaskOutcome
    ) -> int:
        """Send the rest of the log and the outcome until it is recorded, then remove the task's files."""
        deadline = self._clock.monotonic() + task_spec.lease.fence_s + DELIVER_S
        while not self._is_stale and self._clock.monotonic() < deadline:
            reply = self._send_report(task, task_spec, credentials, outcome)
            if reply is not None and reply.is_recorded:
                if self._will_be_replaced(task_spec, outcome):
                    self.lost_replacement = task_spec.identity.replacement
                removal.remove(task.directory, timeout_s=DELIVER_S)
                return DONE
            if reply is None:
                time.sleep(self._backoff_s)
        _say(f"the outcome could not be delivered; it stays in {task.directory}")
        return UNDELIVERED


def _become_supervisor(task: spool.SpoolTask, reader: int, asked_at: float, agent_pid: int) -> None:
    """Become the supervisor. Never returns, because this process must not go on as a second node agent."""
    status = 1
    try:
        # When the node agent ends, the cluster takes the job for over, and may miss processes that the
        # ranks started. Once the supervisor has started any, it ends them first: see `NodeAgentWatch`.
        kernel.die_with_parent(agent_pid)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        errors = os.open(task.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        for fd, target in ((reader, 0), (errors, 1), (errors, 2)):
            os.dup2(fd, target)
        os.closerange(3, 1 << 16)
        os.environ["SHOAL_SERVER_FILE"] = f"{task.directory}/server.json"
        os.environ.setdefault("SHOAL_PATH", os.environ.get("PATH", os.defpath))
        kernel.rename((sys.executable, "-m", "shoal.runtime.supervisor", task.directory))
        status = entry.main([task.directory], asked_at, agent_pid)
    except BaseException:  # noqa: BLE001 - printed where the node agent reads it
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _kill_leftovers(task: spool.SpoolTask, task_spec: TaskSpec) -> bool:
    """Kill what the supervisor left. False: something does not die, or that cannot be told."""
    try:
        # The lock is not needed: its holder was our child and is dead, and no other process takes it.
        return _kill_children() and spool.kill_leftovers(task.directory, task_spec, timeout_s=ROUND_S)
    except OSError:
        return False


def _kill_children() -> bool:
    """Kill all descendants of this process. False: something does not die.

    Everything that the supervisor started and left is below this process, whatever became of the variables
    that mark it: see `become_subreaper`.
    """
    return tree.kill_until_gone(
        lambda: tree.descendants(os.getpid()), timeout_s=ROUND_S, after_round=_reap_children
    )


def _reap_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _read_chunk(path: str, offset: int) -> bytes:
    """Read a chunk and one byte more, which shows whether another chunk follows."""
    try:
        with bounded_file.plain_file(path) as fd:
            return os.pread(fd, CHUNK_BYTES + 1, offset)
    except FileNotFoundError:
        return b""


def _last_output(path: str) -> str:
    try:
        return bounded_file.read_end(path, MAX_ERROR_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _say(text: str) -> None:
    """Write to standard error if possible: a message must never end this process."""
    with contextlib.suppress(OSError):
        os.write(2, f"shoal node agent: {text}\n".encode("utf-8", "replace"))
