"""A network of the benchmark's own: a namespace that has loopback and nothing else.

Ray's daemons listen on every address and accept every caller. No process outside can reach this namespace.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

from benchmarks.processes import BenchmarkError

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
SIOCSIFADDR = 0x8916
IFF_UP = 0x1


def enter() -> None:
    """Leave the machine's network for good: this thread and everything it starts from now on.

    Must be called before other threads are started. Without root it raises `BenchmarkError` and changes
    nothing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise BenchmarkError(f"a network namespace of our own needs root: {why}")
    _set_flags("lo", _flags("lo") | IFF_UP)
    # Slurm asks glibc for AI_ADDRCONFIG, which resolves nothing where no address but 127.0.0.1 is seen.
    _add_address("lo:1", "127.0.0.2")


def is_private() -> bool:
    """Whether no interface but loopback is up."""
    return not any(_flags(name) & IFF_UP for _, name in socket.if_nameindex() if name != "lo")


def _flags(interface: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sh14x", interface.encode(), 0))
    return int(struct.unpack("16xh14x", answer)[0])


def _set_flags(interface: str, flags: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", interface.encode(), flags))


def _add_address(interface: str, address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        message = struct.pack("16sHH4s8x", interface.encode(), socket.AF_INET, 0, socket.inet_aton(address))
        fcntl.ioctl(any_socket, SIOCSIFADDR, message)
