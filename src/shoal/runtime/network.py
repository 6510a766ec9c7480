"""Which network ranks of several nodes use: the interface by which their peers reach them, and InfiniBand.

Left alone, gloo takes the interface of the host's name, often a loopback, and NCCL the first that is up,
often a bridge of containers. Decided here from what the kernel lists; what a job sets itself stands.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterable

import msgspec

SIOCGIFCONF = 0x8912
REQUEST = 40
"""Bytes of one `struct ifreq` on 64-bit Linux: a name of 16, then an address."""
DEVICES = "/sys/class/infiniband"
ACTIVE = "ACTIVE"
LINKS = ("InfiniBand", "Ethernet")
"""Kinds of RDMA ports that NCCL speaks over by itself, the better one first."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One port of one RDMA device, as the kernel describes it."""

    device: str
    number: int
    state: str
    link: str


def variables(master_addr: str, *, has_gpus: bool) -> dict[str, str]:
    """What ranks of several nodes find in their environment about the network. Asks the kernel, quickly."""
    found = sockets(interface_of(own_address(master_addr), addresses()))
    return {**found, **rdma(ports())} if has_gpus else found


def interface_of(address: str | None, interfaces: Iterable[tuple[str, str]]) -> str | None:
    """The interface that holds the address, of (interface, address) pairs; None: none of them does."""
    return next((name for name, held in interfaces if held == address), None)


def sockets(interface: str | None) -> dict[str, str]:
    """Have gloo and NCCL use this interface; without one, leave the choice to them."""
    if interface is None:
        return {}
    # NCCL takes a name for the beginning of one (`eth1` is `eth10` too) unless it is told otherwise.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def rdma(found: Iterable[Port]) -> dict[str, str]:
    """Have NCCL use the ports that are up, InfiniBand alone where there is any; or not look for them.

    A node with both has its Ethernet ports for storage or management. Devices of other kinds (EFA) have
    plugins of their own, and are left to them.
    """
    every = tuple(found)
    if not every:
        return {"NCCL_IB_DISABLE": "1"}
    for link in LINKS:
        up = sorted(f"{p.device}:{p.number}" for p in every if p.link == link and p.state == ACTIVE)
        if up:
            return {"NCCL_IB_HCA": "=" + ",".join(up)}
    return {"NCCL_IB_DISABLE": "1"} if all(port.link in LINKS for port in every) else {}


def own_address(towards: str) -> str | None:
    """This node's address on the way to another one, as its peers see it. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def addresses() -> list[tuple[str, str]]:
    """(interface, address) for every address of this machine."""
    with contextlib.suppress(OSError):
        return _ipv4() + _ipv6()
    return []


def ports(root: str = DEVICES) -> list[Port]:
    """The RDMA ports of this machine; none where the kernel has no such devices."""
    found = []
    for device in _listed(root):
        for number in filter(str.isdigit, _listed(f"{root}/{device}/ports")):
            place = f"{root}/{device}/ports/{number}"
            state = _read(f"{place}/state").rpartition(":")[2].strip()  # "4: ACTIVE"
            link = _read(f"{place}/link_layer").strip()
            found.append(Port(device=device, number=int(number), state=state, link=link))
    return found


def _ipv4() -> list[tuple[str, str]]:
    room = array.array("B", bytes(256 * REQUEST))
    where, size = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFCONF, struct.pack("iL", size, where))
    filled = room.tobytes()[: struct.unpack("iL", answer)[0]]
    entries = [filled[at : at + REQUEST] for at in range(0, len(filled), REQUEST)]
    # A further address of an interface may be listed as `eth0:1`; the interface is eth0.
    return [(e[:16].split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(e[20:24])) for e in entries]


def _ipv6() -> list[tuple[str, str]]:
    lines = [line.split() for line in _read("/proc/net/if_inet6").splitlines()]
    return [(words[-1], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))) for words in lines]


def _listed(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(path))
    return []


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        return file.read()
    return ""
