"""One service as a backend of HAProxy's configuration: its replies, its server lines and its TLS files. Pure.

All texts are the data plane's own. Replicas on other machines are reached over TLS through their sidecars.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import msgspec

from shoal.serving.haproxy.validation import server_name
from shoal.serving.proxy.local_reply import ProxyRefusal, problem_document, service_off
from shoal.serving.table import CallerLimits, ReplicaConfig, ServiceConfig
from shoal.sidecar_tls import SCHEME
from shoal.wire import TlsIdentity

_KIND = "application/problem+json"
HAPROXY_ERRORS = (
    ProxyRefusal(400, "request.malformed", "the request is not HTTP/1.1 that has one meaning"),
    ProxyRefusal(408, "request.slow", "the request comes too slowly"),
    ProxyRefusal(500, "plane.failed", "the data plane failed"),
    ProxyRefusal(
        502,
        "replica.lost",
        "the replica gave no answer; a request that changes something may have had an effect",
    ),
    ProxyRefusal(503, "service.busy", "no replica could take the request", retry_s=5.0),
    ProxyRefusal(504, "replica.late", "the replica did not answer in time"),
)
"""What HAProxy answers where no other rule applies."""


def error_lines() -> Iterator[str]:
    for refused in HAPROXY_ERRORS:
        yield f"    http-error status {refused.status} {_reply_arguments(refused)}"


def refusal_line(refused: ProxyRefusal, condition: str) -> str:
    return f"    http-request return status {refused.status} {_reply_arguments(refused)} if {condition}"


def _reply_arguments(refused: ProxyRefusal) -> str:
    body = problem_document(refused).decode()
    assert "'" not in body
    headers = ["hdr cache-control no-store"]
    if refused.status == 401:
        headers.append("hdr www-authenticate 'Bearer realm=\"shoal\"'")
    if refused.retry_s is not None:
        headers.append(f"hdr retry-after {max(1, round(refused.retry_s))}")
    return f"content-type {_KIND} string '{body}' {' '.join(headers)}"


def tls_files(tls_identity: TlsIdentity | None) -> dict[str, str]:
    """Return the TLS files by name. A name depends on the content, because HAProxy reads files when it
    starts.
    """
    if tls_identity is None:
        return {}
    shown, trusted = tls_file_names(tls_identity)
    return {shown: tls_identity.certificate + tls_identity.key, trusted: tls_identity.authority}


def tls_file_names(tls_identity: TlsIdentity) -> tuple[str, str]:
    """Return the names of the file with the certificate and key, and of the file with the authority."""
    digest = hashlib.sha256(f"{tls_identity.certificate}{tls_identity.authority}".encode()).hexdigest()[:16]
    return f"papers-{digest}.pem", f"papers-{digest}.ca"


def sidecar_options(replica: ReplicaConfig, tls_identity: TlsIdentity | None) -> str:
    """Return TLS options for a server line. A sidecar refuses callers without TLS identity, so HAProxy must
    not try.
    """
    if not replica.address.startswith(SCHEME):
        return ""
    if tls_identity is None:
        return "disabled ssl verify required "
    shown, trusted = tls_file_names(tls_identity)
    options = f"ssl verify required verifyhost {replica.name} ca-file {trusted} crt {shown}"
    return f"{options} ssl-min-ver TLSv1.3 "


FULL_WEIGHT = 100
"""Weight of a replica of weight 1. A tenth of it must be a whole number above 0."""
MAX_WEIGHT = 256
CHECKED = "inter 2s fastinter 1s downinter 1s fall 2 rise 1"
OBSERVED = "observe layer4 error-limit 1 on-error mark-down"
"""One refused connection takes a replica out; a check every second brings it back."""
MAX_MS = 2**31 - 1
"""HAProxy's longest time: 24 days."""
IDLE_S = 2
"""Many servers close a connection that is idle for 5 s. A request must not be sent on such a connection."""
BODY_S = 20
HELD_BYTES = 32768
BEARER_PATTERN = r"^\s*bearer\s+sh[a-z]_"
"""A Shoal token, valid or not. No program may see one."""
SAFE = "{ method GET HEAD OPTIONS } || { req.hdr(idempotency-key) -m found }"


class ServerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A server line. `add server` inherits nothing from `default-server`, so every option is here."""

    name: str
    replica: ReplicaConfig
    address: str
    options: str
    weight: int
    """0: it drains."""

    @property
    def line(self) -> str:
        return f"{self.name} {self.address} {self.options} weight {self.weight}"


def backend_name(service: ServiceConfig) -> str:
    return f"{service.project}:{service.name}"


def server_lines(service: ServiceConfig, tls_identity: TlsIdentity | None = None) -> tuple[ServerLine, ...]:
    weights = _weights(service)
    options = f"check {CHECKED} {OBSERVED} pool-purge-delay {IDLE_S}s maxconn {service.cap}"
    return tuple(
        ServerLine(
            name=server_name(replica),
            replica=replica,
            address=replica.address.removeprefix(SCHEME),
            options=sidecar_options(replica, tls_identity) + options,
            weight=0 if replica.is_draining else weights.get(replica.replica_id, 0),
        )
        for replica in service.replicas
    )


def _weights(service: ServiceConfig) -> dict[str, int]:
    """Return weights by each replica's own weight, or by the releases' shares while there are any."""
    if len(service.shares) > 1:
        return _by_share(service)
    wanted = {replica.replica_id: replica.weight for replica in service.replicas}
    scale = min(FULL_WEIGHT, MAX_WEIGHT / max(wanted.values(), default=1.0))
    return {name: max(1, round(weight * scale)) for name, weight in wanted.items()}


def _by_share(service: ServiceConfig) -> dict[str, int]:
    """Divide requests by shares, as nearly as whole numbers can: 0.9 and 0.1 become 225 and 25."""
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


def backend(service: ServiceConfig) -> Iterator[str]:
    """Yield the backend's lines without servers. A change of any of them needs a reload."""
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
        off = service_off(service.project, service.name, is_public=service.is_public)
        yield refusal_line(off, "{ nbsrv eq 0 }")
    full = ProxyRefusal(503, "service.busy", "too many requests wait for this service", retry_s=2.0)
    yield refusal_line(full, f"{{ queue ge {service.queue_count} }}")
    waits = f"http-request wait-for-body time {BODY_S}s at-least {HELD_BYTES}"
    yield f"    {waits} if {{ req.hdr(content-length) -m found }}"


def _algorithm(service: ServiceConfig) -> str:
    kind, _, name = service.affinity.partition(":")
    if kind:
        return f"hash {'req.hdr' if kind == 'header' else 'req.cook'}({name})"
    # With `leastconn`, heavier servers get everything while nothing is under way; shares need `roundrobin`.
    return "roundrobin" if len(service.shares) > 1 else "leastconn"


def _retries(service: ServiceConfig) -> Iterator[str]:
    """Retry any request that never reached a server; one that did, only if it is safe to repeat."""
    yield "    option redispatch 1"
    if service.retries:
        yield f"    retries {service.retries}"
        yield "    retry-on conn-failure empty-response"
        if not service.is_repeatable:
            yield f"    http-request disable-l7-retry unless {SAFE}"
    else:
        yield "    retry-on conn-failure"


def _caller(service: ServiceConfig) -> Iterator[str]:
    if service.is_public:
        yield (
            "    http-request del-header authorization if "
            f"{{ req.fhdr(authorization) -m reg -i '{BEARER_PATTERN}' }}"
        )
        yield "    http-request set-var(txn.account) src"
        return
    yield "    http-request del-header authorization"
    yield "    http-request set-header x-shoal-caller %[var(txn.caller)]"
    account = f"str({service.project})" if service.limits.per == "project" else "var(txn.caller)"
    yield f"    http-request set-var(txn.account) {account}"


def _limits(limits: CallerLimits) -> Iterator[str]:
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
        detail = f"at most {limits.concurrency} requests at once are taken"
        refused = ProxyRefusal(429, "limit.concurrency", detail, retry_s=1.0)
        yield refusal_line(refused, f"{{ sc_conn_cur(1) gt {limits.concurrency} }}")
    if limits.rps:
        refused = ProxyRefusal(
            429, "limit.rps", f"more than {limits.rps:g} requests a second", retry_s=window_s
        )
        yield refusal_line(refused, f"{{ sc_gpc0_rate(1) ge {count} }}")
        yield "    http-request sc-inc-gpc0(1)"


def in_ms(seconds: float) -> str:
    return f"{min(MAX_MS, max(1, round(seconds * 1000)))}ms"
