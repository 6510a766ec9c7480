"""What the control plane tells data planes, and what they tell it. Whole tables, swapped at once.

A table is complete: what it does not name is no longer served. Older ones than the newest seen are refused
by `version`, so that late answers do no harm; those of another `epoch` are taken whatever their version: a
store that was restored from a backup counts from there.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal

import msgspec

from shoal.porch import SCHEME
from shoal.wire import Papers


class Balance(StrEnum):
    LEAST = "least"
    """The replica with the fewest requests of ours in it."""
    TOKENS = "tokens"
    """For language models: the least estimated time to the first token, by prefixes seen."""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    replica_id: str
    address: str
    """`10.0.0.7:8000`, or `unix:/path/of/socket`; `door:/path/of/socket`, where a process gives out sockets
    of the network that the replica is in; `tls:10.0.0.7:19000`, where a porch stands before it."""
    name: str = ""
    """What the porch's certificate has to say; whoever shows another is not the one."""
    release: int
    weight: float = 1.0
    """Of mixed devices: twice as much work for 2.0."""
    zone: str = ""
    secret: str = ""
    """Sent with every request as `x-shoal-secret`, and as a bearer token unless the service is public: a
    program that looks at it answers nobody else."""
    is_draining: bool = False
    """Gets nothing new; what it has, it finishes."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    rps: float | None = None
    concurrency: int | None = None
    per: Literal["token", "project"] = "token"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who may call a service, known by the SHA-256 of a token: the token itself is nowhere."""

    digest: str
    name: str
    project: str
    expires_at: float | None = None
    """Seconds since 1970: from then on it is known no more, also where no newer table says so."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    project: str
    name: str
    hosts: tuple[str, ...] = ()
    """Names in `Host` that mean this service, beside the path `/{project}/{name}/`."""
    replicas: tuple[Replica, ...] = ()
    shares: dict[int, float] = {}
    """Of requests, by release, while more than one is served: `{3: 0.95, 4: 0.05}`. Empty: all alike."""
    balance: Balance = Balance.LEAST
    cap: int = 64
    """Requests at once in one replica; the others wait here, and are bound late."""
    queue_count: int = 1024
    queue_bytes: int = 64 << 20
    queue_s: float = 60.0
    """How many requests may wait for a slot, how many bytes of them, for how long."""
    start_s: float = 0.0
    """For how long they wait while no replica is there to have a slot, if that is longer."""
    is_failing: bool = False
    """Its replicas end one after the other and none is of use: requests do not wait for one to start."""
    timeout_s: float = 600.0
    """From the request's last byte to the response's first, and between any two pieces of it."""
    retries: int = 1
    """Of requests that can be sent again: never begun at the replica, or without effect by their method."""
    is_repeatable: bool = False
    """Whatever callers send may be sent again while nothing was answered; without it, what its method, its
    sender (`idempotency-key`) or the path of a completion says is harmless."""
    hedge_s: float = 0.0
    """A harmless request that one replica does not answer for so long is asked of another, too; 0: never."""
    affinity: str = ""
    """A header or cookie whose value keeps a caller at one replica, as `header:x-session`."""
    limits: Limits = Limits()
    check: str = ""
    """A path that answers below 500 while a replica is well, asked now and then. Empty: only use tells."""
    closed: frozenset[str] = frozenset()
    """Paths of its servers that no caller may ask for, as `sleep`: those that manage the server itself."""
    is_off: bool = False
    """It should have no replicas, whoever asks: requests that find none are answered 503 and not held."""
    is_public: bool = False
    """Needs no token."""
    origins: tuple[str, ...] = ()
    """Web pages of these origins may call it from a browser, as `https://app.example.org`; `*`: all."""
    callers: tuple[Caller, ...] = ()


class Table(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    epoch: str = ""
    """Of the control plane: made up when it starts. Versions are compared within one."""
    services: tuple[Service, ...] = ()
    papers: Papers | None = None
    """What data planes show at porches; None: there are none."""


ADDRESS = re.compile(r"(?:unix|door):/.+|(?:tls:)?(?:[^\s:/]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
NUMBER = re.compile(r"[0-9]*|0x[0-9a-f]*")
LOOPBACK = ("localhost", "localdomain")
PLAIN = re.compile(r"[\x21-\x7e]*")
AFFINITY = re.compile(r"(?:(?:header|cookie):[!#$%&'*+\-.^_`|~0-9A-Za-z]+)?")


def is_address(text: str) -> bool:
    """Whether a replica could be there."""
    match = ADDRESS.fullmatch(text)
    return match is not None and (match[1] is None or 0 < int(match[1]) < 1 << 16)


def usable(table: Table) -> tuple[Table, list[str]]:
    """What of it a data plane can serve, and why the rest is left out: sentences with the value seen.

    One bad entry must not keep the others from being told of a revoked token.
    """
    found: list[str] = []
    kept: dict[tuple[str, str], Service] = {}
    for service in table.services:
        name = f"{service.project}/{service.name}"
        if (service.project, service.name) in kept:
            found.append(f"`{name}` is there twice")
        elif AFFINITY.fullmatch(service.affinity) is None:
            found.append(f"`{name}`: affinity `{service.affinity}` is not header:NAME or cookie:NAME")
        else:
            replicas = _usable(service.replicas, name, found)
            kept[service.project, service.name] = msgspec.structs.replace(service, replicas=replicas)
    return (msgspec.structs.replace(table, services=tuple(kept.values())) if found else table), found


def _usable(replicas: tuple[Replica, ...], name: str, found: list[str]) -> tuple[Replica, ...]:
    kept: dict[str, Replica] = {}
    for replica in replicas:
        one = f"`{replica.replica_id}` of `{name}`"
        if replica.replica_id in kept:
            found.append(f"{one} is there twice")
        elif not is_address(replica.address):
            known = "HOST:PORT, tls:HOST:PORT, unix:/PATH or door:/PATH"
            found.append(f"{one}: address `{replica.address}` is not {known}")
        elif bool(replica.name) != replica.address.startswith(SCHEME):
            found.append(
                f"{one}: address `{replica.address}` with the name `{replica.name}` of a certificate"
            )
        elif PLAIN.fullmatch(replica.secret) is None:
            found.append(f"{one}: its secret cannot stand in a header")
        elif not replica.weight > 0:
            found.append(f"{one}: weight {replica.weight} is not above 0")
        else:
            kept[replica.replica_id] = replica
    return tuple(kept.values())


def is_shared_name(host: str) -> bool:
    """Whether `host` is an address or a loopback name: everybody's way to a data plane, no service's own."""
    last = host.lower().rstrip(".").rpartition(".")[2]
    # A name whose last part is a number is read as an address, also `127.1` and `0x7f000001`.
    return ":" in host or last in LOOPBACK or NUMBER.fullmatch(last) is not None


BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of a latency histogram; one more counts what is above."""


class Count(msgspec.Struct, kw_only=True):
    """Of one release of one service, since the data plane started, except for what is there now."""

    project: str
    name: str
    release: int
    in_flight: int = 0
    queued: int = 0
    """Now. Waiting requests are counted for release 0: they are bound late."""
    requests: int = 0
    errors: int = 0
    """Answers of 500 and above, and requests that no answer came for, whoever was to blame but the caller."""
    first_byte_s: list[int] = []
    """A histogram over `BOUNDS_S` of the time to the response's first byte."""
    tokens: int = 0
    """Chunks of event streams that went through."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What a data plane sees of a replica by using it."""

    replica_id: str
    is_ejected: bool
    in_flight: int
    failures: int
    """In a row."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Once a second, from each process."""

    process_id: str
    """Made up when it starts: counters begin anew with it."""
    version: int
    """Of the table in use."""
    epoch: str = ""
    """Likewise; empty: not told."""
    counts: tuple[Count, ...] = ()
    health: tuple[Health, ...] = ()
    is_last: bool = False
    """It has ended well, and sends nothing to anybody any more."""
