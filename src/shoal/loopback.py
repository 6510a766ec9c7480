"""Who listens on a port of this machine: once a server is down, any user may take the port it had.

A leaf. Knows Linux alone; where nothing is known, nothing is claimed and nothing refused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import sys

LISTENING = "0A"


def refuse_stranger(host: str, port: int, trusted: set[int]) -> None:
    """`ConnectionRefusedError` if a user who is not `trusted` takes connections to `host` and `port` here.

    Ask after connecting and before sending anything secret: the listener cannot change in between without
    the connection's end.
    """
    for uid in listeners(host, port):
        if uid not in trusted:
            raise ConnectionRefusedError(f"port {port} is held by user {uid}, who does not run Shoal")


def listeners(host: str, port: int) -> set[int]:
    """Users with a socket that takes connections to this address; none where it is not of this machine."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return set()
    if not address.is_loopback:
        return set()
    own = _listening(f"/proc/net/tcp{'6' if address.version == 6 else ''}", port)
    wanted = _spelled(address)
    found = {uid for place, uid in own if place in (wanted, "0" * len(wanted))}
    if not found and address.version == 4:  # one socket may serve both kinds of addresses
        found = {uid for place, uid in _listening("/proc/net/tcp6", port) if place == "0" * 32}
    return found


def _listening(table: str, port: int) -> list[tuple[str, int]]:
    rows: list[tuple[str, int]] = []
    with contextlib.suppress(OSError), open(table, encoding="ascii") as file:  # noqa: PTH123 - starts fast
        for line in file:
            fields = line.split()
            if len(fields) > 7 and fields[3] == LISTENING and fields[1].endswith(f":{port:04X}"):
                rows.append((fields[1].rpartition(":")[0], int(fields[7])))
            elif rows and fields[3] != LISTENING:
                break  # Linux lists those that listen first, and a busy server has thousands of others
    return rows


def _spelled(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """As the kernel prints it: words of four bytes, each in the machine's own order."""
    packed = address.packed
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
