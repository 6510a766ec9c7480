"""Connect the nodes of an MPI world by authenticated channels.

Both ends of a channel prove that they know the job's token, and neither sends it. Every message has a code
that depends on all earlier messages, so an attacker cannot add, drop, repeat or change one. The content,
which is the command of an MPI daemon, is not secret.

The nodes meet at the rendezvous address of their rank group. The program may listen there itself, so the port
is released before any rank starts. Both sides reject a peer that cannot prove that it belongs to this group.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import queue
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

from .mpi_rank import RENDEZVOUS_S, WARN_S

MAGIC = b"shoal-mpi-1\n"
NONCE = CODE = 32
MAX_MESSAGE = 1 << 20
PATIENCE_S = 10.0
"""How long one message of a peer may take."""


class UntrustedPeer(Exception):
    """The peer does not belong to this job, or belongs to another rank group of it."""


class Channel:
    """One end of a channel. `send`, and `receive` within a message, block for at most `PATIENCE_S`."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes, node: int) -> None:
        self.connection = connection
        self.node = node
        self._keys = (send_key, receive_key)
        self._sent = self._received = 0

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise OSError(f"a message of {len(data)} bytes is too long")
        code = _code(self._keys[0], self._sent.to_bytes(8, "big") + data)
        self._sent += 1
        self.connection.sendall(len(data).to_bytes(4, "big") + code + data)

    def receive(self) -> dict[str, Any] | None:
        """Return the next message. None: the peer has closed. `UntrustedPeer`: the message was altered."""
        first = self.connection.recv(1)
        if not first:
            return None
        until = time.monotonic() + PATIENCE_S
        length = int.from_bytes(first + receive_exactly(self.connection, 3, until), "big")
        if length > MAX_MESSAGE:
            raise UntrustedPeer(f"a message of {length} bytes")
        code, data = (
            receive_exactly(self.connection, CODE, until),
            receive_exactly(self.connection, length, until),
        )
        wanted = _code(self._keys[1], self._received.to_bytes(8, "big") + data)
        self._received += 1
        if not hmac.compare_digest(code, wanted):
            raise UntrustedPeer("a message with a wrong code")
        message = json.loads(data)
        if not isinstance(message, dict):
            raise UntrustedPeer("a message that is no object")
        return message

    def close(self) -> None:
        self.connection.close()


def key_of(token: str, world: str) -> bytes:
    """Return the secret that the nodes of one world share. `world`: attempt, round and count."""
    return _code(token.encode(), f"shoal mpi {world}".encode())


def introduce(connection: socket.socket, key: bytes, node: int) -> Channel:
    """Introduce this node to the first node. `UntrustedPeer`: another program answers there."""
    until = time.monotonic() + PATIENCE_S
    mine = os.urandom(NONCE)
    connection.settimeout(PATIENCE_S)
    connection.sendall(MAGIC + node.to_bytes(4, "big") + mine)
    theirs, code = receive_exactly(connection, NONCE, until), receive_exactly(connection, CODE, until)
    text = node.to_bytes(4, "big") + mine + theirs
    if not hmac.compare_digest(code, _code(key, b"first" + text)):
        raise UntrustedPeer("a peer that does not know the job's token")
    connection.sendall(_code(key, b"other" + text))
    return Channel(connection, _code(key, b"from other" + text), _code(key, b"from first" + text), node)


def authenticate(connection: socket.socket, key: bytes, nodes: int) -> Channel:
    """Authenticate another node. `UntrustedPeer`: it does not belong to this job."""
    until = time.monotonic() + PATIENCE_S
    if receive_exactly(connection, len(MAGIC), until) != MAGIC:
        raise UntrustedPeer("a peer that speaks something else")
    node_bytes, theirs = receive_exactly(connection, 4, until), receive_exactly(connection, NONCE, until)
    node = int.from_bytes(node_bytes, "big")
    if not 0 < node < nodes:
        raise UntrustedPeer(f"a peer that says it is node {node}")
    mine = os.urandom(NONCE)
    text = node_bytes + theirs + mine
    connection.sendall(mine + _code(key, b"first" + text))
    if not hmac.compare_digest(receive_exactly(connection, CODE, until), _code(key, b"other" + text)):
        raise UntrustedPeer("a peer that does not know the job's token")
    return Channel(connection, _code(key, b"from first" + text), _code(key, b"from other" + text), node)


def receive_exactly(connection: socket.socket, length: int, until: float) -> bytes:
    """Receive that many bytes. `EOFError`: the peer has closed. `TimeoutError`: too few came in time."""
    data = b""
    while len(data) < length:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{len(data)} of {length} bytes came in time")
        connection.settimeout(left_s)
        chunk = connection.recv(length - len(data))
        if not chunk:
            raise EOFError("the peer has closed")
        data += chunk
    connection.settimeout(PATIENCE_S)
    return data


