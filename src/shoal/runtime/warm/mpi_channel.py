"""A channel between two nodes of one job. Both ends prove that they know the job's token; no end sends it.

Every message carries a code that depends on all before it, so nobody on the way can add, drop, repeat or
change one. What is said is not secret: the command of an MPI daemon.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time
from typing import Any

MAGIC = b"shoal-mpi-1\n"
NONCE = CODE = 32
MAX_MESSAGE = 1 << 20
PATIENCE_S = 10.0
"""For how long one message of a peer may be on its way."""


class NotOurs(Exception):
    """The peer is not of this job, or of another group of its ranks."""


class Channel:
    """One end. `send` blocks at most `PATIENCE_S`; `receive` as long, once a message has begun."""

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
        """The next message; None: the peer has closed. `NotOurs`: somebody has meddled with it."""
        first = self.connection.recv(1)
        if not first:
            return None
        until = time.monotonic() + PATIENCE_S
        length = int.from_bytes(first + exactly(self.connection, 3, until), "big")
        if length > MAX_MESSAGE:
            raise NotOurs(f"a message of {length} bytes")
        code, data = exactly(self.connection, CODE, until), exactly(self.connection, length, until)
        wanted = _code(self._keys[1], self._received.to_bytes(8, "big") + data)
        self._received += 1
        if not hmac.compare_digest(code, wanted):
            raise NotOurs("a message with a wrong code")
        message = json.loads(data)
        if not isinstance(message, dict):
            raise NotOurs("a message that is no object")
        return message

    def close(self) -> None:
        self.connection.close()


def key_of(token: str, world: str) -> bytes:
    """The secret that the nodes of one world share. `world`: the attempt, the group and the count."""
    return _code(token.encode(), f"shoal mpi {world}".encode())


def greet(connection: socket.socket, key: bytes, node: int) -> Channel:
    """Introduce this node to the first. `NotOurs`: somebody else answers there."""
    until = time.monotonic() + PATIENCE_S
    mine = os.urandom(NONCE)
    connection.settimeout(PATIENCE_S)
    connection.sendall(MAGIC + node.to_bytes(4, "big") + mine)
    theirs, code = exactly(connection, NONCE, until), exactly(connection, CODE, until)
    said = node.to_bytes(4, "big") + mine + theirs
    if not hmac.compare_digest(code, _code(key, b"first" + said)):
        raise NotOurs("a peer that does not know the job's token")
    connection.sendall(_code(key, b"other" + said))
    return Channel(connection, _code(key, b"from other" + said), _code(key, b"from first" + said), node)


def answer(connection: socket.socket, key: bytes, nodes: int) -> Channel:
    """Hear another node introduce itself. `NotOurs`: it is none of this job."""
    until = time.monotonic() + PATIENCE_S
    if exactly(connection, len(MAGIC), until) != MAGIC:
        raise NotOurs("a peer that speaks something else")
    told, theirs = exactly(connection, 4, until), exactly(connection, NONCE, until)
    node = int.from_bytes(told, "big")
    if not 0 < node < nodes:
        raise NotOurs(f"a peer that says it is node {node}")
    mine = os.urandom(NONCE)
    said = told + theirs + mine
    connection.sendall(mine + _code(key, b"first" + said))
    if not hmac.compare_digest(exactly(connection, CODE, until), _code(key, b"other" + said)):
        raise NotOurs("a peer that does not know the job's token")
    return Channel(connection, _code(key, b"from first" + said), _code(key, b"from other" + said), node)


def exactly(connection: socket.socket, length: int, until: float) -> bytes:
    """That many bytes. `EOFError`: the peer has closed before; `TimeoutError`: they are not there by then."""
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
