"""One service as it runs here: its replicas, its callers, what waits, what became of requests.

Outlives tables: a newer one changes what it is told by, not what is under way.
"""

from __future__ import annotations

import random
from typing import Protocol, cast

from shoal.serving.accounts import MAX_STRANGERS, Account, FairQueue, Waiter
from shoal.serving.balancer import ANY, Ask, Balancer, Shares, balancer_for
from shoal.serving.problem import Refused, switched_off
from shoal.serving.replica import LiveReplica, Tally
from shoal.serving.table import Service

RETRY_SHARE = 0.2
"""Of requests may be sent again; beyond that a failing service is not helped by more of them."""
MIN_RETRIES_SAVED = 100.0
"""And so many at once, beside all that fits into the replicas: a lost node may have had any part of it."""


class Request(Waiter, Protocol):
    """What a service does to requests that wait for it."""

    ask: Ask

    def bind(self, replica: LiveReplica) -> None: ...

    def refuse(self, refused: Refused) -> None: ...


class LiveService:
    """`share` is this process's part of bursts and caps, where several serve one port."""

    def __init__(self, spec: Service, *, share: float = 1.0, zone: str = "", now: float = 0.0) -> None:
        self._share = share
        self._zone = zone
        self.replicas: dict[str, LiveReplica] = {}
        self.open: list[LiveReplica] = []
        """Those that get requests."""
        self.accounts: dict[str, Account] = {}
        self.tallies: dict[int, Tally] = {0: Tally(0)}
        self.waiting = FairQueue()
        self._retries = float("inf")
        self.repeated = 0
        """Requests sent to a second replica, whyever."""
        self.is_gone = False
        self.spec = spec
        self.balancer: Balancer = balancer_for(spec.balance)
        self.shares = _shares(spec)
        self.told(spec, now)

    def told(self, spec: Service, now: float) -> None:
        """A newer table. Requests under way go on, also in replicas that it does not name any more."""
        before, self.spec = self.spec, spec
        if spec.balance is not before.balance:
            self.balancer = balancer_for(spec.balance)
        if spec.shares != before.shares:
            self.shares = _shares(spec)
        self.timeout_s = spec.timeout_s
        limits = spec.limits
        self.rps, self.concurrency = limits.rps, limits.concurrency
        self.burst = max(1.0, (limits.rps or 0.0) * self._share)
        gone, self.replicas = self.replicas, {}
        cap, share, zone = spec.cap, self._share, self._zone
        self._most_retries = MIN_RETRIES_SAVED + cap * len(spec.replicas)
        self._retries = min(self._most_retries, self._retries)
        for replica in random.sample(spec.replicas, len(spec.replicas)):
            tally = self.tallies.setdefault(replica.release, Tally(replica.release))
            live = gone.pop(replica.replica_id, None)
            if live is None or (live.spec.address, live.spec.name) != (replica.address, replica.name):
                if live is not None:
                    live.close_idle()
                live = LiveReplica(replica, tally, cap=cap, share=share, zone=zone, is_public=spec.is_public)
            else:
                live.told(replica, tally, cap=cap, share=share, zone=zone, is_public=spec.is_public)
            self.replicas[replica.replica_id] = live
        for live in gone.values():
            live.is_draining = True
            live.close_idle()
        self.refresh(now)
        if self._is_off:
            for waiter in self.waiting.drain():
                cast("Request", waiter).refuse(self._off())

    @property
    def _is_off(self) -> bool:
        """Whether nobody serves it and nobody will; one that is still there serves as before."""
        return not self.open and self.spec.is_off

    def _off(self) -> Refused:
        return switched_off(self.spec.project, self.spec.name, is_public=self.spec.is_public)

    def end(self) -> None:
        """No table names it any more."""
        self.is_gone = True
        for waiter in self.waiting.drain():
            gone = Refused(503, "service.gone", "the service was removed while the request waited")
            cast("Request", waiter).refuse(gone)
        for replica in self.replicas.values():
            replica.is_draining = True
            replica.close_idle()
        self.open = []

    def refresh(self, now: float) -> None:
        """Who gets requests, anew; then those that wait.

        If more than half were left alone for what they answer, more likely the requests are at fault:
        then all are used. Where nobody listens nothing is ever sent.
        """
        able = [live for live in self.replicas.values() if not live.is_draining and not live.is_refusing]
        trusted = [live for live in able if live.ejected_until <= now]
        self.open = trusted if len(trusted) * 2 >= len(able) else able
        self.pump()

    def account(self, name: str) -> Account:
        """Of that caller; strangers beyond `MAX_STRANGERS` share one."""
        found = self.accounts.get(name)
        if found is None:
            if len(self.accounts) >= MAX_STRANGERS:
                name = ""
            found = self.accounts.setdefault(name, Account(name))
        return found

    def admit(self, account: Account, now: float) -> Refused | None:
        """Counts the request as the caller's own until it is over, or says why not."""
        if self.rps and (refused := account.draw(self.rps, self.burst, now)) is not None:
            return refused
        if self.concurrency and account.admitted + account.elsewhere >= self.concurrency:
            return account.too_many(self.concurrency)
        if self._is_off:
            return self._off()  # before a body is read for nobody
        account.admitted += 1
        if self._retries < self._most_retries:
            self._retries = min(self._most_retries, self._retries + RETRY_SHARE)
        return None

    def may_retry(self) -> bool:
        """Takes one retry out of the budget."""
        if self._retries < 1.0:
            return False
        self._retries -= 1.0
        self.repeated += 1
        return True

    def pick(self, ask: Ask = ANY, avoid: LiveReplica | None = None) -> LiveReplica | None:
        replicas = self.open
        if avoid is not None:
            replicas = [live for live in replicas if live is not avoid] or replicas
        if self.shares is None:
            return self.balancer.pick(replicas, ask)
        for release in self.shares.order(ask.affinity):
            found = self.balancer.pick([live for live in replicas if live.spec.release == release], ask)
            if found is not None:
                self.shares.taken(release)
                return found
        return None

    def wait(self, request: Request) -> None:
        """Until a slot is free. Refused at once if there will be none, or the queue is full and others do not
        take more of it.
        """
        spec = self.spec
        if self._is_off:
            request.refuse(self._off())
            return
        dropped = self.waiting.push(request, max_count=spec.queue_count, max_bytes=spec.queue_bytes)
        full = Refused(503, "service.busy", "too many requests wait for this service", retry_s=2.0)
        if dropped is None:
            request.refuse(full)
            return
        for waiter in dropped:
            cast("Request", waiter).refuse(full)

    def pump(self) -> None:
        """Slots may be free: bind who waits, fairly."""
        waiting = self.waiting
        while waiting.count:
            request = cast("Request", waiting.first())
            replica = self.pick(request.ask)
            if replica is None:
                return
            waiting.take(request)
            request.bind(replica)

    def sweep(self, now: float) -> None:
        """Forget strangers who have been away, give replicas another chance."""
        if self.spec.is_public and len(self.accounts) > 1000:
            self.accounts = {
                name: account
                for name, account in self.accounts.items()
                if account.admitted or now - account.filled_at < 60.0
            }
        self.refresh(now)


def _shares(spec: Service) -> Shares | None:
    return Shares(spec.shares) if len(spec.shares) > 1 else None
