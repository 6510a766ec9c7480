"""Two control planes over one desk: an order is given to one process, whoever of them gives it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from shoal.engines.desk import Desk
from shoal.engines.fake import VirtualClock
from shoal.errors import Deposed, StateError
from shoal.runtime import spool
from shoal.wire import Dispatch, EndKind, Fetch, Limits, Order

ORDER = Order(
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
    limits=Limits(cpus=1),
)


def desk(home: Path, term: int) -> Desk:
    return Desk(home, VirtualClock(1_800_000_000.0), term)


def fetch(process: str, incarnation: int = 0) -> Fetch:
    return Fetch(attempt_id="att_1", node="n1", incarnation=incarnation, process=process)


def told(process: str) -> Dispatch:
    return Dispatch(attempt_id="att_1", epoch=1, node="n1", process=process)


@pytest.fixture
def old(tmp_path: Path) -> Desk:
    made = desk(tmp_path, 4)
    made.add((ORDER,), None)
    return made


def test_order_that_a_deposed_desk_gave_late_is_not_given_again(old: Desk, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    old.take(fetch("one"))
    with pytest.raises(StateError, match="given to another"):
        new.take(fetch("two"))
    assert new.take(fetch("one")).order == ORDER
    assert new.hear(told("one"), b"hello\n").size == 6


def test_order_that_the_successor_gave_is_not_given_by_the_deposed_one(old: Desk, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    new.take(fetch("two"))
    with pytest.raises(StateError, match="given to another"):
        old.take(fetch("one"))
    with pytest.raises(StateError, match="another process"):
        old.hear(told("one"), b"")


def test_who_got_the_order_from_the_deposed_one_is_heard_by_the_successor(old: Desk, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    old.take(fetch("one"))
    assert new.hear(told("one"), b"").stop_grace_s is None


def test_share_that_runs_is_not_closed_by_a_deposed_desk(old: Desk, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    new.take(fetch("two"))
    assert not old.close(old.find("att_1")["n1"], EndKind.STOPPED, "stopped before it began")
    assert spool.read_outcome(new.find("att_1")["n1"].files) is None
    assert desk(tmp_path, 6).find("att_1")["n1"].outcome is None


def test_deposed_desk_lays_nothing_down_and_takes_nothing_away(old: Desk, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    new.take(fetch("two"))
    with pytest.raises(FileNotFoundError):
        old.add((msgspec.structs.replace(ORDER, attempt_id="att_2"),), None)
    with pytest.raises(FileNotFoundError):
        old.begin_anew(msgspec.structs.replace(ORDER, incarnation=1), None)
    found = desk(tmp_path, 6)
    assert [share.order for share in found.shares()] == [ORDER]
    with pytest.raises(Deposed):
        desk(tmp_path, 5)


def test_end_of_a_share_that_was_begun_anew_since_is_not_the_new_ones(old: Desk, tmp_path: Path) -> None:
    lost = old.find("att_1")["n1"]
    new = desk(tmp_path, 5)
    new.begin_anew(msgspec.structs.replace(ORDER, incarnation=1), None)
    old.bury(lost, EndKind.LOST, "its node was restarted")
    (share,) = desk(tmp_path, 6).shares()
    assert (share.order.incarnation, share.outcome) == (1, None)


@pytest.mark.parametrize("is_deposed", [True, False])
def test_end_of_a_later_share_is_not_written_over_with_that_of_one_before(
    old: Desk, tmp_path: Path, is_deposed: bool
) -> None:
    lost = old.take(fetch("one"))
    new = desk(tmp_path, 5) if is_deposed else old
    new.begin_anew(msgspec.structs.replace(ORDER, incarnation=1), None)
    new.bury(new.take(fetch("two", incarnation=1)), EndKind.SUCCEEDED, "")
    old.bury(lost, EndKind.LOST, "its node was restarted")
    (share,) = desk(tmp_path, 6).shares()
    assert share.outcome is not None
    assert (share.outcome.kind, share.outcome.incarnation) == (EndKind.SUCCEEDED, 1)


def test_end_that_the_successor_records_while_the_deposed_one_reads_is_not_written_over(
    old: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, read = old.find("att_1")["n1"], spool.read_outcome
    old.begin_anew(msgspec.structs.replace(ORDER, incarnation=1), None)
    share = old.take(fetch("one", incarnation=1))
    spool.write_outcome(share.files, old.end_of(late, EndKind.LOST, "said late, of the share before"))

    def frozen(files: spool.Share) -> object:
        monkeypatch.setattr(spool, "read_outcome", read)
        found, new = read(files), desk(tmp_path, 5)
        new.bury(new.find("att_1")["n1"], EndKind.SUCCEEDED, "")
        return found

    monkeypatch.setattr(spool, "read_outcome", frozen)
    old.bury(share, EndKind.LOST, "its supervisor is gone")
    (found,) = desk(tmp_path, 6).shares()
    assert found.outcome is not None
    assert found.outcome.kind is EndKind.SUCCEEDED


def test_end_of_the_share_before_that_was_written_late_gives_way(old: Desk, tmp_path: Path) -> None:
    lost = old.find("att_1")["n1"]
    new = desk(tmp_path, 5)
    new.begin_anew(msgspec.structs.replace(ORDER, incarnation=1), None)
    old.bury(lost, EndKind.LOST, "its node was restarted")
    new.bury(new.take(fetch("two", incarnation=1)), EndKind.SUCCEEDED, "")
    (share,) = desk(tmp_path, 6).shares()
    assert share.outcome is not None
    assert share.outcome.kind is EndKind.SUCCEEDED


def test_share_that_was_closed_is_of_its_own_launch(old: Desk, tmp_path: Path) -> None:
    old.begin_anew(msgspec.structs.replace(ORDER, incarnation=2), None)
    assert old.close_unbegun("att_1", 2, EndKind.LOST, "its node takes no work")
    for found in (old, desk(tmp_path, 5)):
        assert [share.launch for share in found.shares()] == [2]


def test_end_that_the_successor_recorded_stands_whatever_the_deposed_one_buries(
    old: Desk, tmp_path: Path
) -> None:
    new = desk(tmp_path, 5)
    share = old.take(fetch("one"))
    ended = new.end_of(new.find("att_1")["n1"], EndKind.SUCCEEDED, "")
    assert new.hear(msgspec.structs.replace(told("one"), outcome=ended), b"").is_recorded
    old.bury(share, EndKind.LOST, "its supervisor is gone")
    for found in (share, desk(tmp_path, 6).find("att_1")["n1"]):
        assert found.outcome is not None
        assert found.outcome.kind is EndKind.SUCCEEDED


def test_deposed_desk_withdraws_nothing_that_its_successor_gave_out(old: Desk, tmp_path: Path) -> None:
    new = desk(tmp_path, 5)
    new.take(fetch("two"))
    with pytest.raises(FileNotFoundError):
        old.withdraw("att_1")
    assert new.hear(told("two"), b"x\n").size == 2
    assert [share.order for share in desk(tmp_path, 6).shares()] == [ORDER]


def test_deposed_desk_forgets_nothing_that_its_successor_began_anew(old: Desk, tmp_path: Path) -> None:
    old.bury(old.find("att_1")["n1"], EndKind.LOST, "its node was restarted")
    new = desk(tmp_path, 5)
    archive = tmp_path / "archive"
    archive.write_bytes(b"tar")
    new.begin_anew(msgspec.structs.replace(ORDER, incarnation=1), str(archive))
    share = new.take(fetch("two", incarnation=1))
    with pytest.raises(FileNotFoundError):
        old.forget("att_1")
    assert Path(share.files.archive).read_bytes() == b"tar"
    assert new.hear(msgspec.structs.replace(told("two"), incarnation=1), b"x\n").size == 2
    assert [share.order.incarnation for share in desk(tmp_path, 6).shares()] == [1]


def test_withdrawn_order_is_as_if_it_had_never_been(old: Desk, tmp_path: Path) -> None:
    old.withdraw("att_1")
    assert old.shares() == desk(tmp_path, 5).shares() == []
    assert not old.is_kept("att_1")


def test_log_of_who_was_killed_while_it_forgot_is_kept(
    old: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.take(fetch("one"))
    old.hear(told("one"), b"hello\n")
    old.bury(old.find("att_1")["n1"], EndKind.LOST, "its node was restarted")
    rename = Path.rename

    def cut(path: Path, target: Path) -> Path:
        if target.parent.name == "kept":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", cut)
        with pytest.raises(KeyboardInterrupt):
            old.forget("att_1")
    assert old.read_log("att_1", "n1", 0, 100).data == b"hello\n"
    new = desk(tmp_path, 5)
    assert new.is_kept("att_1")
    assert new.read_log("att_1", "n1", 0, 100).data == b"hello\n"
    assert list((tmp_path / "desk" / "trash").iterdir()) == []


def test_trash_of_those_before_is_swept_at_the_opening(old: Desk, tmp_path: Path) -> None:
    left = tmp_path / "desk" / "trash" / "att_0.1" / "n1"
    left.mkdir(parents=True)
    (left / "archive").write_bytes(b"x" * 100)
    desk(tmp_path, 5)
    assert list((tmp_path / "desk" / "trash").iterdir()) == []


def test_who_only_looks_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop looks: it would answer nobody for as long."""
    desk_ = desk(tmp_path, 0)
    desk_.add((ORDER,), None)
    is_writing, may_go_on, sync = threading.Event(), threading.Event(), spool.sync_directory

    def hang(path: Path | str) -> None:
        is_writing.set()
        assert may_go_on.wait(60)
        sync(path)

    monkeypatch.setattr(spool, "sync_directory", hang)
    later = msgspec.structs.replace(ORDER, attempt_id="att_2")
    again = msgspec.structs.replace(ORDER, incarnation=1)
    for write in (lambda: desk_.add((later,), None), lambda: desk_.begin_anew(again, None)):
        seen = dict(desk_.find("att_1")), desk_.shares()
        with ThreadPoolExecutor() as threads:
            writing = threads.submit(write)
            assert is_writing.wait(60)
            try:
                looking = threads.submit(lambda: (dict(desk_.find("att_1")), desk_.shares()))
                assert looking.result(timeout=10) == seen, "as before, until it is on the disk"
            finally:
                may_go_on.set()
            writing.result(timeout=10)
        is_writing.clear()
        may_go_on.clear()
    assert [(share.order.attempt_id, share.order.incarnation) for share in desk_.shares()] == [
        ("att_1", 1),
        ("att_2", 0),
    ]
