"""The messages between the control plane and data planes: tables one way, reports the other.

A table is complete: a data plane stops serving a service that the newest table does not name. A data plane
refuses a table whose `version` is older than the newest it has seen, so late replies do no harm. It takes a
table of another `epoch` whatever its version, because a restored store counts from the restored version.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal

import msgspec

from shoal.sidecar_tls import SCHEME
from shoal.wire import TlsIdentity


class Balance(StrEnum):
    LEAST = "least"
    """The replica with the fewest requests of this data plane in it."""
    TOKENS = "tokens"
    """For language models: the least estimated time to the first token, by the prefixes each replica has
    seen."""


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    replica_id: str
    address: str
    """`10.0.0.7:8000` or `unix:/path/of/socket`; `broker:/path/of/socket` where a socket broker hands out
    sockets of the replica's private network; `tls:10.0.0.7:19000` where a replica sidecar ends TLS."""
    name: str = ""
    """The name that the sidecar's certificate must show. A data plane refuses any other."""
    release: int
    weight: float = 1.0
    """For mixed devices: a replica of weight 2.0 gets twice as much work."""
    zone: str = ""
    secret: str = ""
    """Sent with every request as `x-shoal-secret`, and as a bearer token unless the service is public. A
    program that checks it answers only data planes."""
    is_draining: bool = False
    """Gets no new requests and finishes those it has."""


class CallerLimits(msgspec.Struct, frozen=True, kw_only=True):
    rps: float | None = None
    concurrency: int | None = None
    per: Literal["token", "project"] = "token"


class AllowedCaller(msgspec.Struct, frozen=True, kw_only=True):
    """A caller of a service, identified by the SHA-256 of its token. The table never holds the
    token itself.
    """

    digest: str
    name: str
    project: str
    expires_at: float | None = None
    """Seconds since 1970. From then on the token is unknown, even if no newer table says so."""


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    project: str
    name: str
    hosts: tuple[str, ...] = ()
    """Names in `Host` that select this service, besides the path `/{project}/{name}/`."""
    replicas: tuple[ReplicaConfig, ...] = ()
    shares: dict[int, float] = {}
    """The part of requests for each release while more than one is served: `{3: 0.95, 4: 0.05}`. Empty: no
    split."""
    balance: Balance = Balance.LEAST
    cap: int = 64
    """Most requests at once in one replica. Other requests wait in the data plane and are bound late."""
    queue_count: int = 1024
    queue_bytes: int = 64 << 20
    queue_s: float = 60.0
    """Limits of the wait for a slot: number of requests, bytes of their bodies, seconds."""
    start_s: float = 0.0
    """Seconds a request waits while no replica exists, if that is longer than `queue_s`."""
    is_failing: bool = False
    """Its replicas end one after the other without becoming useful: requests do not wait for one to start."""
    timeout_s: float = 600.0
    """From the request's last byte to the reply's first, and between any two pieces of the reply."""
    retries: int = 1
    """Retries of a request that is safe to repeat: it never began at the replica, or its method has no
    effect."""
    is_repeatable: bool = False
    """Every request may be repeated while no reply has begun. If False, only requests that are harmless by
    their method, their `idempotency-key` or the path of a completion may be."""
    hedge_s: float = 0.0
    """After this many seconds without a reply, a harmless request also goes to another replica. 0: never."""
    affinity: str = ""
    """A header or cookie whose value keeps a caller at one replica, such as `header:x-session`."""
    limits: CallerLimits = CallerLimits()
    check: str = ""
    """A path that answers below 500 while a replica is well; checked regularly. Empty: no active check."""
    closed: frozenset[str] = frozenset()
    """Paths that no caller may request, such as `sleep`, because they manage the replica's server itself."""
    is_off: bool = False
    """The service should have no replicas. A request that finds none is answered 503 and not held."""
    is_public: bool = False
    """Callers need no token."""
    origins: tuple[str, ...] = ()
    """Web pages of these origins may call it from a browser, such as `https://app.example.org`; `*`: all."""
    callers: tuple[AllowedCaller, ...] = ()


