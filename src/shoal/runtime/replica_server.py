"""The server of a replica, as its supervisor sees it: where it listens, whether it answers, who may reach it.

The data plane sends requests to the first node alone. The other nodes find the same variables, so that the
same line runs there. Their $PORT is a free port that no request comes to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from shoal.clock import Clock
from shoal.runtime import listening
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.confine.firewall import FirewallFailed
from shoal.runtime.ending import Ending
from shoal.runtime.launch import Launcher
from shoal.runtime.porch.minder import PorchMinder
from shoal.runtime.probe import Prober
from shoal.runtime.renewal import Renewer
from shoal.runtime.watch import Process, Watcher
from shoal.wire import Credentials, EndKind, Order

DEAD_GRACE_S = 3.0
"""A server that does not answer any more has nothing to finish, and another waits for its place."""


class ReplicaServer:
    """Does nothing for a job that is no replica."""

    def __init__(
        self,
        order: Order,
        credentials: Credentials,
        home: str,
        clock: Clock,
        watcher: Watcher,
        renewer: Renewer | None,
    ) -> None:
        self._order = order
        self._credentials = credentials
        self._home = home
        self._clock = clock
        self._watcher = watcher
        self._renewer = renewer
        self._at: listening.Listening | None = None
        self._prober: Prober | None = None
        self._porch: PorchMinder | None = None

    def open(self, launcher: Launcher, confinement: Confinement) -> Ending | None:
        """Find the server a place to listen. An `Ending`: it has none, or cannot be protected there."""
        probe, order = self._order.probe, self._order
        if probe is None:
            return None
        if order.node_rank > 0:
            self._at = listening.OnPort(listening.LOOPBACK, None)
            return None
        papers = self._credentials.porch
        try:
            at = listening.place_of(order, os.path.realpath(self._home), probe, has_porch=papers is not None)
        except OSError as error:
            told = f"{error} on {order.node}; leave `port` out and have the server listen at $PORT"
            return Ending(kind=EndKind.SETUP_FAILED, message=told)
        self._at = at
        try:
            if papers is not None and order.control_url is not None:
                self._porch = PorchMinder(papers, order.control_url, at.address, self._watcher, self._clock)
        except OSError as error:
            return Ending(kind=EndKind.SETUP_FAILED, message=f"no porch on {order.node}: {error}")
        protect = _protection(at, order, confinement)
        try:
            if protect is not None:
                protect()
        except FirewallFailed as error:
            return Ending(kind=EndKind.SETUP_FAILED, message=f"{error.message} on {order.node}")
        tell = self._renewer.tell_serving if self._renewer is not None else None
        outside = self._porch.address if self._porch is not None else ""
        self._prober = Prober(probe, at, self._credentials, self._clock, tell, outside, protect)
        if self._renewer is not None:
            self._renewer.on_sleep = self._prober.want_sleep
        if isinstance(at, listening.BehindDoor):
            self._start_door(launcher, at)
        return None

    def _start_door(self, launcher: Launcher, at: listening.BehindDoor) -> None:
        fd = at.listener.fileno()
        door = launcher.start_function("shoal.runtime.door", "serve", (fd, at.port), keep=(fd,))
        self._watcher.add(Process(door[0], None, is_needed=False), door[1])
        at.listener.close()

    def start(self) -> None:
        """The program was started. May be repeated."""
        if self._prober is not None:
            self._prober.start()

    def look(self) -> None:
        if self._porch is not None:
            self._porch.look()

    def release(self) -> None:
        """The program has ended for good."""
        if isinstance(self._at, listening.OnPort):
            self._at.release()

    @property
    def variables(self) -> dict[str, str]:
        """What the program finds in its environment, on every node of the replica."""
        probe, secret = self._order.probe, self._credentials.replica_secret
        if probe is None or self._at is None:
            return {}
        key = {"SHOAL_REPLICA_KEY": secret} if secret else {}
        return {**self._at.variables, **key, "SHOAL_SERVICE_PATH": probe.service_path}

    @property
    def should_end(self) -> bool:
        """Whether it is to sleep by ending."""
        return self._prober is not None and self._prober.should_end

    def tell_ended(self, *, is_ended: bool) -> None:
        """It sleeps by having ended, or does so no more."""
        if self._prober is not None:
            self._prober.tell_ended(is_ended=is_ended)

    @property
    def death(self) -> Ending | None:
        """Why a server that runs is as good as dead; None: it is not."""
        told = self._prober.verdict if self._prober is not None else None
        if told is None:
            return None
        grace_s = min(self._order.grace_s, DEAD_GRACE_S)
        return Ending(kind=EndKind.EXITED, message=told, grace_s=grace_s, rank=0)


def _protection(at: listening.Listening, order: Order, confinement: Confinement) -> Callable[[], None] | None:
    """What closes the port to strangers, on both sides; None: this node cannot, or there is no port."""
    uid = confinement.walled_uid
    if uid is None or not isinstance(at, listening.OnPort):
        return None
    return partial(at.protect, uid, is_open=order.has_open_network)
