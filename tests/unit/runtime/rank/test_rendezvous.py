"""The rendezvous of a round: all of its ranks, no others, and no longer when the round is over."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

from shoal.runtime.rank import process_group
from shoal.runtime.rank.board import RankAssignment
from shoal.runtime.rank.process_group import OvertakenError, rendezvous
from tests.support.runtime.training_ranks import free_port

LONG_S = 60.0


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("SHOAL_ATTEMPT_ID", "att_1")


def a_member(*, is_overtaken: bool = False) -> Any:
    return SimpleNamespace(is_overtaken=is_overtaken)


def place(rank: int, port: int, generation: int = 1) -> RankAssignment:
    return RankAssignment(rendezvous_round=generation, rank=rank, local_rank=rank, master_port=port)


def come(rank: int, port: int, generation: int = 1) -> tuple[threading.Thread, list[object], Any]:
    """Start a rank's rendezvous in a thread. Return the thread, its result and its membership."""
    member, outcome = a_member(), list[object]()

    def run() -> None:
        try:
            outcome.append(rendezvous(member, place(rank, port, generation), LONG_S))
        except OvertakenError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome, member


def test_ranks_meet_at_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    port = free_port()
    ranks = [come(rank, port) for rank in range(2)]
    for thread, outcome, _ in ranks:
        thread.join(LONG_S)
        store: Any = outcome[0]
        assert store.timeout == timedelta(seconds=LONG_S), "which is for connecting no longer"


@pytest.mark.parametrize(("attempt", "generation"), [("att_2", 1), ("att_1", 0)])
def test_rank_of_another_group_that_came_to_the_wrong_port_is_not_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch, attempt: str, generation: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    port = free_port()
    ours = come(0, port)
    waiting = TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=LONG_S), wait_for_workers=False)
    waiting.wait(["shoal/att_1/1/here"])
    monkeypatch.setenv("SHOAL_ATTEMPT_ID", attempt)
    stray = come(1, port, generation)
    waiting.wait([f"shoal/{attempt}/{generation}/here"])
    with pytest.raises(DistStoreError):
        waiting.wait(["shoal/att_1/1/together"], timedelta(seconds=0.3))
    for thread, outcome, member in (stray, ours):
        member.is_overtaken = True
        thread.join(LONG_S)
        assert isinstance(outcome[0], OvertakenError)


def test_group_that_is_over_when_all_have_come_is_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(OvertakenError):
        rendezvous(a_member(is_overtaken=True), place(0, free_port()), LONG_S)


@pytest.fixture
def lost_store() -> Iterator[int]:
    """A port of a rank 0 that is lost whenever another rank connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_rank_that_comes_to_a_store_that_is_just_lost_hears_of_the_next_group(
    monkeypatch: pytest.MonkeyPatch, lost_store: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(process_group, "CONNECT_S", 0.2)
    with pytest.raises(OvertakenError):
        rendezvous(a_member(is_overtaken=True), place(1, lost_store), LONG_S)
