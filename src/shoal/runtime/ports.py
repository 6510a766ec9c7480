"""A port for a new group of ranks to meet at."""

from __future__ import annotations

import socket

FIRST, COUNT = 30_000, 2_700
"""Below those that the kernel hands out by itself, and apart from those that an engine gives to attempts."""


def free_port(address: str, after: int) -> int:
    """A port that nobody listens at, looked for behind `after`. Nothing keeps it free."""
    for step in range(COUNT):
        port = FIRST + (after + 1 + step) % COUNT
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
    raise OSError(f"all {COUNT} ports from {FIRST} on are taken")