def _code(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


AGAIN_S, TURN_S = 0.1, 0.5
MAX_PENDING = 64
"""Connections that may authenticate at the same time."""


class PendingPeers:
    """Connections that have not authenticated yet.

    If there are `MAX_PENDING`, one more closes the oldest connection of the address that has the most, so
    that silent strangers cannot lock out a node.
    """

    def __init__(self) -> None:
        self._addresses: dict[socket.socket, str] = {}
        """Addresses by connection, oldest first."""
        self._lock = threading.Lock()

    def add(self, connection: socket.socket, address: str) -> None:
        with self._lock:
            if len(self._addresses) >= MAX_PENDING:
                largest = Counter(self._addresses.values()).most_common(1)[0][0]
                oldest = next(guest for guest, its in self._addresses.items() if its == largest)
                del self._addresses[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._addresses[connection] = address

    def remove(self, connection: socket.socket) -> bool:
        """Remove the connection. False: it was closed in favour of another."""
        with self._lock:
            return self._addresses.pop(connection, None) is not None


class MissingNodes(Exception):
    """Not every node of the world has connected."""


def gather(address: str, port: int, key: bytes, nodes: int, name: str) -> tuple[dict[int, Channel], bool]:
    """Return the channels to all other nodes, and whether nodes are simulated on one machine.

    Runs on the first node. Nodes are simulated if two have the same host name, by which MPI tells machines
    apart. `MissingNodes`: some nodes have not connected in time.
    """
    began, is_told = time.monotonic(), False
    channels: dict[int, Channel] = {}
    arrived: queue.SimpleQueue[Channel] = queue.SimpleQueue()
    guests = PendingPeers()
    with _open_listener(address, port, began + RENDEZVOUS_S) as listener:
        listener.settimeout(TURN_S)
        while len(channels) < nodes - 1:
            _accept_peer(listener, key, nodes, arrived, guests)
            while not arrived.empty():
                channel = arrived.get()
                if (earlier := channels.get(channel.node)) is not None:
                    earlier.close()  # the node has not received the reply and has connected again
                channels[channel.node] = channel
            waited_s = time.monotonic() - began
            if waited_s > WARN_S and not is_told:
                is_told = True
                sys.stderr.write(f"shoal: `{name}` waits for {_absent(channels, nodes)} to come to it\n")
            if waited_s > RENDEZVOUS_S:
                raise MissingNodes(f"{_absent(channels, nodes)} did not come within {RENDEZVOUS_S:g} s")
    hosts = [socket.gethostname()]
    for channel in channels.values():
        message = channel.receive()
        if message is None:
            raise EOFError(f"node {channel.node} has left before the world began")
        hosts.append(message["host"])
    is_simulated = len(set(hosts)) < nodes
    for channel in channels.values():
        channel.send({"is_simulated": is_simulated})
    return channels, is_simulated


def _absent(channels: dict[int, Channel], nodes: int) -> str:
    missing = [str(node) for node in range(1, nodes) if node not in channels]
    return f"the ranks of {'node' if len(missing) == 1 else 'nodes'} {', '.join(missing)}"


def _open_listener(address: str, port: int, until: float) -> socket.socket:
    while True:
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            try:
                return socket.create_server((address, port), family=family, backlog=256)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                # Other nodes reach this one through address translation, so the address is not its own.
                return socket.create_server(("", port), backlog=256)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
        time.sleep(AGAIN_S)


def _accept_peer(
    listener: socket.socket,
    key: bytes,
    nodes: int,
    arrived: queue.SimpleQueue[Channel],
    guests: PendingPeers,
) -> None:
    """Accept one connection if there is any. Each authenticates in its own thread, so none delays others."""
    try:
        connection, address = listener.accept()
    except TimeoutError:
        return

    def hear() -> None:
        channel = None
        with contextlib.suppress(OSError, UntrustedPeer, EOFError):
            channel = authenticate(connection, key, nodes)
        if guests.remove(connection) and channel is not None:
            arrived.put(channel)
        else:
            connection.close()

    guests.add(connection, address[0])
    threading.Thread(target=hear, daemon=True).start()


def join(address: str, port: int, key: bytes, node: int) -> tuple[Channel, bool]:
    """Return the channel to the first node. Runs on the other nodes.

    Another program may answer at the address until the first node listens there. `MissingNodes`: the world
    did not begin in time.
    """
    began, problem = time.monotonic(), ""
    while time.monotonic() < began + RENDEZVOUS_S:
        try:
            return _try_join(address, port, key, node, began + RENDEZVOUS_S)
        except (OSError, UntrustedPeer, EOFError) as error:
            problem = str(error)
        time.sleep(AGAIN_S)
    raise MissingNodes(f"no world began at {address}:{port}, where the first node should be: {problem}")


def _try_join(address: str, port: int, key: bytes, node: int, until: float) -> tuple[Channel, bool]:
    connection = socket.create_connection((address, port), timeout=10.0)
    try:
        channel = introduce(connection, key, node)
        channel.send({"host": socket.gethostname()})
        connection.settimeout(max(0.1, until - time.monotonic()))
        message = channel.receive()
        if message is None:
            raise EOFError("the first node has closed")
    except BaseException:
        connection.close()
        raise
    return channel, message["is_simulated"]
