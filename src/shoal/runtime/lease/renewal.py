"""Renew the task's lease with the control plane from a thread of its own.

The thread only carries messages: it stores the last reply for the main loop and wakes that loop, which
decides what a reply or a silence means for the ranks. A reply without a proof that it comes from the control
plane counts as silence.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from shoal.clock import Clock
from shoal.curve import Samples
from shoal.runtime.files.checkpoint_storage import LastSave
from shoal.runtime.lease.addresses import ControlPlaneAddresses
from shoal.runtime.process.meter import Meter
from shoal.runtime.supervisor.environment import RendezvousRound, first_rendezvous
from shoal.wire import (
    ActivitySigns,
    DrillCommand,
    DrillResult,
    Progress,
    Recovery,
    Renewal,
    RenewalReply,
    ReplicaStatus,
    TaskCredentials,
    TaskOutcome,
    TaskPhase,
    TaskSpec,
    World,
)

TIMEOUT_S = 10.0
FIRST_BACKOFF_S = 0.2
FINAL_S = 10.0
LISTEN_AGAIN_S, LISTEN_PAUSE_S = 1.0, 0.05
T = TypeVar("T")


class LeaseRenewer:
    """Sends heartbeats for one task. Call `start` once; every other method may be called at any time."""

    def __init__(
        self,
        task_spec: TaskSpec,
        credentials: TaskCredentials,
        server_file: str | None,
        clock: Clock,
        wake_fd: int,
        born_at: float,
        meter: Meter,
    ) -> None:
        self._task_spec = task_spec
        self._meter = meter
        self._credentials = credentials
        self._addresses = ControlPlaneAddresses(task_spec.lease, server_file)
        self._clock = clock
        self._wake_fd = wake_fd
        self._changed = threading.Condition()
        self._phase = TaskPhase.PREPARING
        self._started_at: float | None = None
        self._outcome: TaskOutcome | None = None
        self._failure: TaskOutcome | None = None
        self._recovery: Recovery | None = None
        self._drill_result: DrillResult | None = None
        self._is_drill_acknowledged = threading.Event()
        self._silent_until = 0.0
        self._rendezvous = first_rendezvous(task_spec.identity.replacement, task_spec.ranks.master_port)
        self._is_due = True
        self._is_end_reported = False
        self._last_error = ""
        """The last error here, so that it is logged once."""
        self._thread: threading.Thread | None = None
        self._last_save = (
            LastSave(task_spec.folders.checkpoint_dir, clock)
            if task_spec.folders.checkpoint_dir is not None
            else None
        )
        self.answered_at = born_at
        """When the control plane last accepted a renewal, or when this supervisor was started."""
        self.stop_reply: RenewalReply | None = None
        self.newest_group = RenewalReply()
        """The newest rendezvous round that the control plane named, and its port."""
        self.acknowledged_failure: TaskOutcome | None = None
        """The failure that the newest reply is about. A late reply says nothing about another failure."""
        self.stale_because: str | None = None
        """Why this attempt may not run any more, as the control plane put it."""
        self.drill_command: DrillCommand | None = None
        """The drill in the newest reply. The drill runner knows whether it is done."""
        self.progress: Progress | None = None
        """The progress of the ranks. Every message carries it, and `world` as well."""
        self.world: World | None = None
        self._signs: ActivitySigns | None = None
        self._replica_status: ReplicaStatus | None = None
        self.on_sleep: Callable[[bool], None] | None = None
        """Called with whether a replica's server should sleep, each time the control plane says so."""

    def start(self) -> None:
        """Start to renew. A second call changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)
            self._thread.start()
            is_one_of_many = len(self._task_spec.ranks.nodes) > 1 and self._task_spec.ranks.max_restarts > 0
            can_sleep = self._task_spec.program.probe is not None and self._task_spec.program.probe.can_sleep
            if is_one_of_many or can_sleep:
                threading.Thread(target=self._listen_for_news, name="news", daemon=True).start()

    def report_phase(
        self, phase: TaskPhase, started_at: float | None = None, outcome: TaskOutcome | None = None
    ) -> None:
        """Report the task's phase at once."""
        with self._changed:
            self._phase = phase
            self._started_at = started_at if started_at is not None else self._started_at
            self._outcome = outcome
            self._is_due = True
            self._changed.notify()

    def report_rendezvous(
        self, rendezvous: RendezvousRound | None = None, failure: TaskOutcome | None = None
    ) -> None:
        """Report at once which rank group runs here now, or how it failed."""
        with self._changed:
            self._rendezvous = rendezvous or self._rendezvous
            self._failure = failure
            self._is_due = True
            self._changed.notify()

    def report_recovery(self, recovery: Recovery) -> None:
        """Report with the next message how the newest rank group started here."""
        with self._changed:
            self._recovery = recovery
            self._is_due = True
            self._changed.notify()

    def report_signs(self, signs: ActivitySigns) -> None:
        """Report the signs of activity of the newest rank group with every message.

        The first ones of a new group are sent at once, because a drill may wait for them.
        """
        if signs == self._signs:
            return
        with self._changed:
            self._signs = signs
            if signs.rendezvous_round > 0 or self._task_spec.identity.epoch > 1:
                self._is_due = True
                self._changed.notify()

    def report_serving(self, replica_status: ReplicaStatus) -> None:
        """Report at once whether the replica can take requests."""
        with self._changed:
            self._replica_status = replica_status
            self._is_due = True
            self._changed.notify()

    def report_drill(self, drill_result: DrillResult, wait_s: float = 0.0) -> None:
        """Report the result of a drill at once. Returns when the control plane has it, or after `wait_s`."""
        with self._changed:
            self._drill_result = drill_result
            self._is_drill_acknowledged.clear()
            self._is_due = True
            self._changed.notify()
        self._is_drill_acknowledged.wait(wait_s)

    def go_silent(self, for_s: float) -> None:
        """Send and receive nothing for `for_s`, as if the network were away."""
        self._silent_until = self._clock.monotonic() + for_s

    def finish(self, outcome: TaskOutcome) -> None:
        """Report the outcome. Returns when the control plane has it or after `FINAL_S`: the file counts."""
        self.report_phase(TaskPhase.ENDED, outcome=outcome)
        self.start()
        if self._thread is not None:
            self._thread.join(FINAL_S)

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        if self._last_save is not None:
            self._guarded(self._last_save.start)
        while True:
            if self._guarded(self._renew):
                backoff_s, wait_s = FIRST_BACKOFF_S, self._task_spec.lease.renew_s
            else:
                wait_s, backoff_s = backoff_s, min(backoff_s * 2, self._task_spec.lease.renew_s)
            if self._is_end_reported:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_due, timeout=wait_s)

    def _guarded(self, action: Callable[[], T]) -> T | None:
        """Call the action. Any error counts as a silence, and is logged once.

        If an error ended this thread, the silence would last for ever, and the fence would end healthy ranks.
        """
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - see above
            problem = f"{type(error).__name__}: {error}"
            if problem != self._last_error:
                self._last_error = problem
                sys.excepthook(*sys.exc_info())
            return None

    def _renew(self) -> bool:
        """Send one renewal. False: there was no reply."""
        self._is_due = False  # so that a failure before the request is sent is not tried again at once
        renewal = self._next_renewal()
        asked_at = self._clock.monotonic()
        answer = self._send(renewal)
        if answer is None:
            self._meter.put_back(renewal.metrics)
            self._addresses.advance()
            return False
        self._addresses.learn(answer.control_urls)
        self._apply(answer, asked_at)
        if renewal.drill_result is self._drill_result:
            self._is_drill_acknowledged.set()
        if renewal.failure is not None:
            self.acknowledged_failure = renewal.failure  # the main thread may have set a newer one by now
            self._wake()
        self._is_end_reported = renewal.outcome is not None
        return True

    def _next_renewal(self) -> Renewal:
        """Build the next message. Metrics are taken without the lock, so the main thread never waits
        for them.
        """
        while True:
            with self._changed:
                is_asking, is_last = self._is_asking(), self._outcome is not None
            metrics = () if is_asking else self._meter.take(is_last=is_last)
            with self._changed:
                if (is_asking, is_last) == (self._is_asking(), self._outcome is not None):
                    self._is_due = False
                    return self._renewal(metrics=metrics)
            self._meter.put_back(metrics)

    def _is_asking(self) -> bool:
        """Whether ranks wait for the reply. Then the message carries nothing that takes time to store."""
        return self._failure is not None and len(self._task_spec.ranks.nodes) > 1 and self._outcome is None

    def _listen_for_news(self) -> None:
        """Learn at once that another node's ranks failed, or that a server should wake up.

        The thread asks, and the control plane holds its reply until there is news.
        """
        pause = threading.Event()
        while self._outcome is None:
            pause_s = self._guarded(self._poll_news)
            pause.wait(LISTEN_AGAIN_S if pause_s is None else pause_s)

    def _poll_news(self) -> float | None:
        """Ask once. Return the pause before the next request, or None if there was no reply."""
        with self._changed:
            question = self._renewal(wait_s=self._task_spec.lease.renew_s)
        asked_at = self._clock.monotonic()
        answer = self._send(question)
        if answer is None or self._outcome is not None:
            return None
        self._apply(answer, asked_at)
        # Wait until the server does what the reply asks: it takes time to fall asleep.
        is_changing = answer.should_sleep is not None and not self._sleeps_as(answer.should_sleep)
        return LISTEN_AGAIN_S if is_changing else LISTEN_PAUSE_S

    def _sleeps_as(self, should_sleep: bool) -> bool:  # noqa: FBT001 - as in the reply
        return self._replica_status is not None and self._replica_status.is_asleep == should_sleep

    def _send(self, renewal: Renewal) -> RenewalReply | None:
        if self._clock.monotonic() < self._silent_until:
            return None
        connections = importlib.import_module(
            "shoal.runtime.lease.http_exchange"
        )  # a late import: ranks need not wait the 25 ms for it
        url = f"{self._addresses.url}/v1/supervisor/renew"
        answer: RenewalReply | None = connections.ask(
            url, self._credentials, renewal, TIMEOUT_S, self._addresses.ca_file
        )
        # A reply that was on its way when the network went is lost with it.
        return None if self._clock.monotonic() < self._silent_until else answer

    def _renewal(self, wait_s: float = 0.0, metrics: tuple[Samples, ...] = ()) -> Renewal:
        return Renewal(
            attempt_id=self._task_spec.identity.attempt_id,
            epoch=self._task_spec.identity.epoch,
            node=self._task_spec.identity.node,
            replacement=self._task_spec.identity.replacement,
            phase=self._phase,
            started_at=self._started_at,
            outcome=self._outcome,
            saved_s=None if self._last_save is None else self._last_save.age_s,
            rendezvous_round=self._rendezvous.number,
            master_port=self._rendezvous.master_port or None,
            failure=self._failure,
            recovery=self._recovery,
            metrics=metrics,
            progress=self.progress,
            signs=self._signs,
            world=self.world,
            drill_result=self._drill_result,
            replica_status=self._replica_status
            if wait_s == 0
            else None,  # only the renewal thread reports it, so that an older status never overwrites a newer
            wait_s=wait_s,
        )

    def _apply(self, reply: RenewalReply, asked_at: float) -> None:
        """Note the control plane's reply.

        The lease counts from when we asked. The control plane counts from when it received that, which is
        later.
        """
        if reply.is_stale:
            self.stale_because = reply.because
            self._wake()
            return
        # Once the fence has passed, the task ends whatever the reply says: another may have its place.
        if self._clock.monotonic() - self.answered_at < self._task_spec.lease.fence_s:
            self.answered_at = max(self.answered_at, asked_at)
        if reply.should_stop:
            self.stop_reply = reply
            self._wake()
        if reply.should_sleep is not None and self.on_sleep is not None:
            self.on_sleep(reply.should_sleep)
            self._wake()
        # The drill is set before the group: a main loop that sees a new group must know of the drill.
        previous, self.drill_command = self.drill_command, reply.drill
        if reply.drill not in (None, previous):
            self._wake()
        with self._changed:
            is_news = (reply.rendezvous_round, reply.master_port) != (
                self.newest_group.rendezvous_round,
                self.newest_group.master_port,
            )
            if is_news and reply.rendezvous_round >= self.newest_group.rendezvous_round:
                self.newest_group = reply
                self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_fd, b"r")
