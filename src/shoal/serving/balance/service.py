"""One service in this process: its replicas, its callers, its waiting requests and its counters.

It outlives tables: a newer table changes its settings, not the requests under way.
"""

from __future__ import annotations

import random
from typing import Protocol, cast

from shoal.serving.admission.accounts import MAX_STRANGERS, CallerAccount, FairQueue, Waiter
from shoal.serving.balance.balancer import NO_HINTS, Balancer, RoutingHints, TrafficSplit, balancer_for
from shoal.serving.balance.replica import LiveReplica, ReleaseTally
from shoal.serving.proxy.local_reply import ProxyRefusal, service_off
from shoal.serving.table import ServiceConfig

RETRY_SHARE = 0.2
"""The part of requests that may be retried. More retries do not help a failing service."""
MIN_RETRIES_SAVED = 100.0
"""Retries allowed at once besides all that fit into the replicas: a lost node may have had any part of
them."""


class WaitingRequest(Waiter, Protocol):
    """What a service calls on a request that waits for it."""

    hints: RoutingHints

    def bind(self, replica: LiveReplica) -> None: ...

    def refuse(self, refused: ProxyRefusal) -> None: ...


class LiveService:
    """`share` is this process's part of bursts and caps where several serve one port."""

    def __init__(self, spec: ServiceConfig, *, share: float = 1.0, zone: str = "", now: float = 0.0) -> None:
        self._share = share
        self._zone = zone
        self.replicas: dict[str, LiveReplica] = {}
        self.open: list[LiveReplica] = []
        """Replicas that get requests."""
        self.accounts: dict[str, CallerAccount] = {}
        self.tallies: dict[int, ReleaseTally] = {0: ReleaseTally(0)}
        self.waiting = FairQueue()
        self._retries = float("inf")
        self.repeated = 0
        """Requests sent to a second replica, for any reason."""
        self.is_gone = False
        self.spec = spec
        self.balancer: Balancer = balancer_for(spec.balance)
        self.shares = _shares(spec)
        self.update(spec, now)

    def update(self, spec: ServiceConfig, now: float) -> None:
        """Take a newer table. Requests under way go on, also in replicas that it no longer names."""
        before, self.spec = self.spec, spec
        if spec.balance is not before.balance:
            self.balancer = balancer_for(spec.balance)
        if spec.shares != before.shares:
            self.shares = _shares(spec)
        self.timeout_s = spec.timeout_s
        limits = spec.limits
        self.rps, self.concurrency = limits.rps, limits.concurrency
        self.burst = max(1.0, (limits.rps or 0.0) * self._share)
        previous, self.replicas = self.replicas, {}
        cap, share, zone = spec.cap, self._share, self._zone
        self._most_retries = MIN_RETRIES_SAVED + cap * len(spec.replicas)
        self._retries = min(self._most_retries, self._retries)
        for replica in random.sample(spec.replicas, len(spec.replicas)):
            tally = self.tallies.setdefault(replica.release, ReleaseTally(replica.release))
            live = previous.pop(replica.replica_id, None)
            if live is None or (live.spec.address, live.spec.name) != (replica.address, replica.name):
                if live is not None:
                    live.close_idle()
                live = LiveReplica(replica, tally, cap=cap, share=share, zone=zone, is_public=spec.is_public)
            else:
                live.update(replica, tally, cap=cap, share=share, zone=zone, is_public=spec.is_public)
            self.replicas[replica.replica_id] = live
        for live in previous.values():
            live.is_draining = True
            live.close_idle()
        self.refresh(now)
        if self._is_off:
            for waiter in self.waiting.drain():
                cast("WaitingRequest", waiter).refuse(self._off_refusal())

    @property
    def _is_off(self) -> bool:
        """Whether it is off and has no replica left. A replica that is still there serves as before."""
        return not self.open and self.spec.is_off

    def _off_refusal(self) -> ProxyRefusal:
        return service_off(self.spec.project, self.spec.name, is_public=self.spec.is_public)

    def end(self) -> None:
        """Refuse waiting requests and drain all replicas, because no table names this service any more."""
        self.is_gone = True
        for waiter in self.waiting.drain():
            gone = ProxyRefusal(503, "service.gone", "the service was removed while the request waited")
            cast("WaitingRequest", waiter).refuse(gone)
        for replica in self.replicas.values():
            replica.is_draining = True
            replica.close_idle()
        self.open = []

    def refresh(self, now: float) -> None:
        """Choose again which replicas get requests, then bind waiting requests.

        If more than half of them are ejected for their replies, the requests are more likely at fault, so all
        are used. A replica that refuses connections is never used.
        """
        able = [live for live in self.replicas.values() if not live.is_draining and not live.is_refusing]
        trusted = [live for live in able if live.ejected_until <= now]
        self.open = trusted if len(trusted) * 2 >= len(able) else able
        self.pump()

    def count_failure(self, replica: LiveReplica, now: float, *, is_refused: bool = False) -> None:
        """Count a failure of the replica, and use others if it is ejected for it."""
        if replica.fail(now, is_refused=is_refused):
            self.refresh(now)

    def account(self, name: str) -> CallerAccount:
        """Return the caller's account. Callers of public services beyond `MAX_STRANGERS` share one."""
        account = self.accounts.get(name)
        if account is None:
            if len(self.accounts) >= MAX_STRANGERS:
                name = ""
            account = self.accounts.setdefault(name, CallerAccount(name))
        return account

    def admit(self, account: CallerAccount, now: float) -> ProxyRefusal | None:
        """Count the request for its caller until it is over, or return why it is refused."""
        if self.rps and (refused := account.draw(self.rps, self.burst, now)) is not None:
            return refused
        if self.concurrency and account.admitted + account.elsewhere >= self.concurrency:
            return account.too_many(self.concurrency)
        if self._is_off:
            return self._off_refusal()  # before reading a body that no replica would get
        account.admitted += 1
        if self._retries < self._most_retries:
            self._retries = min(self._most_retries, self._retries + RETRY_SHARE)
        return None

    def may_retry(self) -> bool:
        """Take one retry out of the budget, if one is left."""
        if self._retries < 1.0:
            return False
        self._retries -= 1.0
        self.repeated += 1
        return True

    def pick(self, hints: RoutingHints = NO_HINTS, avoid: LiveReplica | None = None) -> LiveReplica | None:
        replicas = self.open
        if avoid is not None:
            replicas = [live for live in replicas if live is not avoid] or replicas
        if self.shares is None:
            return self.balancer.pick(replicas, hints)
        for release in self.shares.order(hints.affinity):
            replica = self.balancer.pick([live for live in replicas if live.spec.release == release], hints)
            if replica is not None:
                self.shares.record(release)
                return replica
        return None

    def wait(self, request: WaitingRequest) -> None:
        """Queue the request until a slot is free. Refuse it at once if no replica will come, or if the queue
        is full and no other caller holds more of it.
        """
        spec = self.spec
        if self._is_off:
            request.refuse(self._off_refusal())
            return
        dropped = self.waiting.push(request, max_count=spec.queue_count, max_bytes=spec.queue_bytes)
        full = ProxyRefusal(503, "service.busy", "too many requests wait for this service", retry_s=2.0)
        if dropped is None:
            request.refuse(full)
            return
        for waiter in dropped:
            cast("WaitingRequest", waiter).refuse(full)

    def pump(self) -> None:
        """Bind waiting requests to free slots, in fair order."""
        waiting = self.waiting
        while waiting.count:
            request = cast("WaitingRequest", waiting.first())
            replica = self.pick(request.hints)
            if replica is None:
                return
            waiting.take(request)
            request.bind(replica)

    def sweep(self, now: float) -> None:
        """Drop accounts of callers idle for 60 s, and give ejected replicas another chance."""
        if self.spec.is_public and len(self.accounts) > 1000:
            self.accounts = {
                name: account
                for name, account in self.accounts.items()
                if account.admitted or now - account.filled_at < 60.0
            }
        self.refresh(now)


def _shares(spec: ServiceConfig) -> TrafficSplit | None:
    return TrafficSplit(spec.shares) if len(spec.shares) > 1 else None