class ServingTable(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    epoch: str = ""
    """Made up by the control plane when it starts. Versions are compared within one epoch."""
    services: tuple[ServiceConfig, ...] = ()
    tls_identity: TlsIdentity | None = None
    """The certificate that data planes show to replica sidecars. None: there are no sidecars."""


ADDRESS = re.compile(r"(?:unix|broker):/.+|(?:tls:)?(?:[^\s:/]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
NUMBER = re.compile(r"[0-9]*|0x[0-9a-f]*")
LOOPBACK = ("localhost", "localdomain")
PLAIN = re.compile(r"[\x21-\x7e]*")
AFFINITY = re.compile(r"(?:(?:header|cookie):[!#$%&'*+\-.^_`|~0-9A-Za-z]+)?")


def is_address(text: str) -> bool:
    """Return whether `text` is a valid replica address."""
    match = ADDRESS.fullmatch(text)
    return match is not None and (match[1] is None or 0 < int(match[1]) < 1 << 16)


def usable(table: ServingTable) -> tuple[ServingTable, list[str]]:
    """Return the part of the table that a data plane can serve, and a sentence for each entry left out.

    One bad entry must not keep the rest of the table, such as a revoked token, from taking effect.
    """
    problems: list[str] = []
    result: dict[tuple[str, str], ServiceConfig] = {}
    for service in table.services:
        name = f"{service.project}/{service.name}"
        if (service.project, service.name) in result:
            problems.append(f"`{name}` is there twice")
        elif AFFINITY.fullmatch(service.affinity) is None:
            problems.append(f"`{name}`: affinity `{service.affinity}` is not header:NAME or cookie:NAME")
        else:
            replicas = _usable_replicas(service.replicas, name, problems)
            result[service.project, service.name] = msgspec.structs.replace(service, replicas=replicas)
    return (msgspec.structs.replace(table, services=tuple(result.values())) if problems else table), problems


def _usable_replicas(
    replicas: tuple[ReplicaConfig, ...], name: str, problems: list[str]
) -> tuple[ReplicaConfig, ...]:
    usable_replicas: dict[str, ReplicaConfig] = {}
    for replica in replicas:
        label = f"`{replica.replica_id}` of `{name}`"
        if replica.replica_id in usable_replicas:
            problems.append(f"{label} is there twice")
        elif not is_address(replica.address):
            schemes = "HOST:PORT, tls:HOST:PORT, unix:/PATH or broker:/PATH"
            problems.append(f"{label}: address `{replica.address}` is not {schemes}")
        elif bool(replica.name) != replica.address.startswith(SCHEME):
            problems.append(
                f"{label}: address `{replica.address}` with the name `{replica.name}` of a certificate"
            )
        elif PLAIN.fullmatch(replica.secret) is None:
            problems.append(f"{label}: its secret cannot stand in a header")
        elif not replica.weight > 0:
            problems.append(f"{label}: weight {replica.weight} is not above 0")
        else:
            usable_replicas[replica.replica_id] = replica
    return tuple(usable_replicas.values())


def is_shared_name(host: str) -> bool:
    """Return whether `host` is an address or a loopback name, which reaches the data plane for
    any service.
    """
    last = host.lower().rstrip(".").rpartition(".")[2]
    # A name whose last part is a number is read as an address, such as `127.1` and `0x7f000001`.
    return ":" in host or last in LOOPBACK or NUMBER.fullmatch(last) is not None


BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of a latency histogram. One more bucket counts what is above the last."""


class ReleaseCounters(msgspec.Struct, kw_only=True):
    """Counters of one release of one service since the data plane started; two fields are gauges."""

    project: str
    name: str
    release: int
    in_flight: int = 0
    queued: int = 0
    """Both are gauges. Waiting requests count for release 0, because they are bound late."""
    requests: int = 0
    errors: int = 0
    """Replies of 500 and above, and requests without a reply unless their caller left."""
    first_byte_s: list[int] = []
    """A histogram over `BOUNDS_S` of the time to the reply's first byte."""
    tokens: int = 0
    """Chunks of event streams that were relayed."""


class ReplicaHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's health as the traffic of one data plane shows it."""

    replica_id: str
    is_ejected: bool
    in_flight: int
    failures: int
    """Consecutive failures."""


class ServingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What each process sends once a second."""

    process_id: str
    """Made up when the process starts. Its counters start at 0 with it."""
    version: int
    """The version of the table in use."""
    epoch: str = ""
    """The epoch of the table in use. Empty: not reported."""
    counts: tuple[ReleaseCounters, ...] = ()
    health: tuple[ReplicaHealth, ...] = ()
    is_last: bool = False
    """The process has ended in order and sends no more reports."""
