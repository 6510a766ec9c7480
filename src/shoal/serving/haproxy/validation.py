"""Decide what of a table may stand in HAProxy's configuration, and resolve host names.

Only words without a meaning to HAProxy are allowed. Nothing is quoted or escaped: a value that would need it
is refused, with the value seen.

HAProxy accepts only numeric addresses for a server that is added while it runs, so host names are resolved
here, which blocks. HAProxy would open a Unix socket through any link that a program has put there, and it
cannot reach sockets of private networks at all, so such replicas are left out.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator

import msgspec

from shoal.serving.table import Balance, ReplicaConfig, ServiceConfig, ServingTable, usable

WORD = re.compile(r"[A-Za-z0-9_.-]{1,128}")
PATH = re.compile(r"/[A-Za-z0-9/_.,~@+=&?:-]{0,1000}")
ADDRESS = re.compile(r"(?:tls:)?(?:[A-Za-z0-9_.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\[[0-9a-fA-F:.]{2,45}\]")
ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9_.-]+(?::[0-9]{1,5})?")
DIGEST = re.compile(r"[0-9a-f]{64}")
AFFINITY = re.compile(r"(?:(?:header|cookie):[A-Za-z0-9_.-]{1,128})?")
NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")


def server_name(replica: ReplicaConfig) -> str:
    """Return the server's name. HAProxy sends it to the replica, so it is the secret, or else the id."""
    return replica.secret or replica.replica_id


def supported_table(table: ServingTable) -> tuple[ServingTable, list[str]]:
    """Return the part of the table that HAProxy supports, and a sentence for each entry left out."""
    usable_part, left_out = usable(table)
    services: list[ServiceConfig] = []
    hosts: dict[str, str] = {}
    for service in usable_part.services:
        name = f"{service.project}/{service.name}"
        unsupported = [
            f"`{name}`: {value}; HAProxy does not support it" for value in _unsupported_values(service)
        ]
        if unsupported:
            left_out += unsupported
            continue
        hosts_of_service = tuple(
            host for host in service.hosts if hosts.setdefault(host.lower(), name) == name
        )
        shared_hosts = (host for host in service.hosts if host not in hosts_of_service)
        left_out += [
            f"host `{host}` means both `{hosts[host.lower()]}` and `{name}`" for host in shared_hosts
        ]
        services.append(msgspec.structs.replace(service, hosts=hosts_of_service))
    return (msgspec.structs.replace(usable_part, services=tuple(services)) if left_out else table), left_out


def unsupported_settings(table: ServingTable) -> list[str]:
    """Return why HAProxy cannot serve all of this table; empty if it can."""
    return supported_table(table)[1]


def _unsupported_values(service: ServiceConfig) -> Iterator[str]:
    checked = [
        (WORD, "project", service.project),
        (WORD, "name", service.name),
        (AFFINITY, "affinity", service.affinity),
        *((HOST, "host", host) for host in service.hosts),
        *((ORIGIN, "origin", origin) for origin in service.origins),
        *((WORD, "replica", replica.replica_id) for replica in service.replicas),
        *((ADDRESS, "address", replica.address) for replica in service.replicas),
        *((WORD, "name", replica.name) for replica in service.replicas if replica.name),
        *((DIGEST, "digest of a caller", caller.digest) for caller in service.callers),
        *((NAME, "name of a caller", caller.name) for caller in service.callers),
    ]
    if service.check:
        checked.append((PATH, "check", service.check))
    yield from (f"{label} `{value}`" for right, label, value in checked if right.fullmatch(value) is None)
    for replica in service.replicas:
        if WORD.fullmatch(server_name(replica)) is None:
            yield f"the secret of `{replica.replica_id}`"  # the value is not for logs
    if len({server_name(replica) for replica in service.replicas}) < len(service.replicas):
        yield "two replicas of one secret"


def ignored_settings(service: ServiceConfig) -> list[str]:
    """Return the settings of this service that HAProxy ignores. It is served without them."""
    settings = []
    if service.balance is Balance.TOKENS:
        settings.append(
            "`balance: tokens` (the least time to the first token): served by the fewest requests"
        )
    if service.hedge_s:
        settings.append("a second replica for slow requests (`hedge_s`): only one gets the request")
    if not service.replicas and not service.is_off:
        settings.append("requests held until there is a replica: answered 503 with Retry-After")
    return settings


log = logging.getLogger(__name__)
NUMERIC = re.compile(r"(?:tls:)?(?:\[.*|[0-9.]+:[0-9]+)")
"""Sidecars always have numeric addresses."""
FILE_SCHEMES = ("unix:", "broker:")


def resolve_addresses(table: ServingTable) -> ServingTable:
    """Leave out replicas that cannot be reached, so that the others are served."""
    return msgspec.structs.replace(table, services=tuple(map(_resolve_service, table.services)))


def _resolve_service(service: ServiceConfig) -> ServiceConfig:
    if all(NUMERIC.fullmatch(replica.address) for replica in service.replicas):
        return service
    replicas = tuple(replica for replica in map(_resolve_replica, service.replicas) if replica is not None)
    return msgspec.structs.replace(service, replicas=replicas)


def _resolve_replica(replica: ReplicaConfig) -> ReplicaConfig | None:
    host, _, port = replica.address.rpartition(":")
    if replica.address.startswith(FILE_SCHEMES):
        log.warning(
            "replica `%s` is left out: HAProxy has no way to `%s`", replica.replica_id, replica.address
        )
        return None
    if NUMERIC.fullmatch(replica.address) or not port.isdigit():
        return replica  # what makes no sense is refused with the table
    try:
        address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        log.warning("replica `%s` is left out: `%s` is not found: %s", replica.replica_id, host, error)
        return None
    name = str(address[4][0])
    return msgspec.structs.replace(replica, address=f"[{name}]:{port}" if ":" in name else f"{name}:{port}")
