"""What of a table may stand in HAProxy's configuration: words without a meaning to it, and nothing else.

Nothing is quoted or escaped anywhere: what would have to be is refused, with the value seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from shoal.serving.table import Balance, Replica, Service, Table, usable

WORD = re.compile(r"[A-Za-z0-9_.-]{1,128}")
PATH = re.compile(r"/[A-Za-z0-9/_.,~@+=&?:-]{0,1000}")
ADDRESS = re.compile(r"(?:tls:)?(?:[A-Za-z0-9_.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\[[0-9a-fA-F:.]{2,45}\]")
ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9_.-]+(?::[0-9]{1,5})?")
DIGEST = re.compile(r"[0-9a-f]{64}")
AFFINITY = re.compile(r"(?:(?:header|cookie):[A-Za-z0-9_.-]{1,128})?")
NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")


def server_name(replica: Replica) -> str:
    """HAProxy tells a replica its name: that is how the secret gets there. Without one, its id."""
    return replica.secret or replica.replica_id


def speakable(table: Table) -> tuple[Table, list[str]]:
    """What of it HAProxy can be told, and why the rest is left out: sentences with the value seen."""
    known, found = usable(table)
    kept: list[Service] = []
    hosts: dict[str, str] = {}
    for service in known.services:
        name = f"{service.project}/{service.name}"
        unsaid = [f"`{name}`: {told}; HAProxy cannot be told" for told in _of(service)]
        if unsaid:
            found += unsaid
            continue
        own = tuple(host for host in service.hosts if hosts.setdefault(host.lower(), name) == name)
        taken = (host for host in service.hosts if host not in own)
        found += [f"host `{host}` means both `{hosts[host.lower()]}` and `{name}`" for host in taken]
        kept.append(msgspec.structs.replace(service, hosts=own))
    return (msgspec.structs.replace(known, services=tuple(kept)) if found else table), found


def unspeakable(table: Table) -> list[str]:
    """Why HAProxy cannot serve all of this table; empty if it can."""
    return speakable(table)[1]


def _of(service: Service) -> Iterator[str]:
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
    yield from (f"{what} `{value}`" for right, what, value in checked if right.fullmatch(value) is None)
    for replica in service.replicas:
        if WORD.fullmatch(server_name(replica)) is None:
            yield f"the secret of `{replica.replica_id}`"  # which is not for logs
    if len({server_name(replica) for replica in service.replicas}) < len(service.replicas):
        yield "two replicas of one secret"


def beyond(service: Service) -> list[str]:
    """What this service asks for that HAProxy does not do; it is served without."""
    found = []
    if service.balance is Balance.TOKENS:
        found.append("`balance: tokens` (the least time to the first token): served by fewest requests")
    if service.hedge_s:
        found.append("a second replica for slow requests: one alone is asked")
    if not service.replicas and not service.is_off:
        found.append("requests held until there is a replica: answered 503 with Retry-After")
    return found
