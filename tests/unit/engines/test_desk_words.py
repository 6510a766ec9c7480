"""What keepers say at the desk, and what of it is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.engines import desk as desk_module
from shoal.engines.base import LogChunk
from shoal.engines.desk import Desk, Taken
from shoal.engines.log_pages import read_page
from shoal.errors import StateError
from shoal.runtime import spool
from shoal.wire import MAX_OUTCOME_MESSAGE, EndKind, NodeOutcome
from tests.unit.engines.test_desk_terms import ORDER, desk, fetch, told

END = NodeOutcome(attempt_id="att_1", epoch=1, node="n1", kind=EndKind.SUCCEEDED, ended_at=1_800_000_001.0)


@pytest.fixture
def taken(tmp_path: Path) -> Desk:
    made = desk(tmp_path, 1)
    made.add((ORDER,), None)
    made.take(fetch("one"))
    return made


@pytest.mark.parametrize("wrong", [{"attempt_id": "att_2"}, {"epoch": 2}, {"node": "n2"}, {"incarnation": 1}])
def test_an_outcome_of_another_share_is_refused_and_not_kept(taken: Desk, wrong: dict[str, object]) -> None:
    outcome = msgspec.structs.replace(END, **wrong)
    with pytest.raises(StateError, match="not about the share"):
        taken.hear(msgspec.structs.replace(told("one"), outcome=outcome), b"")
    share = taken.find("att_1")["n1"]
    assert (share.outcome, spool.read_outcome(share.files)) == (None, None)


@pytest.mark.parametrize("wrong", [{"epoch": 2}, {"incarnation": 1}])
def test_a_word_for_another_share_is_refused(taken: Desk, wrong: dict[str, object]) -> None:
    with pytest.raises(StateError, match="not about the share"):
        taken.hear(msgspec.structs.replace(told("one"), **wrong), b"line\n")


def test_an_outcome_says_no_more_than_its_limit(taken: Desk) -> None:
    outcome = msgspec.structs.replace(END, message="x" * (MAX_OUTCOME_MESSAGE + 1))
    assert taken.hear(msgspec.structs.replace(told("one"), outcome=outcome), b"").is_recorded
    kept = spool.read_outcome(taken.find("att_1")["n1"].files)
    assert kept is not None
    assert len(kept.message) == MAX_OUTCOME_MESSAGE


def test_a_log_that_is_forgotten_while_it_is_read_is_read_whole(
    taken: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken.hear(msgspec.structs.replace(told("one"), outcome=END), b"line\n")

    def forgotten_first(*args: Any, **kwargs: Any) -> LogChunk:
        taken.forget("att_1")
        return read_page(*args, **kwargs)

    monkeypatch.setattr(desk_module, "read_page", forgotten_first)
    assert taken.read_log("att_1", "n1", 0, 100).data == b"line\n"


def test_a_log_that_a_nearly_full_disk_takes_in_part_is_not_recorded_as_whole(
    taken: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, room = b"first\nsecond\nlast\n", [9]
    pwrite = os.pwrite

    def pwrite_while_there_is_room(fd: int, data: bytes, at: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = pwrite(fd, data[: room[0]], at)
        room[0] -= done
        return done

    monkeypatch.setattr(os, "pwrite", pwrite_while_there_is_room)
    end = msgspec.structs.replace(told("one"), outcome=END)
    with pytest.raises(OSError, match="No space"):
        taken.hear(end, said)
    assert taken.find("att_1")["n1"].outcome is None
    room[0] = 100
    assert taken.hear(end, said).is_recorded
    assert taken.read_log("att_1", "n1", 0, 100).data == said


@pytest.mark.parametrize("process", ["", "one", "0" * 31, "g" * 32, "0" * 32 + "\n"])
def test_a_process_has_a_name_that_nobody_guesses(process: str) -> None:
    for words in (fetch(process), told(process)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(msgspec.to_builtins(words), type(words))


def half_closed(made: Desk) -> None:
    """As who closes a share leaves it when it is killed between its two files."""
    Path(made.find("att_1")["n1"].files.claimed).write_bytes(msgspec.json.encode(Taken(process="", at=1.0)))


def test_a_share_that_was_closed_without_an_end_is_ended_when_found(tmp_path: Path) -> None:
    made = desk(tmp_path, 1)
    made.add((ORDER,), None)
    half_closed(made)
    outcome = desk(tmp_path, 2).find("att_1")["n1"].outcome
    assert outcome is not None
    assert outcome.kind is EndKind.LOST


def test_a_share_that_another_closed_is_ended_by_who_is_asked_for_it(tmp_path: Path) -> None:
    made = desk(tmp_path, 1)
    made.add((ORDER,), None)
    half_closed(made)
    with pytest.raises(StateError, match="taken back"):
        made.take(fetch("one"))
    with pytest.raises(StateError):
        made.hear(told(""), b"")
    assert spool.read_outcome(made.find("att_1")["n1"].files) is not None


def test_a_share_that_another_closed_is_stopped_for_good(tmp_path: Path) -> None:
    made = desk(tmp_path, 1)
    made.add((ORDER,), None)
    half_closed(made)
    made.stop("att_1", 0.0)
    outcome = made.find("att_1")["n1"].outcome
    assert outcome is not None
    assert outcome.kind is EndKind.STOPPED
