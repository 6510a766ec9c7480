"""Connections of a group are cut, and no others."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from shoal.runtime.rank.process_group import GroupConnections

LONG_S = 30.0


Connect = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Both ends of a new connection, closed after the test."""
    with contextlib.ExitStack() as opened:
        door = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect() -> tuple[socket.socket, socket.socket]:
            here = opened.enter_context(socket.create_connection(door.getsockname(), timeout=LONG_S))
            there = opened.enter_context(door.accept()[0])
            return here, there

        yield connect


def is_cut(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        return line.recv(1) == b""
    except BlockingIOError:
        return False


def test_what_was_opened_for_the_group_is_cut_at_both_ends_and_nothing_else(connect: Connect) -> None:
    before = connect()
    lines = GroupConnections()
    lines.begin(0)
    with socket.socket() as door:
        with lines.recording():
            here, there = connect()
            door.bind(("127.0.0.1", 0))
            door.listen()
        after = connect()
        lines.cut()
        socket.create_connection(door.getsockname(), timeout=LONG_S).close()
    assert is_cut(here)
    assert is_cut(there)
    for line in (*before, *after):
        assert not is_cut(line)


def test_rank_that_waits_for_a_peer_while_forming_a_group_is_released(connect: Connect) -> None:
    lines, came_out, is_inside = GroupConnections(), threading.Event(), threading.Event()
    lines.begin(3)

    def make() -> None:
        with lines.recording():
            here, _ = connect()
            is_inside.set()
            here.recv(1)
        came_out.set()

    threading.Thread(target=make, daemon=True).start()
    assert is_inside.wait(LONG_S)
    lines.cut(3)
    assert not came_out.wait(0.05), "it is of the newest group"
    lines.cut_older(lambda: 4)
    assert came_out.wait(LONG_S)


def test_a_number_that_is_another_sockets_by_now_is_left_alone(connect: Connect) -> None:
    lines = GroupConnections()
    lines.begin(0)
    with lines.recording():
        here, there = connect()
    number = here.fileno()
    here.close()
    newer, newer_there = connect()
    assert newer.fileno() == number
    lines.cut()
    assert not is_cut(newer_there)
    assert is_cut(there), "it was noted too, and closed at the other end"


def test_group_made_while_another_is_made_is_recorded_with_it(connect: Connect) -> None:
    lines = GroupConnections()
    lines.begin(0)
    with lines.recording():
        with lines.recording():
            inner = connect()
        outer = connect()
    lines.begin(1)
    lines.cut()
    assert not is_cut(inner[0]), "nothing is known of an older group once another has begun"
    lines.begin(2)
    with lines.recording():
        again = connect()
    lines.cut()
    assert is_cut(again[1])
    assert not is_cut(outer[0])
