"""The server of a replica, as its supervisor sees it: where it listens, whether it answers, what may reach
it.

The data plane sends requests only to the first node. The other nodes get the same variables, so that the same
command works there. Their $PORT is a free port to which no request comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from shoal.clock import Clock
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.confine.firewall import FirewallFailed
from shoal.runtime.lease.renewal import LeaseRenewer
from shoal.runtime.process.launcher import Launcher
from shoal.runtime.process.watcher import Process, Watcher
from shoal.runtime.replica import listeners
from shoal.runtime.replica.probe import ServerProber
from shoal.runtime.replica.sidecar_monitor import SidecarMonitor
from shoal.runtime.supervisor.endings import Ending
from shoal.wire import EndKind, TaskCredentials, TaskSpec

DEAD_GRACE_S = 3.0
"""A server that no longer answers has nothing to finish, and another one waits for its place."""


class ReplicaServer:
    """The server of a replica. For any other job, every method does nothing."""

    def __init__(
        self,
        task_spec: TaskSpec,
        credentials: TaskCredentials,
        home: str,
        clock: Clock,
        watcher: Watcher,
        renewer: LeaseRenewer | None,
    ) -> None:
        self._task_spec = task_spec
        self._credentials = credentials
        self._home = home
        self._clock = clock
        self._watcher = watcher
        self._renewer = renewer
        self._listener: listeners.ServerListener | None = None
        self._prober: ServerProber | None = None
        self._sidecar: SidecarMonitor | None = None

    def open(self, launcher: Launcher, confinement: Confinement) -> Ending | None:
        """Give the server a place to listen. Returns an `Ending` if there is none, or it cannot be
        protected.
        """
        probe, task_spec = self._task_spec.program.probe, self._task_spec
        if probe is None:
            return None
        if task_spec.ranks.node_rank > 0:
            self._listener = listeners.PortListener(listeners.LOOPBACK, None)
            return None
        identity = self._credentials.sidecar
        try:
            at = listeners.listener_for(
                task_spec, os.path.realpath(self._home), probe, has_sidecar=identity is not None
            )
        except OSError as error:
            message = (
                f"{error} on {task_spec.identity.node}; leave `port` out and have the server listen at $PORT"
            )
            return Ending(kind=EndKind.SETUP_FAILED, message=message)
        self._listener = at
        try:
            if identity is not None and task_spec.lease.control_url is not None:
                self._sidecar = SidecarMonitor(
                    identity, task_spec.lease.control_url, at.address, self._watcher, self._clock
                )
        except OSError as error:
            return Ending(
                kind=EndKind.SETUP_FAILED, message=f"no sidecar on {task_spec.identity.node}: {error}"
            )
        protect = _protection(at, task_spec, confinement)
        try:
            if protect is not None:
                protect()
        except FirewallFailed as error:
            return Ending(kind=EndKind.SETUP_FAILED, message=f"{error.message} on {task_spec.identity.node}")
        tell = self._renewer.report_serving if self._renewer is not None else None
        outside = self._sidecar.address if self._sidecar is not None else ""
        self._prober = ServerProber(probe, at, self._credentials, self._clock, tell, outside, protect)
        if self._renewer is not None:
            self._renewer.on_sleep = self._prober.set_should_sleep
        if isinstance(at, listeners.NamespaceListener):
            self._start_socket_broker(launcher, at)
        return None

    def _start_socket_broker(self, launcher: Launcher, listener: listeners.NamespaceListener) -> None:
        fd = listener.listener.fileno()
        broker = launcher.start_function(
            "shoal.runtime.replica.listeners", "serve", (fd, listener.port), inherited_fds=(fd,)
        )
        self._watcher.add(Process(broker[0], None, is_needed=False), broker[1])
        listener.listener.close()

    def start(self) -> None:
        """Start to probe, because the program was started. May be repeated."""
        if self._prober is not None:
            self._prober.start()

    def check_sidecar(self) -> None:
        if self._sidecar is not None:
            self._sidecar.check()

    def release(self) -> None:
        """Give the place up, because the program has ended for good."""
        if isinstance(self._listener, listeners.PortListener):
            self._listener.release()

    @property
    def variables(self) -> dict[str, str]:
        """The variables for the program, on every node of the replica."""
        probe, secret = self._task_spec.program.probe, self._credentials.replica_secret
        if probe is None or self._listener is None:
            return {}
        key = {"SHOAL_REPLICA_KEY": secret} if secret else {}
        return {**self._listener.variables, **key, "SHOAL_SERVICE_PATH": probe.service_path}

    @property
    def should_end(self) -> bool:
        """Whether the server should sleep by ending."""
        return self._prober is not None and self._prober.should_end

    def set_ended(self, *, is_ended: bool) -> None:
        """Note that the server sleeps by having ended, or that it does so no longer."""
        if self._prober is not None:
            self._prober.set_ended(is_ended=is_ended)

    @property
    def failure(self) -> Ending | None:
        """Return why a server that runs counts as dead, or None."""
        verdict = self._prober.verdict if self._prober is not None else None
        if verdict is None:
            return None
        grace_s = min(self._task_spec.resources.grace_s, DEAD_GRACE_S)
        return Ending(kind=EndKind.EXITED, message=verdict, grace_s=grace_s, rank=0)


def _protection(
    listener: listeners.ServerListener, task_spec: TaskSpec, confinement: Confinement
) -> Callable[[], None] | None:
    """Return what closes the port to other users. None: this node cannot, or there is no port."""
    uid = confinement.firewalled_uid
    if uid is None or not isinstance(listener, listeners.PortListener):
        return None
    return partial(listener.protect, uid, is_open=task_spec.isolation.has_open_network)
