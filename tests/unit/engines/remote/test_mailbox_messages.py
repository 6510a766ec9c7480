"""What node agents say at the mailbox, and what of it is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.engines import spool_directory
from shoal.engines.base import LogChunk
from shoal.engines.disk import read_page
from shoal.engines.remote.mailbox import AssignmentRecord, Mailbox
from shoal.errors import StateError
from shoal.runtime.files import spool
from shoal.wire import MAX_OUTCOME_MESSAGE, EndKind, TaskOutcome
from tests.unit.engines.remote.test_mailbox_terms import ORDER, desk, fetch, told

END = TaskOutcome(attempt_id="att_1", epoch=1, node="n1", kind=EndKind.SUCCEEDED, ended_at=1_800_000_001.0)


@pytest.fixture
def taken(tmp_path: Path) -> Mailbox:
    created = desk(tmp_path, 1)
    created.add((ORDER,), None)
    created.assign(fetch("one"))
    return created


@pytest.mark.parametrize("wrong", [{"attempt_id": "att_2"}, {"epoch": 2}, {"node": "n2"}, {"replacement": 1}])
def test_outcome_of_another_task_is_refused_and_not_stored(taken: Mailbox, wrong: dict[str, object]) -> None:
    outcome = msgspec.structs.replace(END, **wrong)
    with pytest.raises(StateError, match="not about the task"):
        taken.receive(msgspec.structs.replace(told("one"), outcome=outcome), b"")
    task = taken.find("att_1")["n1"]
    assert (task.outcome, spool.read_outcome(task.files)) == (None, None)


@pytest.mark.parametrize("wrong", [{"epoch": 2}, {"replacement": 1}])
def test_status_report_of_another_task_is_refused(taken: Mailbox, wrong: dict[str, object]) -> None:
    with pytest.raises(StateError, match="not about the task"):
        taken.receive(msgspec.structs.replace(told("one"), **wrong), b"line\n")


def test_message_of_an_outcome_is_cut_at_its_limit(taken: Mailbox) -> None:
    outcome = msgspec.structs.replace(END, message="x" * (MAX_OUTCOME_MESSAGE + 1))
    assert taken.receive(msgspec.structs.replace(told("one"), outcome=outcome), b"").is_recorded
    kept = spool.read_outcome(taken.find("att_1")["n1"].files)
    assert kept is not None
    assert len(kept.message) == MAX_OUTCOME_MESSAGE


def test_log_archived_during_a_read_is_read_whole(taken: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    taken.receive(msgspec.structs.replace(told("one"), outcome=END), b"line\n")

    def forgotten_first(*args: Any, **kwargs: Any) -> LogChunk:
        taken.forget("att_1")
        return read_page(*args, **kwargs)

    monkeypatch.setattr(spool_directory, "read_page", forgotten_first)
    assert taken.read_log("att_1", "n1", 0, 100).data == b"line\n"


def test_partly_written_log_on_a_full_disk_does_not_count_as_whole(
    taken: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, room = b"first\nsecond\nlast\n", [9]
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
        taken.receive(end, message)
    assert taken.find("att_1")["n1"].outcome is None
    room[0] = 100
    assert taken.receive(end, message).is_recorded
    assert taken.read_log("att_1", "n1", 0, 100).data == message


@pytest.mark.parametrize("process", ["", "one", "0" * 31, "g" * 32, "0" * 32 + "\n"])
def test_short_process_name_is_refused(process: str) -> None:
    for text in (fetch(process), told(process)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(msgspec.to_builtins(text), type(text))


def half_closed(mailbox: Mailbox) -> None:
    """As who closes a task leaves it when it is killed between its two files."""
    Path(mailbox.find("att_1")["n1"].files.claimed).write_bytes(
        msgspec.json.encode(AssignmentRecord(process="", at=1.0))
    )


def test_half_closed_task_gets_its_outcome_when_the_mailbox_opens(tmp_path: Path) -> None:
    created = desk(tmp_path, 1)
    created.add((ORDER,), None)
    half_closed(created)
    outcome = desk(tmp_path, 2).find("att_1")["n1"].outcome
    assert outcome is not None
    assert outcome.kind is EndKind.LOST


def test_half_closed_task_gets_its_outcome_when_it_is_requested(tmp_path: Path) -> None:
    created = desk(tmp_path, 1)
    created.add((ORDER,), None)
    half_closed(created)
    with pytest.raises(StateError, match="taken back"):
        created.assign(fetch("one"))
    with pytest.raises(StateError):
        created.receive(told(""), b"")
    assert spool.read_outcome(created.find("att_1")["n1"].files) is not None


def test_half_closed_task_gets_its_outcome_when_it_is_stopped(tmp_path: Path) -> None:
    created = desk(tmp_path, 1)
    created.add((ORDER,), None)
    half_closed(created)
    created.stop("att_1", 0.0)
    outcome = created.find("att_1")["n1"].outcome
    assert outcome is not None
    assert outcome.kind is EndKind.STOPPED
