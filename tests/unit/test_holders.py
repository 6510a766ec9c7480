"""Places that holders share: a flood ends its own connections, and a holder has its share and no more."""

from __future__ import annotations

import os
import socket

import pytest

from shoal.holders import UNKNOWN, SharedSlots, holder_of, peer_of, user_of

CROWD, FEW = "10.6.6.6", "10.0.0.1"


def entered(slots: SharedSlots[str], holder: str, count: int) -> list[str]:
    links = [f"{holder} #{number}" for number in range(count)]
    assert all(slots.enter(link, holder) for link in links)
    return links


def test_newcomer_gets_the_place_that_the_largest_holder_has_left_idle_longest() -> None:
    ended: list[str] = []
    slots = SharedSlots(20, ended.append)
    entered(slots, FEW, 4)
    crowd = entered(slots, CROWD, 16)
    slots.begin(crowd[0])
    slots.wait(crowd[0])
    assert slots.enter("newcomer", "10.0.0.2")
    assert ended == [crowd[1]]
    assert len(slots) == 20


def test_busy_connections_are_ended_last_and_where_nobody_has_more_there_is_no_room() -> None:
    ended: list[str] = []
    slots = SharedSlots(4, ended.append)
    busy = entered(slots, CROWD, 4)
    for link in busy:
        slots.begin(link)
    slots.wait(busy[2])
    for number in range(3):
        is_in = slots.enter(f"newcomer {number}", FEW)
        slots.begin(f"newcomer {number}")
        assert is_in == (number < 2)
    assert ended == [busy[2], busy[0]]
    slots.wait(busy[3])
    assert slots.enter("newcomer 3", FEW), "an idle one makes room whoever has it"
    assert ended[2:] == [busy[3]]


def test_holder_with_its_whole_share_loses_its_own_idle_connection_and_no_other() -> None:
    ended: list[str] = []
    slots = SharedSlots(20, ended.append, most_each=5)
    entered(slots, FEW, 4)
    crowd = entered(slots, CROWD, 5)
    for link in crowd[:4]:
        slots.begin(link)
    assert slots.enter("one more", CROWD)
    assert ended == [crowd[4]]
    slots.begin("one more")
    assert not slots.enter("one too many", CROWD)
    assert slots.enter("another", FEW)


def test_connection_that_changes_its_holder_is_counted_once_and_stays_where_there_is_no_room() -> None:
    ended: list[str] = []
    slots = SharedSlots(20, ended.append, most_each=2)
    for link in entered(slots, CROWD, 2):
        slots.begin(link)
    [mine] = entered(slots, FEW, 1)
    slots.begin(mine)
    assert not slots.enter(mine, CROWD)
    assert slots.enter("second", FEW)
    assert slots.enter(mine, "10.0.0.2")
    assert slots.enter("third", FEW)
    assert (len(slots), ended) == (5, [])


def test_places_come_back_and_nothing_is_remembered_of_them() -> None:
    slots = SharedSlots[str](8, str.strip, most_each=4)
    for _ in range(3):
        for link in entered(slots, CROWD, 4):
            slots.begin(link)
            slots.leave(link)
            slots.leave(link)
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


def test_users_of_this_machine_are_told_apart_where_places_are_scarce() -> None:
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
