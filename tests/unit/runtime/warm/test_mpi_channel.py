"""The channel between two nodes of an MPI world. Only nodes of one rank group can connect, and no attacker
between them can change a message.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.runtime.warm import mpi_rendezvous
from shoal.runtime.warm.mpi_rendezvous import MAGIC, Channel, UntrustedPeer, authenticate, introduce, key_of

KEY = key_of("token", "att_1 1 0 0")
HERE = "127.0.0.1"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, other = socket.socketpair()
    with first, other:
        yield first, other


def introduced(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> tuple[Channel, Channel]:
    first, other = pool.submit(authenticate, ends[0], KEY, 2), pool.submit(introduce, ends[1], KEY, 1)
    return first.result(10), other.result(10)


def test_nodes_of_one_world_talk(pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]) -> None:
    first, other = introduced(pool, ends)
    for number in range(3):
        first.send({"start": f"daemon {number}"})
        assert other.receive() == {"start": f"daemon {number}"}
        other.send({"status": number})
        assert first.receive() == {"status": number}
    other.close()
    assert first.receive() is None


@pytest.mark.parametrize("world", ["att_2 1 0 0", "att_1 2 0 0", "att_1 1 1 0", "att_1 1 0 1"])
def test_node_of_another_attempt_or_of_an_older_group_is_turned_away(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket], world: str
) -> None:
    first = pool.submit(authenticate, ends[0], KEY, 2)
    with pytest.raises(UntrustedPeer):
        introduce(ends[1], key_of("token", world), 1)
    ends[1].close()
    with pytest.raises((UntrustedPeer, EOFError, OSError)):
        first.result(10)


def test_first_node_rejects_a_peer_that_replays_a_message(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> None:
    first = pool.submit(authenticate, ends[0], KEY, 2)
    ends[1].sendall(MAGIC + (1).to_bytes(4, "big") + bytes(32))
    code = ends[1].recv(64, socket.MSG_WAITALL)[32:]
    ends[1].sendall(code)
    with pytest.raises(UntrustedPeer):
        first.result(10)


@pytest.mark.parametrize("node", [0, 2, 1 << 31])
def test_guest_with_the_number_of_no_other_node_is_turned_away(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket], node: int
) -> None:
    first = pool.submit(authenticate, ends[0], KEY, 2)
    ends[1].sendall(MAGIC + node.to_bytes(4, "big") + bytes(32))
    with pytest.raises(UntrustedPeer):
        first.result(10)


@pytest.mark.parametrize("meddle", ["change", "repeat", "reflect", "drop"])
def test_message_that_was_meddled_with_is_refused(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket], meddle: str
) -> None:
    first, other = introduced(pool, ends)
    first.send({"start": "a"})
    one = ends[1].recv(4096)
    if meddle == "change":
        ends[0].sendall(one[:-1] + b"]")
    elif meddle == "repeat":
        ends[0].sendall(one)
        assert other.receive() == {"start": "a"}
        ends[0].sendall(one)
    elif meddle == "drop":
        first.send({"start": "b"})
    receiver = other
    if meddle == "reflect":
        ends[1].sendall(one)
        receiver = first
    with pytest.raises(UntrustedPeer):
        receiver.receive()


def test_world_forms_despite_silent_or_talkative_strangers(pool: ThreadPoolExecutor) -> None:
    port = _free_port()
    gathered = pool.submit(mpi_rendezvous.gather, HERE, port, KEY, 3, "mpirun")
    strangers = [_reach(port) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    joined = [pool.submit(mpi_rendezvous.join, HERE, port, KEY, node) for node in (2, 1)]
    peers, is_simulated = gathered.result(20)
    others = [one.result(20) for one in joined]
    assert [is_simulated, *(simulated for _, simulated in others)] == [True, True, True]
    assert sorted(peers) == [1, 2]
    peers[2].send({"over": 0})
    assert others[0][0].receive() == {"over": 0}
    peers[1].close()
    assert others[1][0].receive() is None
    with socket.create_server((HERE, port)):
        """The port is free again for the program of the ranks."""
    for channel in (*peers.values(), *(channel for channel, _ in others)):
        channel.close()
    for stranger in strangers:
        stranger.close()


def test_silent_strangers_do_not_lock_out_nodes_of_the_world(
    pool: ThreadPoolExecutor,
) -> None:
    port = _free_port()
    gathered = pool.submit(mpi_rendezvous.gather, HERE, port, KEY, 2, "mpirun")
    strangers = [_reach(port) for _ in range(mpi_rendezvous.MAX_PENDING + 1)]
    strangers[0].settimeout(20)
    assert strangers[0].recv(1) == b"", "the oldest goes for one more"
    joined = pool.submit(mpi_rendezvous._try_join, HERE, port, KEY, 1, time.monotonic() + 20)
    peers, _ = gathered.result(20)
    channel, _ = joined.result(20)
    for one in (*peers.values(), channel):
        one.close()
    for stranger in strangers:
        stranger.close()


def test_flood_of_one_address_ends_no_pending_peer_of_another() -> None:
    guests, pairs = (
        mpi_rendezvous.PendingPeers(),
        [socket.socketpair() for _ in range(mpi_rendezvous.MAX_PENDING + 10)],
    )
    mine, *flood = [pair[0] for pair in pairs]
    guests.add(mine, "10.0.0.1")
    for one in flood:
        guests.add(one, "10.6.6.6")
    assert [guests.remove(one) for one in flood].count(False) == 10
    assert guests.remove(mine)
    for pair in pairs:
        pair[0].close()
        pair[1].close()


def test_node_waits_while_another_program_answers_where_the_first_should(pool: ThreadPoolExecutor) -> None:
    port = _free_port()
    with socket.create_server((HERE, port)) as other_program:
        joined = pool.submit(mpi_rendezvous.join, HERE, port, KEY, 1)
        connection, _ = other_program.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
        connection.close()
    peers, _ = mpi_rendezvous.gather(HERE, port, KEY, 2, "mpirun")
    channel, _ = joined.result(20)
    peers[1].send({"over": 3})
    assert channel.receive() == {"over": 3}
    channel.close()
    peers[1].close()


def _free_port() -> int:
    with socket.create_server((HERE, 0)) as probe:
        return int(probe.getsockname()[1])


def _reach(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((HERE, port))
        except ConnectionRefusedError:
            continue
