"""How the nodes of one world find each other: at the address where its group of ranks meets anyway.

The program of the ranks may listen there itself, so the place is given back before any of them begins. Who
cannot prove to be of this group is turned away, on both sides.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import sys
import threading
import time
from collections import Counter

from .mpi_channel import Channel, NotOurs, answer, greet
from .mpi_rank import MEET_S, WARN_S

AGAIN_S, TURN_S = 0.1, 0.5
MAX_GUESTS = 64
"""Connections that may introduce themselves at the same time."""


class Guests:
    """Connections that introduce themselves. Where `MAX_GUESTS` do, one more ends the oldest of the address
    that has most of them, so that strangers who say nothing keep no node out.
    """

    def __init__(self) -> None:
        self._addresses: dict[socket.socket, str] = {}
        """Oldest first."""
        self._lock = threading.Lock()

    def enter(self, connection: socket.socket, address: str) -> None:
        with self._lock:
            if len(self._addresses) >= MAX_GUESTS:
                largest = Counter(self._addresses.values()).most_common(1)[0][0]
                oldest = next(guest for guest, its in self._addresses.items() if its == largest)
                del self._addresses[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._addresses[connection] = address

    def leave(self, connection: socket.socket) -> bool:
        """False: the connection was ended for another."""
        with self._lock:
            return self._addresses.pop(connection, None) is not None


class Missing(Exception):
    """Not every node of the world has come."""


def gather(address: str, port: int, key: bytes, nodes: int, name: str) -> tuple[dict[int, Channel], bool]:
    """The channels of all other nodes, at the first one, and whether some nodes are simulated on one machine:
    two have the same host name, by which MPI tells machines apart. `Missing`: some have not come in time.
    """
    began, is_told = time.monotonic(), False
    found: dict[int, Channel] = {}
    arrived: queue.SimpleQueue[Channel] = queue.SimpleQueue()
    guests = Guests()
    with _opened(address, port, began + MEET_S) as listener:
        listener.settimeout(TURN_S)
        while len(found) < nodes - 1:
            _welcome(listener, key, nodes, arrived, guests)
            while not arrived.empty():
                channel = arrived.get()
                if (earlier := found.get(channel.node)) is not None:
                    earlier.close()  # it has not heard our answer, and has come again
                found[channel.node] = channel
            waited_s = time.monotonic() - began
            if waited_s > WARN_S and not is_told:
                is_told = True
                sys.stderr.write(f"shoal: `{name}` waits for {_absent(found, nodes)} to come to it\n")
            if waited_s > MEET_S:
                raise Missing(f"{_absent(found, nodes)} did not come within {MEET_S:g} s")
    hosts = [socket.gethostname()]
    for channel in found.values():
        message = channel.receive()
        if message is None:
            raise EOFError(f"node {channel.node} has left before the world began")
        hosts.append(message["host"])
    is_simulated = len(set(hosts)) < nodes
    for channel in found.values():
        channel.send({"is_simulated": is_simulated})
    return found, is_simulated


def _absent(found: dict[int, Channel], nodes: int) -> str:
    missing = [str(node) for node in range(1, nodes) if node not in found]
    return f"the ranks of {'node' if len(missing) == 1 else 'nodes'} {', '.join(missing)}"


def _opened(address: str, port: int, until: float) -> socket.socket:
    while True:
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            try:
                return socket.create_server((address, port), family=family, backlog=256)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                # The address by which others reach this node is not its own: it is translated.
                return socket.create_server(("", port), backlog=256)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
        time.sleep(AGAIN_S)


def _welcome(
    listener: socket.socket,
    key: bytes,
    nodes: int,
    arrived: queue.SimpleQueue[Channel],
    guests: Guests,
) -> None:
    """Take one guest, if there is any; those who do not say in time who they are do not hold up others."""
    try:
        connection, address = listener.accept()
    except TimeoutError:
        return

    def hear() -> None:
        channel = None
        with contextlib.suppress(OSError, NotOurs, EOFError):
            channel = answer(connection, key, nodes)
        if guests.leave(connection) and channel is not None:
            arrived.put(channel)
        else:
            connection.close()

    guests.enter(connection, address[0])
    threading.Thread(target=hear, daemon=True).start()


def join(address: str, port: int, key: bytes, node: int) -> tuple[Channel, bool]:
    """The same from another node: the channel to the first one. `Missing`: the world did not begin in time.

    What answers there may be another program until the first node has come so far.
    """
    began, told = time.monotonic(), ""
    while time.monotonic() < began + MEET_S:
        try:
            return _begun(address, port, key, node, began + MEET_S)
        except (OSError, NotOurs, EOFError) as error:
            told = str(error)
        time.sleep(AGAIN_S)
    raise Missing(f"no world began at {address}:{port}, where the first node should be: {told}")


def _begun(address: str, port: int, key: bytes, node: int, until: float) -> tuple[Channel, bool]:
    connection = socket.create_connection((address, port), timeout=10.0)
    try:
        channel = greet(connection, key, node)
        channel.send({"host": socket.gethostname()})
        connection.settimeout(max(0.1, until - time.monotonic()))
        message = channel.receive()
        if message is None:
            raise EOFError("the first node has closed")
    except BaseException:
        connection.close()
        raise
    return channel, message["is_simulated"]
