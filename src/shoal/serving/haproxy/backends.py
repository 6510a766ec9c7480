"""One service as a backend of HAProxy's configuration, and its replicas as server lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from shoal.porch import SCHEME
from shoal.serving.haproxy import porches
from shoal.serving.haproxy.answers import refusal
from shoal.serving.haproxy.words import server_name
from shoal.serving.problem import Refused, switched_off
from shoal.serving.table import Limits, Replica, Service
from shoal.wire import Papers

FULL_WEIGHT = 100
"""Of a replica of weight 1: a tenth of it must be a whole number above 0."""
MAX_WEIGHT = 256
CHECKED = "inter 2s fastinter 1s downinter 1s fall 2 rise 1"
OBSERVED = "observe layer4 error-limit 1 on-error mark-down"
"""One connection refused takes a replica out; a check every second brings it back."""
MAX_MS = 2**31 - 1
"""HAProxy's longest time: 24 days."""
IDLE_S = 2
"""Many servers close connections idle for five seconds; a request must not meet that."""
BODY_S = 20
HELD_BYTES = 32768
OURS = r"^\s*bearer\s+sh[a-z]_"
"""A token of Shoal's, good or not: no program is to see one."""
SAFE = "{ method GET HEAD OPTIONS } || { req.hdr(idempotency-key) -m found }"


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server line. `add server` inherits nothing from `default-server`, so every option is here."""

    name: str
    replica: Replica
    address: str
    options: str
    weight: int
    """0: it drains."""

    @property
    def line(self) -> str:
        return f"{self.name} {self.address} {self.options} weight {self.weight}"


def backend_name(service: Service) -> str:
    return f"{service.project}:{service.name}"


def servers(service: Service, papers: Papers | None = None) -> tuple[Server, ...]:
    weights = _weights(service)
    options = f"check {CHECKED} {OBSERVED} pool-purge-delay {IDLE_S}s maxconn {service.cap}"
    return tuple(
        Server(
            name=server_name(replica),
            replica=replica,
            address=replica.address.removeprefix(SCHEME),
            options=porches.options(replica, papers) + options,
            weight=0 if replica.is_draining else weights.get(replica.replica_id, 0),
        )
        for replica in service.replicas
    )


def _weights(service: Service) -> dict[str, int]:
    """Of each replica by its own weight; while releases have shares, by those."""
    if len(service.shares) > 1:
        return _by_share(service)
    wanted = {replica.replica_id: replica.weight for replica in service.replicas}
    scale = min(FULL_WEIGHT, MAX_WEIGHT / max(wanted.values(), default=1.0))
    return {name: max(1, round(weight * scale)) for name, weight in wanted.items()}


def _by_share(service: Service) -> dict[str, int]:
    """Weights that divide requests as told, as nearly as whole numbers can: 0.9 and 0.1 are 225 and 25."""
    totals: dict[int, float] = {}
    for replica in service.replicas:
        if not replica.is_draining:
            totals[replica.release] = totals.get(replica.release, 0.0) + replica.weight
    wanted = {
        replica.replica_id: service.shares.get(replica.release, 0.0)
        * replica.weight
        / totals[replica.release]
        for replica in service.replicas
        if not replica.is_draining
    }
    largest = max(wanted.values(), default=0.0)
    if largest <= 0:
        return {replica.replica_id: FULL_WEIGHT for replica in service.replicas}

    def error(top: int) -> float:
        return sum(abs(round(w * top / largest) - w * top / largest) for w in wanted.values()) / top

    top = min(range(MAX_WEIGHT, FULL_WEIGHT, -1), key=error)
    return {name: max(1, round(w * top / largest)) if w > 0 else 0 for name, w in wanted.items()}


def backend(service: Service) -> Iterator[str]:
    """Its lines without servers: a change of any of them needs a reload."""
    yield f"backend {backend_name(service)}"
    yield f"    balance {_algorithm(service)}"
    if service.affinity:
        yield "    hash-type consistent"
    yield from _retries(service)
    yield f"    timeout queue {in_ms(service.queue_s)}"
    yield f"    timeout server {in_ms(service.timeout_s)}"
    yield f"    timeout tunnel {in_ms(service.timeout_s)}"
    if not service.replicas or any(replica.secret for replica in service.replicas):
        yield "    http-send-name-header x-shoal-secret"
    if service.check:
        yield "    option httpchk"
        headers = "hdr host shoal hdr x-shoal-secret %[srv_name]"
        yield f"    http-check send meth GET uri {service.check} ver HTTP/1.1 {headers}"
        yield "    http-check expect status 100-499"
    yield from _caller(service)
    yield from _limits(service.limits)
    if service.is_off:
        off = switched_off(service.project, service.name, is_public=service.is_public)
        yield refusal(off, "{ nbsrv eq 0 }")
    full = Refused(503, "service.busy", "too many requests wait for this service", retry_s=2.0)
    yield refusal(full, f"{{ queue ge {service.queue_count} }}")
    waits = f"http-request wait-for-body time {BODY_S}s at-least {HELD_BYTES}"
    yield f"    {waits} if {{ req.hdr(content-length) -m found }}"


def _algorithm(service: Service) -> str:
    kind, _, name = service.affinity.partition(":")
    if kind:
        return f"hash {'req.hdr' if kind == 'header' else 'req.cook'}({name})"
    # Of fewest connections the heavier ones get all while nothing is under way: shares are by turns.
    return "roundrobin" if len(service.shares) > 1 else "leastconn"


def _retries(service: Service) -> Iterator[str]:
    """Anything that reached nobody goes to another; what did only if it is safe and may be repeated."""
    yield "    option redispatch 1"
    if service.retries:
        yield f"    retries {service.retries}"
        yield "    retry-on conn-failure empty-response"
        if not service.is_repeatable:
            yield f"    http-request disable-l7-retry unless {SAFE}"
    else:
        yield "    retry-on conn-failure"


def _caller(service: Service) -> Iterator[str]:
    if service.is_public:
        yield f"    http-request del-header authorization if {{ req.fhdr(authorization) -m reg -i '{OURS}' }}"
        yield "    http-request set-var(txn.account) src"
        return
    yield "    http-request del-header authorization"
    yield "    http-request set-header x-shoal-caller %[var(txn.caller)]"
    account = f"str({service.project})" if service.limits.per == "project" else "var(txn.caller)"
    yield f"    http-request set-var(txn.account) {account}"


def _limits(limits: Limits) -> Iterator[str]:
    if not limits.rps and not limits.concurrency:
        return
    count = max(1, math.floor(limits.rps or 1))
    window_s = count / limits.rps if limits.rps else 1.0
    expire = in_ms(max(10.0, 2 * window_s))
    yield (
        f"    stick-table type string len 128 size 100k expire {expire} "
        f"store conn_cur,gpc0,gpc0_rate({in_ms(window_s)})"
    )
    yield "    http-request track-sc1 var(txn.account)"
    if limits.concurrency:
        told = f"at most {limits.concurrency} requests at once are taken"
        refused = Refused(429, "limit.concurrency", told, retry_s=1.0)
        yield refusal(refused, f"{{ sc_conn_cur(1) gt {limits.concurrency} }}")
    if limits.rps:
        refused = Refused(429, "limit.rps", f"more than {limits.rps:g} requests a second", retry_s=window_s)
        yield refusal(refused, f"{{ sc_gpc0_rate(1) ge {count} }}")
        yield "    http-request sc-inc-gpc0(1)"


def in_ms(seconds: float) -> str:
    return f"{min(MAX_MS, max(1, round(seconds * 1000)))}ms"
