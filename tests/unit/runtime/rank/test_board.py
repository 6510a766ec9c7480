"""The page of memory that a supervisor and its ranks share."""

from __future__ import annotations

import mmap
import os

import pytest

from shoal.runtime.rank.board import SIZE, Heartbeat, RankAssignment, RankBoard, RankStatus, StopRequest


def test_what_one_side_writes_the_other_reads() -> None:
    fd, ours = RankBoard.create()
    theirs = RankBoard(os.dup(fd))
    place = RankAssignment(rendezvous_round=0, rank=5, local_rank=1, master_port=29500)
    assert theirs.assignment(1) is None
    ours.assign(1, place)
    assert theirs.assignment(1) == place
    theirs.write_status(1, RankStatus.JOINED, 0, 17, 123)
    assert ours.heartbeat(1) == Heartbeat(status=RankStatus.JOINED, rendezvous_round=0, step=17, at_ns=123)
    assert ours.heartbeat(0).status is RankStatus.UNKNOWN


def test_slot_of_a_process_that_is_gone_says_nothing_about_the_next() -> None:
    _, board = RankBoard.create()
    board.assign(0, RankAssignment(rendezvous_round=3, rank=0, local_rank=0, master_port=1))
    board.write_status(0, RankStatus.JOINED, 3, 9, 9)
    board.clear(0)
    assert board.assignment(0) is None
    assert board.heartbeat(0).status is RankStatus.UNKNOWN


def test_nonsense_from_a_rank_is_no_standing() -> None:
    _, board = RankBoard.create()
    for number in (-1, 99, -(1 << 63)):
        board.write_status(0, number, 0, 0, 0)  # type: ignore[arg-type]
        assert board.heartbeat(0).status is RankStatus.UNKNOWN


def test_stop_request_is_understood_by_other_versions() -> None:
    """Ranks bring their own version of Shoal. Earlier ones save on 1, and exit on every other value."""
    fd, ours = RankBoard.create()
    theirs, raw = RankBoard(os.dup(fd)), memoryview(mmap.mmap(fd, SIZE)).cast("q")
    assert (theirs.stop_request, raw[0]) == (StopRequest.UNKNOWN, 0)
    for request, word in ((StopRequest.SAVE, 1), (StopRequest.EXIT, 2)):
        ours.set_stop_request(request)
        assert (theirs.stop_request, raw[0]) == (request, word)
    raw[0] = 3
    assert theirs.stop_request is StopRequest.EXIT


def test_only_a_rank_that_never_left_an_earlier_round_is_behind() -> None:
    def beat(standing: RankStatus, generation: int) -> Heartbeat:
        return Heartbeat(status=standing, rendezvous_round=generation, step=9, at_ns=0)

    assert beat(RankStatus.JOINED, 1).is_behind(2)
    assert beat(RankStatus.WAITING, 1).is_behind(2)
    assert not beat(RankStatus.JOINED, 2).is_behind(2)
    assert not beat(RankStatus.WAITING, 2).is_behind(2), (
        "it waits for a newcomer, or has lost a peer just now"
    )
    assert not beat(RankStatus.UNKNOWN, 0).is_behind(2), "it is being built"


def test_rank_that_has_finished_its_steps_is_still_in_its_group() -> None:
    def is_in(standing: RankStatus, generation: int) -> bool:
        return Heartbeat(status=standing, rendezvous_round=1, step=9, at_ns=0).is_in(generation)

    assert [is_in(standing, 1) for standing in RankStatus] == [False, False, True, True, True]
    assert not any(is_in(standing, 2) for standing in RankStatus)


def test_timeout_of_collectives_is_reported_up_to_its_maximum() -> None:
    _, board = RankBoard.create()
    board.write_timeout(0, 7200.5)
    assert board.heartbeat(0).timeout_s == 7200
    board.write_timeout(0, float("inf"))
    assert board.heartbeat(0).timeout_s > 1e9


def test_a_rank_cannot_cut_the_page_off_beneath_its_supervisor() -> None:
    fd, _ = RankBoard.create()
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
