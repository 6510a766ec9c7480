"""Choose the network for ranks of several nodes, and find free and used ports.

By itself, Gloo takes the interface of the host's name, which is often a loopback, and NCCL takes the first
one that is up, which is often a container bridge. Shoal chooses the interface by which peers reach the node,
and InfiniBand, from what the kernel lists. A job's own settings are stronger.

Ports are for a new rank group to meet at, and for the server of a replica.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator

import msgspec

from shoal import bounded_file

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40
"""Bytes of one `struct ifreq` on 64-bit Linux: a name of 16, then an address."""
RDMA_DEVICES = "/sys/class/infiniband"
ACTIVE = "ACTIVE"
LINK_LAYERS = ("InfiniBand", "Ethernet")
"""Kinds of RDMA ports that NCCL uses by itself, the better kind first."""


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """One port of one RDMA device, as the kernel describes it."""

    device: str
    number: int
    state: str
    link: str


def network_variables(master_addr: str, *, has_gpus: bool) -> dict[str, str]:
    """Return the network variables for ranks of several nodes. Asks only the kernel, so it is quick."""
    variables = interface_variables(interface_of(own_address(master_addr), interface_addresses()))
    return {**variables, **rdma_variables(rdma_ports())} if has_gpus else variables


def interface_of(address: str | None, interfaces: Iterable[tuple[str, str]]) -> str | None:
    """Return the interface that holds the address, from (interface, address) pairs. None: no
    interface does.
    """
    return next((name for name, held in interfaces if held == address), None)


def interface_variables(interface: str | None) -> dict[str, str]:
    """Have Gloo and NCCL use this interface. Without one, leave the choice to them."""
    if interface is None:
        return {}
    # The `=` makes NCCL compare the whole name. Otherwise `eth1` would also stand for `eth10`.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def rdma_variables(ports: Iterable[RdmaPort]) -> dict[str, str]:
    """Have NCCL use the ports that are up, and InfiniBand alone if there is any. Without ports, disable it.

    A node with both kinds has its Ethernet ports for storage or management. Devices of other kinds (EFA) have
    plugins of their own, which choose by themselves.
    """
    every = tuple(ports)
    if not every:
        return {"NCCL_IB_DISABLE": "1"}
    for link in LINK_LAYERS:
        up = sorted(f"{p.device}:{p.number}" for p in every if p.link == link and p.state == ACTIVE)
        if up:
            return {"NCCL_IB_HCA": "=" + ",".join(up)}
    return {"NCCL_IB_DISABLE": "1"} if all(port.link in LINK_LAYERS for port in every) else {}


def own_address(towards: str) -> str | None:
    """Return this node's address on the way to another one, as peers see it. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def interface_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) for every address of this machine."""
    with contextlib.suppress(OSError):
        return _ipv4() + _ipv6()
    return []


def rdma_ports(root: str = RDMA_DEVICES) -> list[RdmaPort]:
    """Return the RDMA ports of this machine, or none if the kernel has no such devices."""
    ports = []
    for device in _listed(root):
        for number in filter(str.isdigit, _listed(f"{root}/{device}/ports")):
            place = f"{root}/{device}/ports/{number}"
            state = _read(f"{place}/state").rpartition(":")[2].strip()  # "4: ACTIVE"
            link = _read(f"{place}/link_layer").strip()
            ports.append(RdmaPort(device=device, number=int(number), state=state, link=link))
    return ports


def _ipv4() -> list[tuple[str, str]]:
    room = array.array("B", bytes(256 * IFREQ_BYTES))
    where, size = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFCONF, struct.pack("iL", size, where))
    filled = room.tobytes()[: struct.unpack("iL", answer)[0]]
    entries = [filled[at : at + IFREQ_BYTES] for at in range(0, len(filled), IFREQ_BYTES)]
    # The kernel may list a second address of eth0 as `eth0:1`.
    return [(e[:16].split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(e[20:24])) for e in entries]


def _ipv6() -> list[tuple[str, str]]:
    lines = [line.split() for line in _read("/proc/net/if_inet6").splitlines()]
    return [(fields[-1], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))) for fields in lines]


def _listed(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(path))
    return []


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        return file.read()
    return ""


FIRST_PORT, NUM_PORTS = 30_000, 2_700
"""Below the ports that the kernel hands out by itself, and apart from those that an engine gives to
attempts.
"""
LISTEN_STATE = "0A"
"""The code of that state in Linux's socket tables."""
MAX_TABLE = 4 << 20
"""Limit in bytes for such a table: 28,000 sockets. The port of a later socket is not found."""
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def free_port(address: str, after: int) -> int:
    """Find a port after `after` at which no process listens. Nothing keeps the port free afterwards."""
    for step in range(NUM_PORTS):
        port = FIRST_PORT + (after + 1 + step) % NUM_PORTS
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
    raise OSError(f"all {NUM_PORTS} ports from {FIRST_PORT} on are taken")


def hold_port(
    address: str, port: int | None, among: range = range(FIRST_PORT, FIRST_PORT + NUM_PORTS)
) -> socket.socket:
    """Return a socket that reserves a port for a server that starts soon; for `port` if one is given.

    The socket is bound and never listens. Linux lets a server bind beside it if the server sets SO_REUSEADDR,
    as servers do to survive their own restart. It refuses other programs, such as the next search for a port.
    A port also counts as taken if a process listens at another address of this machine, because the rule that
    protects a replica's port names only the number. `OSError`: the port is taken.
    """
    taken = {number for _, number in _listening_sockets("self")}
    for candidate in (port,) if port is not None else among:
        if candidate in taken:
            continue
        held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # A search goes without the option, so that another program's port is refused. A port that was
            # asked for may have been in use a moment ago, and only the option allows to bind it again.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port is not None))
            held.bind((address, candidate))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise OSError(
        f"port {port} is taken"
        if port is not None
        else f"all {len(among)} ports from {among.start} are taken"
    )


def listening_ports(pids: Iterable[int]) -> list[int]:
    """Return the TCP ports at which one of these processes listens, in its own network namespace.

    A process that cannot be read or is gone adds none.
    """
    ports: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes = set(_socket_inodes(pid))
            if inodes:
                ports |= {port for inode, port in _listening_sockets(pid) if inode in inodes}
    return sorted(ports)


def _socket_inodes(pid: int) -> Iterator[str]:
    """Yield the inodes of its sockets."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if match := _SOCKET.fullmatch(os.readlink(entry.path)):
                yield match[1]


def _listening_sockets(pid: int | str) -> Iterator[tuple[str, int]]:
    """Yield inode and port of each listening socket in the network namespace of this process."""
    for table in ("tcp", "tcp6"):
        try:
            text = bounded_file.read_start(f"/proc/{pid}/net/{table}", MAX_TABLE).decode("ascii")
        except FileNotFoundError:
            continue  # a machine without IPv6 has no `tcp6`
        rows = text.split("\n")
        for row in rows[1:-1]:  # without the header, and without the empty text after the last newline
            fields = row.split()
            if fields[3] == LISTEN_STATE:
                yield fields[9], int(fields[1].rpartition(":")[2], 16)
