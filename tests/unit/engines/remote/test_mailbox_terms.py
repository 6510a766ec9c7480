"""Two control planes over one mailbox: a task spec is given to one process, whoever of them gives it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from shoal.engines.fake import VirtualClock
from shoal.engines.remote.mailbox import Mailbox
from shoal.errors import Deposed, StateError
from shoal.runtime.files import spool
from shoal.wire import EndKind, StatusReport, TaskSpecRequest
from tests.support.runtime.task_specs import change_task_spec, task_spec_of

ORDER = task_spec_of(
    attempt_id="att_1",
    epoch=1,
    job_id="job_1",
    job_number=1,
    job_name="j",
    project="p",
    node="n1",
    node_rank=0,
    nodes=("n1",),
    ranks_per_node=1,
    run="true",
    cpus=1,
)


def desk(home: Path, term: int) -> Mailbox:
    return Mailbox(home, VirtualClock(1_800_000_000.0), term)


def fetch(process: str, replacement: int = 0) -> TaskSpecRequest:
    return TaskSpecRequest(attempt_id="att_1", node="n1", replacement=replacement, process=process)


def told(process: str) -> StatusReport:
    return StatusReport(attempt_id="att_1", epoch=1, node="n1", process=process)


@pytest.fixture
def old(tmp_path: Path) -> Mailbox:
    created = desk(tmp_path, 4)
    created.add((ORDER,), None)
    return created


def test_task_spec_assigned_late_by_a_deposed_mailbox_is_not_assigned_again(
    old: Mailbox, tmp_path: Path
) -> None:
    new = desk(tmp_path, 5)
    old.assign(fetch("one"))
    with pytest.raises(StateError, match="given to another"):
        new.assign(fetch("two"))
    assert new.assign(fetch("one")).task_spec == ORDER
    assert new.receive(told("one"), b"hello\n").size == 6


def test_deposed_mailbox_does_not_assign_what_its_successor_assigned(old: Mailbox, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    new.assign(fetch("two"))
    with pytest.raises(StateError, match="given to another"):
        old.assign(fetch("one"))
    with pytest.raises(StateError, match="another process"):
        old.receive(told("one"), b"")


def test_successor_accepts_reports_of_a_process_assigned_by_the_deposed_mailbox(
    old: Mailbox, tmp_path: Path
) -> None:
    new = desk(tmp_path, 5)
    old.assign(fetch("one"))
    assert new.receive(told("one"), b"").stop_grace_s is None


def test_deposed_mailbox_does_not_close_a_running_task(old: Mailbox, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    new.assign(fetch("two"))
    assert not old.close(old.find("att_1")["n1"], EndKind.STOPPED, "stopped before it began")
    assert spool.read_outcome(new.find("att_1")["n1"].files) is None
    assert desk(tmp_path, 6).find("att_1")["n1"].outcome is None


def test_deposed_mailbox_adds_and_removes_nothing(old: Mailbox, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    new.assign(fetch("two"))
    with pytest.raises(FileNotFoundError):
        old.add((change_task_spec(ORDER, attempt_id="att_2"),), None)
    with pytest.raises(FileNotFoundError):
        old.replace(change_task_spec(ORDER, replacement=1), None)
    result = desk(tmp_path, 6)
    assert [task.task_spec for task in result.tasks()] == [ORDER]
    with pytest.raises(Deposed):
        desk(tmp_path, 5)


def test_outcome_of_a_replaced_task_does_not_end_its_replacement(old: Mailbox, tmp_path: Path) -> None:
    lost = old.find("att_1")["n1"]
    new = desk(tmp_path, 5)
    new.replace(change_task_spec(ORDER, replacement=1), None)
    old.reap(lost, EndKind.LOST, "its node was restarted")
    (task,) = desk(tmp_path, 6).tasks()
    assert (task.task_spec.identity.replacement, task.outcome) == (1, None)


@pytest.mark.parametrize("is_deposed", [True, False])
def test_outcome_of_a_replacement_is_not_overwritten_by_an_earlier_task(
    old: Mailbox, tmp_path: Path, is_deposed: bool
) -> None:
    lost = old.assign(fetch("one"))
    new = desk(tmp_path, 5) if is_deposed else old
    new.replace(change_task_spec(ORDER, replacement=1), None)
    new.reap(new.assign(fetch("two", replacement=1)), EndKind.SUCCEEDED, "")
    old.reap(lost, EndKind.LOST, "its node was restarted")
    (task,) = desk(tmp_path, 6).tasks()
    assert task.outcome is not None
    assert (task.outcome.kind, task.outcome.replacement) == (EndKind.SUCCEEDED, 1)


def test_outcome_recorded_during_a_read_of_the_deposed_mailbox_stands(
    old: Mailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, read = old.find("att_1")["n1"], spool.read_outcome
    old.replace(change_task_spec(ORDER, replacement=1), None)
    task = old.assign(fetch("one", replacement=1))
    spool.write_outcome(task.files, old.make_outcome(late, EndKind.LOST, "said late, of the share before"))

    def frozen(files: spool.SpoolTask) -> object:
        monkeypatch.setattr(spool, "read_outcome", read)
        result, new = read(files), desk(tmp_path, 5)
        new.reap(new.find("att_1")["n1"], EndKind.SUCCEEDED, "")
        return result

    monkeypatch.setattr(spool, "read_outcome", frozen)
    old.reap(task, EndKind.LOST, "its supervisor is gone")
    (result,) = desk(tmp_path, 6).tasks()
    assert result.outcome is not None
    assert result.outcome.kind is EndKind.SUCCEEDED


def test_late_outcome_of_an_earlier_task_gives_way(old: Mailbox, tmp_path: Path) -> None:
    lost = old.find("att_1")["n1"]
    new = desk(tmp_path, 5)
    new.replace(change_task_spec(ORDER, replacement=1), None)
    old.reap(lost, EndKind.LOST, "its node was restarted")
    new.reap(new.assign(fetch("two", replacement=1)), EndKind.SUCCEEDED, "")
    (task,) = desk(tmp_path, 6).tasks()
    assert task.outcome is not None
    assert task.outcome.kind is EndKind.SUCCEEDED


def test_closed_task_has_its_own_launch_replacement(old: Mailbox, tmp_path: Path) -> None:
    old.replace(change_task_spec(ORDER, replacement=2), None)
    assert old.close_unstarted("att_1", 2, EndKind.LOST, "its node takes no work")
    for result in (old, desk(tmp_path, 5)):
        assert [task.launch_replacement for task in result.tasks()] == [2]


def test_reaping_by_a_deposed_mailbox_does_not_change_an_outcome(old: Mailbox, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    task = old.assign(fetch("one"))
    ended = new.make_outcome(new.find("att_1")["n1"], EndKind.SUCCEEDED, "")
    assert new.receive(msgspec.structs.replace(told("one"), outcome=ended), b"").is_recorded
    old.reap(task, EndKind.LOST, "its supervisor is gone")
    for result in (task, desk(tmp_path, 6).find("att_1")["n1"]):
        assert result.outcome is not None
        assert result.outcome.kind is EndKind.SUCCEEDED


def test_deposed_mailbox_withdraws_nothing_that_its_successor_assigned(old: Mailbox, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    new.assign(fetch("two"))
    with pytest.raises(FileNotFoundError):
        old.withdraw("att_1")
    assert new.receive(told("two"), b"x\n").size == 2
    assert [task.task_spec for task in desk(tmp_path, 6).tasks()] == [ORDER]


def test_deposed_mailbox_forgets_nothing_that_its_successor_replaced(old: Mailbox, tmp_path: Path) -> None:
    old.reap(old.find("att_1")["n1"], EndKind.LOST, "its node was restarted")
    new = desk(tmp_path, 5)
    archive = tmp_path / "archive"
    archive.write_bytes(b"tar")
    new.replace(change_task_spec(ORDER, replacement=1), str(archive))
    task = new.assign(fetch("two", replacement=1))
    with pytest.raises(FileNotFoundError):
        old.forget("att_1")
    assert Path(task.files.archive).read_bytes() == b"tar"
    assert new.receive(msgspec.structs.replace(told("two"), replacement=1), b"x\n").size == 2
    assert [task.task_spec.identity.replacement for task in desk(tmp_path, 6).tasks()] == [1]


def test_withdrawn_attempt_can_be_added_again(old: Mailbox, tmp_path: Path) -> None:
    old.withdraw("att_1")
    assert old.tasks() == desk(tmp_path, 5).tasks() == []
    assert not old.is_archived("att_1")


def test_log_of_an_interrupted_forget_is_kept(
    old: Mailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.assign(fetch("one"))
    old.receive(told("one"), b"hello\n")
    old.reap(old.find("att_1")["n1"], EndKind.LOST, "its node was restarted")
    rename = Path.rename

    def cut(path: Path, target: Path) -> Path:
        if target.parent.name == "archived":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", cut)
        with pytest.raises(KeyboardInterrupt):
            old.forget("att_1")
    assert old.read_log("att_1", "n1", 0, 100).data == b"hello\n"
    new = desk(tmp_path, 5)
    assert new.is_archived("att_1")
    assert new.read_log("att_1", "n1", 0, 100).data == b"hello\n"
    assert list((tmp_path / "mailbox" / "trash").iterdir()) == []


def test_trash_of_earlier_terms_is_swept_at_opening(old: Mailbox, tmp_path: Path) -> None:
    left = tmp_path / "mailbox" / "trash" / "att_0.1" / "n1"
    left.mkdir(parents=True)
    (left / "archive").write_bytes(b"x" * 100)
    desk(tmp_path, 5)
    assert list((tmp_path / "mailbox" / "trash").iterdir()) == []


def test_readers_do_not_wait_for_a_hung_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop looks: it would answer nobody for as long."""
    desk_ = desk(tmp_path, 0)
    desk_.add((ORDER,), None)
    is_writing, may_go_on, sync = threading.Event(), threading.Event(), spool.sync_directory

    def hang(path: Path | str) -> None:
        is_writing.set()
        assert may_go_on.wait(60)
        sync(path)

    monkeypatch.setattr(spool, "sync_directory", hang)
    later = change_task_spec(ORDER, attempt_id="att_2")
    again = change_task_spec(ORDER, replacement=1)
    for write in (lambda: desk_.add((later,), None), lambda: desk_.replace(again, None)):
        seen = dict(desk_.find("att_1")), desk_.tasks()
        with ThreadPoolExecutor() as threads:
            writing = threads.submit(write)
            assert is_writing.wait(60)
            try:
                looking = threads.submit(lambda: (dict(desk_.find("att_1")), desk_.tasks()))
                assert looking.result(timeout=10) == seen, "as before, until it is on the disk"
            finally:
                may_go_on.set()
            writing.result(timeout=10)
        is_writing.clear()
        may_go_on.clear()
    assert [
        (task.task_spec.identity.attempt_id, task.task_spec.identity.replacement) for task in desk_.tasks()
    ] == [
        ("att_1", 1),
        ("att_2", 0),
    ]
