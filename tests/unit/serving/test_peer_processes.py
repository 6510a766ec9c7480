"""Several processes of one port share one limit, whichever process the connections reached."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shoal.serving.balance.service import LiveService
from shoal.serving.peers import SILENT_S, PeerProcesses
from shoal.serving.plane import DataPlane
from shoal.serving.table import CallerLimits, ReplicaConfig, ServiceConfig, ServingTable


class Pair:
    """Two processes of one port, without connections: the test itself admits requests."""

    def __init__(self, limits: CallerLimits | None = None, cap: int = 64, share: float = 0.5) -> None:
        replica = ReplicaConfig(replica_id="r", address="127.0.0.1:1", release=1)
        self.service = ServiceConfig(
            project="p",
            name="s",
            replicas=(replica,),
            cap=cap,
            limits=limits or CallerLimits(),
            is_public=True,
        )
        self.planes = [DataPlane(share=share) for _ in range(2)]
        for plane in self.planes:
            assert plane.swap(ServingTable(version=1, services=(self.service,)))
        self.sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.both = [
            PeerProcesses(plane, link) for plane, link in zip(self.planes, self.sockets, strict=True)
        ]

    @property
    def lives(self) -> list[LiveService]:
        return [plane.services["p", "s"] for plane in self.planes]

    def admits(self, which: int, now: float, caller: str = "ana") -> bool:
        live = self.lives[which]
        return live.admit(live.account(caller), now) is None

    def talk(self, now: float = 0.0) -> None:
        for peer in self.both:
            peer.send_usage(is_full=False)
        for peer in self.both:
            peer.receive_usage(now)

    def close(self) -> None:
        for link in self.sockets:
            link.close()


@pytest.fixture(autouse=True)
async def in_a_loop() -> None:
    """Data planes need a running event loop."""
    await asyncio.sleep(0)


async def test_caller_whose_connections_are_all_in_one_process_has_its_whole_rate_there() -> None:
    pair = Pair(CallerLimits(rps=10.0))
    let_in = 0
    for tenth in range(101):
        let_in += sum(pair.admits(0, tenth / 10) for _ in range(5))
        pair.talk(tenth / 10)
    assert 100 <= let_in <= 106
    pair.close()


async def test_two_processes_together_admit_one_rate() -> None:
    pair = Pair(CallerLimits(rps=10.0))
    let_in = 0
    for tenth in range(201):
        let_in += sum(pair.admits(which, tenth / 10) for _ in range(3) for which in (0, 1))
        pair.talk(tenth / 10)
    assert 195 <= let_in <= 220
    pair.close()


async def test_concurrent_requests_are_counted_over_both_processes() -> None:
    pair = Pair(CallerLimits(concurrency=4))
    assert [pair.admits(0, 0.0) for _ in range(5)] == [True] * 4 + [False]
    pair.lives[1].account("ana")
    pair.talk()
    assert not pair.admits(1, 0.0)
    pair.lives[0].account("ana").admitted -= 1
    pair.talk()
    assert pair.admits(1, 0.0)
    pair.close()


async def test_small_limit_is_whole_in_each_of_many_processes() -> None:
    """Divided among the processes, it would be none."""
    pair = Pair(CallerLimits(rps=0.5, concurrency=1), cap=1, share=1 / 64)
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


async def test_caller_whose_requests_ended_has_its_whole_limit_in_every_process() -> None:
    pair = Pair(CallerLimits(concurrency=1))
    pair.lives[1].account("ana")
    assert pair.admits(0, 0.0)
    pair.talk()
    assert not pair.admits(1, 0.0)
    pair.lives[0].account("ana").admitted -= 1
    pair.talk()
    assert pair.admits(1, 0.0), "it was refused for ever: nobody said that the other one had nothing"
    pair.close()


async def test_lost_message_that_a_caller_uses_nothing_is_repeated() -> None:
    pair = Pair(CallerLimits(concurrency=1))
    pair.lives[1].account("ana")
    assert pair.admits(0, 0.0)
    pair.talk()
    pair.lives[0].account("ana").admitted -= 1
    pair.both[0].send_usage(is_full=False)
    pair.sockets[1].recv(1 << 20)  # lost
    pair.both[0].send_usage(is_full=True)
    pair.both[1].receive_usage(0.0)
    assert pair.admits(1, 0.0)
    pair.close()


async def test_process_may_use_what_others_leave_of_a_replica_and_at_least_its_own_part() -> None:
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


async def test_process_that_is_gone_counts_as_using_nothing() -> None:
    pair = Pair(CallerLimits(concurrency=4), cap=8)
    pair.lives[0].account("ana")
    assert all(pair.admits(1, 0.0) for _ in range(4))
    pair.lives[1].replicas["r"].outstanding = 3
    pair.talk()
    assert not pair.admits(0, 0.0)
    pair.both[0].forget_silent(1e9 + SILENT_S)
    assert pair.admits(0, 0.0)
    assert pair.lives[0].replicas["r"].cap == 8
    pair.close()
