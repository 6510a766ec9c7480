"""Renew the share's lease with the control plane from a thread of its own.

The thread only carries messages: it leaves the last answer where the main loop finds it and wakes that
loop. What an answer or a silence means for the ranks is decided there. Whatever does not prove that it comes
from the control plane is silence.
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
from shoal.runtime.addresses import Addresses
from shoal.runtime.environment import Generation, first_generation
from shoal.runtime.meter import Meter
from shoal.runtime.saves import Saves
from shoal.samples import Samples
from shoal.wire import (
    Credentials,
    Drilled,
    DrillOrder,
    NodeOutcome,
    Order,
    Phase,
    Progress,
    Recovery,
    Renewal,
    RenewalAnswer,
    Serving,
    Signs,
    World,
)

TIMEOUT_S = 10.0
FIRST_BACKOFF_S = 0.2
FINAL_S = 10.0
LISTEN_AGAIN_S, LISTEN_PAUSE_S = 1.0, 0.05
T = TypeVar("T")


class Renewer:
    """Heartbeats for one share. `start` once; everything else may be called at any time."""

    def __init__(
        self,
        order: Order,
        credentials: Credentials,
        server_file: str | None,
        clock: Clock,
        wake_fd: int,
        born_at: float,
        meter: Meter,
    ) -> None:
        self._order = order
        self._meter = meter
        self._credentials = credentials
        self._addresses = Addresses(order, server_file)
        self._clock = clock
        self._wake_fd = wake_fd
        self._changed = threading.Condition()
        self._phase = Phase.PREPARING
        self._started_at: float | None = None
        self._outcome: NodeOutcome | None = None
        self._failure: NodeOutcome | None = None
        self._recovery: Recovery | None = None
        self._drilled: Drilled | None = None
        self._is_drill_heard = threading.Event()
        self._cut_until = 0.0
        self._generation = first_generation(order)
        self._is_due = True
        self._is_end_told = False
        self._trouble = ""
        """What went wrong here last, so that it is told once."""
        self._thread: threading.Thread | None = None
        self._saves = Saves(order.checkpoint_dir, clock) if order.checkpoint_dir is not None else None
        self.answered_at = born_at
        """When the control plane last accepted a renewal, or when this supervisor was made."""
        self.order_to_stop: RenewalAnswer | None = None
        self.group = RenewalAnswer()
        """The newest group of ranks that the control plane told of, and where it meets."""
        self.answered_failure: NodeOutcome | None = None
        """The one that was answered last: that answer, which may come late, says nothing about another."""
        self.stale_because: str | None = None
        """Why this attempt may not run any more, in the control plane's words."""
        self.drill: DrillOrder | None = None
        """What this node should do by the newest answer; whether that is done, the asked one knows."""
        self.progress: Progress | None = None
        """How far the ranks are. Every message carries it, and the world below."""
        self.world: World | None = None
        self._signs: Signs | None = None
        self._serving: Serving | None = None
        self.on_sleep: Callable[[bool], None] | None = None
        """Told whether the server of a replica should sleep, whenever the control plane says so."""

    def start(self) -> None:
        """Begin to renew. Starting it twice changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)
            self._thread.start()
            is_one_of_many = len(self._order.nodes) > 1 and self._order.max_restarts > 0
            can_sleep = self._order.probe is not None and self._order.probe.can_sleep
            if is_one_of_many or can_sleep:
                threading.Thread(target=self._listen, name="news", daemon=True).start()

    def tell(self, phase: Phase, started_at: float | None = None, outcome: NodeOutcome | None = None) -> None:
        """Say where the share is now, at once."""
        with self._changed:
            self._phase = phase
            self._started_at = started_at if started_at is not None else self._started_at
            self._outcome = outcome
            self._is_due = True
            self._changed.notify()

    def tell_generation(
        self, generation: Generation | None = None, failure: NodeOutcome | None = None
    ) -> None:
        """Say which group of ranks runs here now, or how it failed, at once."""
        with self._changed:
            self._generation = generation or self._generation
            self._failure = failure
            self._is_due = True
            self._changed.notify()

    def tell_recovery(self, recovery: Recovery) -> None:
        """Say how the newest group began here, with the next message."""
        with self._changed:
            self._recovery = recovery
            self._is_due = True
            self._changed.notify()

    def tell_signs(self, signs: Signs) -> None:
        """Say what the newest group shows of itself with every message. At once where it follows another:
        then a drill may wait for it.
        """
        if signs == self._signs:
            return
        with self._changed:
            self._signs = signs
            if signs.generation > 0 or self._order.epoch > 1:
                self._is_due = True
                self._changed.notify()

    def tell_serving(self, serving: Serving) -> None:
        """Say whether the replica can be given requests, at once."""
        with self._changed:
            self._serving = serving
            self._is_due = True
            self._changed.notify()

    def tell_drilled(self, drilled: Drilled, wait_s: float = 0.0) -> None:
        """Say what was done for a drill, at once. Returns when it was heard, or after so long."""
        with self._changed:
            self._drilled = drilled
            self._is_drill_heard.clear()
            self._is_due = True
            self._changed.notify()
        self._is_drill_heard.wait(wait_s)

    def cut_off(self, for_s: float) -> None:
        """Say and hear nothing for so long, as if the network were away."""
        self._cut_until = self._clock.monotonic() + for_s

    def finish(self, outcome: NodeOutcome) -> None:
        """Report the end; returns when it was heard or after `FINAL_S`. The file is what counts."""
        self.tell(Phase.ENDED, outcome=outcome)
        self.start()
        if self._thread is not None:
            self._thread.join(FINAL_S)

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        if self._saves is not None:
            self._survive(self._saves.start)
        while True:
            if self._survive(self._renew):
                backoff_s, wait_s = FIRST_BACKOFF_S, self._order.renew_s
            else:
                wait_s, backoff_s = backoff_s, min(backoff_s * 2, self._order.renew_s)
            if self._is_end_told:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_due, timeout=wait_s)

    def _survive(self, do: Callable[[], T]) -> T | None:
        """Do it. Whatever goes wrong there is a silence, and told once: a thread that ended would be one for
        ever, and the fence would end healthy ranks.
        """
        try:
            return do()
        except Exception as error:  # noqa: BLE001 - see above
            told = f"{type(error).__name__}: {error}"
            if told != self._trouble:
                self._trouble = told
                sys.excepthook(*sys.exc_info())
            return None

    def _renew(self) -> bool:
        """Say where the share is. False: nobody answered."""
        self._is_due = False  # not again at once, should it fail before anything is said
        renewal = self._next()
        asked_at = self._clock.monotonic()
        answer = self._ask(renewal)
        if answer is None:
            self._meter.put_back(renewal.metrics)
            self._addresses.turn()
            return False
        self._addresses.learn(answer.control_urls)
        self._take(answer, asked_at)
        if renewal.drilled is self._drilled:
            self._is_drill_heard.set()
        if renewal.failure is not None:
            self.answered_failure = renewal.failure  # by now another one may be told of
            self._wake()
        self._is_end_told = renewal.outcome is not None
        return True

    def _next(self) -> Renewal:
        """What to say now. Metrics are taken without the lock: the main thread must not wait for them."""
        while True:
            with self._changed:
                is_asking, is_last = self._is_asking(), self._outcome is not None
            metrics = () if is_asking else self._meter.take(is_last=is_last)
            with self._changed:
                if (is_asking, is_last) == (self._is_asking(), self._outcome is not None):
                    self._is_due = False
                    return self._message(metrics=metrics)
            self._meter.put_back(metrics)

    def _is_asking(self) -> bool:
        """Whether ranks wait for the answer: then the question carries nothing that takes time to keep."""
        return self._failure is not None and len(self._order.nodes) > 1 and self._outcome is None

    def _listen(self) -> None:
        """Hear at once when another node's ranks failed, or that a server should wake up: ask, and have the
        answer wait for news.
        """
        pause = threading.Event()
        while self._outcome is None:
            pause_s = self._survive(self._hear_news)
            pause.wait(LISTEN_AGAIN_S if pause_s is None else pause_s)

    def _hear_news(self) -> float | None:
        """Ask once; how long to wait before the next time, None: nobody answered."""
        with self._changed:
            question = self._message(wait_s=self._order.renew_s)
        asked_at = self._clock.monotonic()
        answer = self._ask(question)
        if answer is None or self._outcome is not None:
            return None
        self._take(answer, asked_at)
        # Until what we heard is what we say: to fall asleep takes longer.
        is_changing = answer.should_sleep is not None and not self._sleeps_as(answer.should_sleep)
        return LISTEN_AGAIN_S if is_changing else LISTEN_PAUSE_S

    def _sleeps_as(self, should_sleep: bool) -> bool:  # noqa: FBT001 - as it was heard
        return self._serving is not None and self._serving.is_asleep == should_sleep

    def _ask(self, renewal: Renewal) -> RenewalAnswer | None:
        if self._clock.monotonic() < self._cut_until:
            return None
        connections = importlib.import_module("shoal.runtime.http")  # 25 ms the ranks need not wait for
        url = f"{self._addresses.url}/v1/supervisor/renew"
        answer: RenewalAnswer | None = connections.ask(
            url, self._credentials, renewal, TIMEOUT_S, self._addresses.ca_file
        )
        # An answer that was on its way when the network went is lost with it.
        return None if self._clock.monotonic() < self._cut_until else answer

    def _message(self, wait_s: float = 0.0, metrics: tuple[Samples, ...] = ()) -> Renewal:
        return Renewal(
            attempt_id=self._order.attempt_id,
            epoch=self._order.epoch,
            node=self._order.node,
            incarnation=self._order.incarnation,
            phase=self._phase,
            started_at=self._started_at,
            outcome=self._outcome,
            saved_s=None if self._saves is None else self._saves.age_s,
            generation=self._generation.number,
            master_port=self._generation.master_port or None,
            failure=self._failure,
            recovery=self._recovery,
            metrics=metrics,
            progress=self.progress,
            signs=self._signs,
            world=self.world,
            drilled=self._drilled,
            serving=self._serving if wait_s == 0 else None,  # one thread tells: what is newer stays so
            wait_s=wait_s,
        )

    def _take(self, answer: RenewalAnswer, asked_at: float) -> None:
        """Note the control plane's answer.

        The lease counts from when we asked: the control plane counts from when it heard, which is later.
        """
        if answer.is_stale:
            self.stale_because = answer.because
            self._wake()
            return
        # Once the fence has passed the share ends, whatever it hears yet: another may have its place.
        if self._clock.monotonic() - self.answered_at < self._order.fence_s:
            self.answered_at = max(self.answered_at, asked_at)
        if answer.should_stop:
            self.order_to_stop = answer
            self._wake()
        if answer.should_sleep is not None and self.on_sleep is not None:
            self.on_sleep(answer.should_sleep)
            self._wake()
        # Before the group: whoever hears that another one begins has heard of the drill.
        known, self.drill = self.drill, answer.drill
        if answer.drill not in (None, known):
            self._wake()
        with self._changed:
            is_news = (answer.generation, answer.master_port) != (
                self.group.generation,
                self.group.master_port,
            )
            if is_news and answer.generation >= self.group.generation:
                self.group = answer
                self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_fd, b"r")
