"""The connection quota: a flood ends its own connections, and no holder exceeds its limit."""

from __future__ import annotations

import os
import socket

import pytest

from shoal.connection_quota import UNKNOWN, ConnectionQuota, holder_of, peer_of, user_of

CROWD, FEW = "10.6.6.6", "10.0.0.1"


def entered(slots: ConnectionQuota[str], holder: str, count: int) -> list[str]:
    links = [f"{holder} #{number}" for number in range(count)]
    assert all(slots.admit(link, holder) for link in links)
    return links


def test_new_connection_replaces_the_longest_idle_one_of_the_largest_holder() -> None:
    ended: list[str] = []
    slots = ConnectionQuota(20, ended.append)
    entered(slots, FEW, 4)
    crowd = entered(slots, CROWD, 16)
    slots.mark_busy(crowd[0])
    slots.mark_idle(crowd[0])
    assert slots.admit("newcomer", "10.0.0.2")
    assert ended == [crowd[1]]
    assert len(slots) == 20


def test_busy_connections_are_ended_last_and_only_of_a_larger_holder() -> None:
    ended: list[str] = []
    slots = ConnectionQuota(4, ended.append)
    busy = entered(slots, CROWD, 4)
    for link in busy:
        slots.mark_busy(link)
    slots.mark_idle(busy[2])
    for number in range(3):
        is_in = slots.admit(f"newcomer {number}", FEW)
        slots.mark_busy(f"newcomer {number}")
        assert is_in == (number < 2)
    assert ended == [busy[2], busy[0]]
    slots.mark_idle(busy[3])
    assert slots.admit("newcomer 3", FEW), "an idle one makes room whoever has it"
    assert ended[2:] == [busy[3]]


def test_holder_at_its_limit_loses_its_own_idle_connection() -> None:
    ended: list[str] = []
    slots = ConnectionQuota(20, ended.append, most_each=5)
    entered(slots, FEW, 4)
    crowd = entered(slots, CROWD, 5)
    for link in crowd[:4]:
        slots.mark_busy(link)
    assert slots.admit("one more", CROWD)
    assert ended == [crowd[4]]
    slots.mark_busy("one more")
    assert not slots.admit("one too many", CROWD)
    assert slots.admit("another", FEW)


def test_connection_that_changes_its_holder_is_counted_once_and_stays_where_there_is_no_room() -> None:
    ended: list[str] = []
    slots = ConnectionQuota(20, ended.append, most_each=2)
    for link in entered(slots, CROWD, 2):
        slots.mark_busy(link)
    [mine] = entered(slots, FEW, 1)
    slots.mark_busy(mine)
    assert not slots.admit(mine, CROWD)
    assert slots.admit("second", FEW)
    assert slots.admit(mine, "10.0.0.2")
    assert slots.admit("third", FEW)
    assert (len(slots), ended) == (5, [])


def test_released_connections_leave_no_trace() -> None:
    slots = ConnectionQuota[str](8, str.strip, most_each=4)
    for _ in range(3):
        for link in entered(slots, CROWD, 4):
            slots.mark_busy(link)
            slots.release(link)
            slots.release(link)
    assert len(slots) == 0
    assert not slots._count
    assert not slots._idle


@pytest.mark.parametrize(
    "client,peer",
    [
        (None, "-"),
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::1", 5), "::1"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5), "fe80::/64"),
    ],
)
def test_a_peer_is_an_address_or_the_network_one_customer_gets(
    client: tuple[str, int] | None, peer: str
) -> None:
    assert peer_of(client) == peer


def test_local_users_are_separate_holders_when_places_are_scarce() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            link, address = listener.accept()
            with link:
                server = link.getsockname()
                assert holder_of(address, server, is_scarce=False) == "127.0.0.1"
                assert holder_of(address, server, is_scarce=True) == f"127.0.0.1 user {os.getuid()}"
                assert holder_of(("10.1.2.3", 9), server, is_scarce=True) == "10.1.2.3"
            assert client.recv(1) == b""
        assert user_of(("127.0.0.1", 1), listener.getsockname()) == UNKNOWN
