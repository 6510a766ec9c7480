"""The page of memory that a supervisor and its ranks share."""

from __future__ import annotations

import mmap
import os

import pytest

from shoal.runtime.board import SIZE, Beat, Board, Place, Request, Standing


def test_what_one_side_writes_the_other_reads() -> None:
    fd, ours = Board.make()
    theirs = Board(os.dup(fd))
    place = Place(generation=0, rank=5, local_rank=1, master_port=29500)
    assert theirs.place(1) is None
    ours.assign(1, place)
    assert theirs.place(1) == place
    theirs.say(1, Standing.JOINED, 0, 17, 123)
    assert ours.beat(1) == Beat(standing=Standing.JOINED, generation=0, step=17, at_ns=123)
    assert ours.beat(0).standing is Standing.UNKNOWN


def test_slot_of_a_process_that_is_gone_says_nothing_about_the_next() -> None:
    _, board = Board.make()
    board.assign(0, Place(generation=3, rank=0, local_rank=0, master_port=1))
    board.say(0, Standing.JOINED, 3, 9, 9)
    board.clear(0)
    assert board.place(0) is None
    assert board.beat(0).standing is Standing.UNKNOWN


def test_nonsense_from_a_rank_is_no_standing() -> None:
    _, board = Board.make()
    for number in (-1, 99, -(1 << 63)):
        board.say(0, number, 0, 0, 0)  # type: ignore[arg-type]
        assert board.beat(0).standing is Standing.UNKNOWN


def test_what_a_request_means_is_told_in_words_that_other_versions_know() -> None:
    """Ranks bring a version of their own. Earlier ones save on 1 and go on all else, and know of no 2."""
    fd, ours = Board.make()
    theirs, raw = Board(os.dup(fd)), memoryview(mmap.mmap(fd, SIZE)).cast("q")
    assert (theirs.request, raw[0]) == (Request.UNTOLD, 0)
    for request, word in ((Request.SAVE, 1), (Request.GO, 2)):
        ours.tell(request)
        assert (theirs.request, raw[0]) == (request, word)
    raw[0] = 3
    assert theirs.request is Request.GO


def test_only_who_never_left_an_earlier_group_is_behind() -> None:
    def beat(standing: Standing, generation: int) -> Beat:
        return Beat(standing=standing, generation=generation, step=9, at_ns=0)

    assert beat(Standing.JOINED, 1).is_behind(2)
    assert beat(Standing.WAITING, 1).is_behind(2)
    assert not beat(Standing.JOINED, 2).is_behind(2)
    assert not beat(Standing.WAITING, 2).is_behind(2), "it waits for a newcomer, or has lost a peer just now"
    assert not beat(Standing.UNKNOWN, 0).is_behind(2), "it is being built"


def test_who_has_no_more_to_do_in_its_group_is_in_it_still() -> None:
    def is_in(standing: Standing, generation: int) -> bool:
        return Beat(standing=standing, generation=1, step=9, at_ns=0).is_in(generation)

    assert [is_in(standing, 1) for standing in Standing] == [False, False, True, True, True]
    assert not any(is_in(standing, 2) for standing in Standing)


def test_time_for_which_collectives_wait_is_told_however_long_it_is() -> None:
    _, board = Board.make()
    board.wait_for(0, 7200.5)
    assert board.beat(0).timeout_s == 7200
    board.wait_for(0, float("inf"))
    assert board.beat(0).timeout_s > 1e9


def test_a_rank_cannot_cut_the_page_off_beneath_its_supervisor() -> None:
    fd, _ = Board.make()
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
