"""Addresses that HAProxy can use: numbers and ports. Blocks while names are looked up.

It takes no name for a server that is added while it runs. Sockets in files it would open through any link
that a program has put there, and those of private networks it cannot have at all.
"""

from __future__ import annotations

import logging
import re
import socket

import msgspec

from shoal.serving.table import Replica, Service, Table

log = logging.getLogger(__name__)
NUMERIC = re.compile(r"(?:tls:)?(?:\[.*|[0-9.]+:[0-9]+)")
"""A porch says where it is in numbers."""
FILES = ("unix:", "door:")


def resolved(table: Table) -> Table:
    """Without replicas that cannot be reached: the others are served."""
    return msgspec.structs.replace(table, services=tuple(map(_service, table.services)))


def _service(service: Service) -> Service:
    if all(NUMERIC.fullmatch(replica.address) for replica in service.replicas):
        return service
    found = tuple(one for one in map(_replica, service.replicas) if one is not None)
    return msgspec.structs.replace(service, replicas=found)


def _replica(replica: Replica) -> Replica | None:
    host, _, port = replica.address.rpartition(":")
    if replica.address.startswith(FILES):
        log.warning(
            "replica `%s` is left out: HAProxy has no way to `%s`", replica.replica_id, replica.address
        )
        return None
    if NUMERIC.fullmatch(replica.address) or not port.isdigit():
        return replica  # what makes no sense is refused with the table
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        log.warning("replica `%s` is left out: `%s` is not found: %s", replica.replica_id, host, error)
        return None
    name = str(found[4][0])
    return msgspec.structs.replace(replica, address=f"[{name}]:{port}" if ":" in name else f"{name}:{port}")
