"""Several processes of one port: a limit is one limit, wherever the connections came to."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shoal.serving.neighbours import SILENT_S, Neighbours
from shoal.serving.plane import DataPlane
from shoal.serving.service import LiveService
from shoal.serving.table import Limits, Replica, Service, Table


class Pair:
    """Two processes of one port, without connections: who is let in, the test says."""

    def __init__(self, limits: Limits | None = None, cap: int = 64, share: float = 0.5) -> None:
        replica = Replica(replica_id="r", address="127.0.0.1:1", release=1)
        self.service = Service(
            project="p", name="s", replicas=(replica,), cap=cap, limits=limits or Limits(), is_public=True
        )
        self.planes = [DataPlane(share=share) for _ in range(2)]
        for plane in self.planes:
            assert plane.swap(Table(version=1, services=(self.service,)))
        self.sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.both = [Neighbours(plane, link) for plane, link in zip(self.planes, self.sockets, strict=True)]

    @property
    def lives(self) -> list[LiveService]:
        return [plane.services["p", "s"] for plane in self.planes]

    def admits(self, which: int, now: float, caller: str = "ana") -> bool:
        live = self.lives[which]
        return live.admit(live.account(caller), now) is None

    def talk(self, now: float = 0.0) -> None:
        for one in self.both:
            one.tell(is_full=False)
        for one in self.both:
            one.listen(now)

    def close(self) -> None:
        for link in self.sockets:
            link.close()


@pytest.fixture(autouse=True)
async def in_a_loop() -> None:
    """Data planes want one."""
    await asyncio.sleep(0)


async def test_caller_whose_connections_are_all_in_one_process_has_its_whole_rate_there() -> None:
    pair = Pair(Limits(rps=10.0))
    let_in = 0
    for tenth in range(101):
        let_in += sum(pair.admits(0, tenth / 10) for _ in range(5))
        pair.talk(tenth / 10)
    assert 100 <= let_in <= 106
    pair.close()


async def test_both_together_let_through_one_rate() -> None:
    pair = Pair(Limits(rps=10.0))
    let_in = 0
    for tenth in range(201):
        let_in += sum(pair.admits(which, tenth / 10) for _ in range(3) for which in (0, 1))
        pair.talk(tenth / 10)
    assert 195 <= let_in <= 220
    pair.close()


async def test_requests_at_once_are_counted_over_both() -> None:
    pair = Pair(Limits(concurrency=4))
    assert [pair.admits(0, 0.0) for _ in range(5)] == [True] * 4 + [False]
    pair.lives[1].account("ana")
    pair.talk()
    assert not pair.admits(1, 0.0)
    pair.lives[0].account("ana").admitted -= 1
    pair.talk()
    assert pair.admits(1, 0.0)
    pair.close()


async def test_small_limit_is_whole_in_each_of_many_processes() -> None:
    """A part of it for each would be none."""
    pair = Pair(Limits(rps=0.5, concurrency=1), cap=1, share=1 / 64)
    for live in pair.lives:
        live.account("ana")
    for which in (0, 1):
        for turn in (1, 2, 3):
            now = which * 100.0 + turn * 2.0
            assert pair.admits(which, now)
            pair.talk(now)
            assert not pair.admits(1 - which, now)
            pair.lives[which].account("ana").admitted -= 1
            pair.talk(now)
        assert pair.lives[which].replicas["r"].cap == 1
    pair.close()


async def test_caller_that_has_nothing_any_more_has_its_whole_limit_everywhere() -> None:
    pair = Pair(Limits(concurrency=1))
    pair.lives[1].account("ana")
    assert pair.admits(0, 0.0)
    pair.talk()
    assert not pair.admits(1, 0.0)
    pair.lives[0].account("ana").admitted -= 1
    pair.talk()
    assert pair.admits(1, 0.0), "it was refused for ever: nobody said that the other one had nothing"
    pair.close()


async def test_word_that_a_caller_has_nothing_is_said_again_where_it_was_lost() -> None:
    pair = Pair(Limits(concurrency=1))
    pair.lives[1].account("ana")
    assert pair.admits(0, 0.0)
    pair.talk()
    pair.lives[0].account("ana").admitted -= 1
    pair.both[0].tell(is_full=False)
    pair.sockets[1].recv(1 << 20)  # lost
    pair.both[0].tell(is_full=True)
    pair.both[1].listen(0.0)
    assert pair.admits(1, 0.0)
    pair.close()


async def test_replica_has_room_for_what_others_leave_and_for_ones_own_part_in_any_case() -> None:
    pair = Pair(cap=8)
    mine, its = (live.replicas["r"] for live in pair.lives)
    assert mine.cap == 8
    its.outstanding = 3
    pair.talk()
    assert mine.cap == 5
    its.outstanding = 8
    pair.talk()
    assert mine.cap == 4
    pair.close()


async def test_process_that_is_gone_has_nothing() -> None:
    pair = Pair(Limits(concurrency=4), cap=8)
    pair.lives[0].account("ana")
    assert all(pair.admits(1, 0.0) for _ in range(4))
    pair.lives[1].replicas["r"].outstanding = 3
    pair.talk()
    assert not pair.admits(0, 0.0)
    pair.both[0].forget_silent(1e9 + SILENT_S)
    assert pair.admits(0, 0.0)
    assert pair.lives[0].replicas["r"].cap == 8
    pair.close()
