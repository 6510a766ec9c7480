"""The protocol of a spool directory: it may be killed or deposed before each of its file operations."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.engines.spool_directory import FORGOTTEN, SpoolDirectory
from shoal.errors import Deposed
from shoal.runtime.files import spool
from tests.support.runtime.task_specs import change_task_spec
from tests.unit.engines.remote.test_mailbox_terms import ORDER

OPERATIONS = frozenset({"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir"})
"""What changes a disk. An audit hook is called before each of them."""
FIRST = (
    change_task_spec(ORDER, nodes=("n1", "n2")),
    change_task_spec(ORDER, nodes=("n1", "n2"), node="n2", node_rank=1),
)
SECOND = tuple(change_task_spec(task_spec, attempt_id="att_2") for task_spec in FIRST)
NEXT = change_task_spec(FIRST[0], replacement=1)
LOG = b"1.0 0 o hello\n"
Change = Callable[[SpoolDirectory], None]


def add(directory: SpoolDirectory) -> None:
    directory.add(SECOND, str(directory.live.parents[1] / "archive.tar"))


def replace(directory: SpoolDirectory) -> None:
    directory.replace(NEXT, None)


def replace_nothing(directory: SpoolDirectory) -> None:
    directory.replace(change_task_spec(NEXT, node="n3"), None)


def archive(directory: SpoolDirectory) -> None:
    if not directory.is_archived("att_1"):
        directory.archive("att_1")


def withdraw(directory: SpoolDirectory) -> None:
    if directory.tasks("att_1"):
        directory.withdraw("att_1")


def replace_outcome(directory: SpoolDirectory) -> None:
    directory.replace_file(str(directory.live / "att_1" / "n1" / "outcome.json"), b"new")


def discard(directory: SpoolDirectory) -> None:
    directory.discard(directory.live / "att_1" / "n1" / "work")


CHANGES = (add, replace, replace_nothing, archive, withdraw, replace_outcome, discard)


def prepare(home: Path) -> SpoolDirectory:
    """A directory with one attempt of two tasks, one of which has a log and files of its ranks."""
    directory = SpoolDirectory(home / "spool", 1)
    (home / "archive.tar").write_bytes(b"tar")
    directory.add(FIRST, str(home / "archive.tar"))
    task = directory.live / "att_1" / "n1"
    (task / "log").write_bytes(LOG)
    (task / "outcome.json").write_bytes(b"old")
    (task / "work" / f"att_3{FORGOTTEN}").mkdir(parents=True)
    return directory


def before_each_operation(change: Change, home: Path, number: int, act: Callable[[], object]) -> int:
    """Make the change in a child process that acts before its operation of this number. Return its pid."""
    directory = prepare(home)
    pid = os.fork()
    if pid:
        return pid
    left = number

    def hook(event: str, _: object) -> None:
        nonlocal left
        if event in OPERATIONS:
            left -= 1
            if left == 0:
                act()

    try:
        sys.addaudithook(hook)
        change(directory)
    except FileNotFoundError:
        os._exit(3)
    finally:
        os._exit(4 if sys.exc_info()[1] else 0)


def state(directory: SpoolDirectory) -> dict[str, dict[str, int]]:
    """The replacement numbers of the stored tasks, by attempt and node. Each of them is whole."""
    result: dict[str, dict[str, int]] = {}
    for attempt_id in directory.attempts():
        result[attempt_id] = {}
        for path in directory.tasks(attempt_id):
            task_spec = spool.read_task_spec(spool.SpoolTask(path))
            assert task_spec is not None
            assert (task_spec.identity.attempt_id, task_spec.identity.node) == (attempt_id, path.name)
            assert attempt_id == "att_1" or (path / "archive.tar").read_bytes() == b"tar"
            result[attempt_id][path.name] = task_spec.identity.replacement
    return result


def outcome(directory: SpoolDirectory) -> bytes:
    path = directory.live / "att_1" / "n1" / "outcome.json"
    return path.read_bytes() if path.exists() else b""


BEFORE = {"att_1": {"n1": 0, "n2": 0}}
HALF = {"att_1": {"n2": 0}}
"""Between the two renames of `replace`: nothing that could start."""
AFTER: dict[Change, dict[str, dict[str, int]]] = {
    add: {**BEFORE, "att_2": {"n1": 0, "n2": 0}},
    replace: {"att_1": {"n1": 1, "n2": 0}},
    replace_nothing: {"att_1": {"n1": 0, "n2": 0, "n3": 1}},
    archive: {},
    withdraw: {},
    replace_outcome: BEFORE,
    discard: BEFORE,
}


def check(change: Change, directory: SpoolDirectory) -> None:
    """The directory is as before or as after the change, and no log is lost."""
    result = state(directory)
    assert result in (BEFORE, AFTER[change]) or (change is replace and result == HALF)
    assert outcome(directory) in ((b"old", b"new") if change is replace_outcome else (b"old", b""))
    if change is archive:
        assert ("att_1" in result) is not directory.is_archived("att_1")
    if change is not withdraw and result != HALF:
        assert directory.read_log("att_1", "n1", 0, 100).data == LOG
    assert not directory.is_archived("att_3"), "a job can write folders, and put nothing in the archive"


def repeat(change: Change, directory: SpoolDirectory) -> None:
    """The change can be repeated, and then it is complete."""
    change(directory)
    assert state(directory) == AFTER[change]
    if change is not withdraw:
        assert directory.read_log("att_1", "n1", 0, 100).data == LOG
    if change is replace_outcome:
        assert outcome(directory) == b"new"


def check_rubbish(directory: SpoolDirectory) -> None:
    directory.sweep()
    assert list(directory.trash.iterdir()) == []
    assert list(directory.draft.parent.iterdir()) == [directory.draft]
    assert list(directory.draft.iterdir()) == []
    assert not list(directory.live.rglob("*.new"))


def wait(pid: int, options: int = 0) -> int:
    return os.waitpid(pid, options)[1]


@pytest.mark.parametrize("change", CHANGES)
def test_killed_before_any_operation_it_is_whole_and_can_be_repeated(change: Change, tmp_path: Path) -> None:
    for number in range(1, 100):
        home = tmp_path / str(number)
        home.mkdir()
        pid = before_each_operation(change, home, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        is_killed = os.WIFSIGNALED(wait(pid))
        directory = SpoolDirectory(home / "spool", 2 if number % 2 else 1)
        check(change, directory)
        if not is_killed:
            assert state(directory) == AFTER[change]
            break
        repeat(change, directory)
        check_rubbish(directory)
    else:
        pytest.fail("it never came to an end")
    assert number > 2, "each operation was cut"


@pytest.mark.parametrize("change", CHANGES)
def test_deposed_before_any_operation_it_changes_nothing_that_its_successor_did(
    change: Change, tmp_path: Path
) -> None:
    for number in range(1, 100):
        home = tmp_path / str(number)
        home.mkdir()
        pid = before_each_operation(change, home, number, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        if not os.WIFSTOPPED(wait(pid, os.WUNTRACED)):
            break
        directory = SpoolDirectory(home / "spool", 2)
        check(change, directory)
        repeat(change, directory)
        places = inodes(directory)
        os.kill(pid, signal.SIGCONT)
        status = wait(pid)
        assert os.WIFEXITED(status)
        assert os.WEXITSTATUS(status) in (0, 3), "it had finished, or its folder for drafts is gone"
        assert inodes(directory) == places
        assert state(directory) == AFTER[change]
        check(change, directory)
    else:
        pytest.fail("it never came to an end")


def inodes(directory: SpoolDirectory) -> dict[str, int]:
    paths = (path for attempt_id in directory.attempts() for path in directory.tasks(attempt_id))
    return {f"{path.parent.name}/{path.name}": path.stat().st_ino for path in paths}


def test_deposed_directory_withdraws_nothing_that_was_added_again(tmp_path: Path) -> None:
    old = prepare(tmp_path)
    new = SpoolDirectory(tmp_path / "spool", 2)
    with pytest.raises(FileNotFoundError):
        old.withdraw("att_1")
    assert state(new) == BEFORE


def test_content_is_on_the_disk_before_its_name_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut loses what was not synced, in any order."""
    directory, synced = prepare(tmp_path), list[str]()
    fsync, rename = os.fsync, Path.rename

    def sync(fd: int) -> None:
        fsync(fd)
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))

    def appear(path: Path, target: Path) -> Path:
        if Path(target).parent == directory.live:
            files = [file for file in path.rglob("*") if file.name == "task_spec.json"]
            assert len(files) == len(SECOND)
            for file in files:
                assert {f"{file}.new", str(file.parent)} <= set(synced)
            assert synced[-1] == str(path)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", appear)
    add(directory)
    assert synced[-1] == str(directory.live)
    replace(directory)
    assert synced[-1] == str(directory.live / "att_1")
    replace_outcome(directory)
    assert synced[-1] == str(directory.live / "att_1" / "n1")


@pytest.fixture
def directory(tmp_path: Path) -> SpoolDirectory:
    return prepare(tmp_path)


def test_attempt_that_is_stored_stays_as_it_is(directory: SpoolDirectory) -> None:
    (directory.live / "att_1" / "n1" / "claimed").write_bytes(b"x")
    directory.add(FIRST, None)
    assert (directory.live / "att_1" / "n1" / "claimed").exists()
    check_rubbish(directory)


def test_full_disk_leaves_nothing_of_an_attempt(
    directory: SpoolDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("write_task_spec", "sync_directory"):
        with monkeypatch.context() as patch:
            patch.setattr(spool, name, full)
            with pytest.raises(OSError, match="No space"):
                add(directory)
        check_rubbish(directory)
        assert state(directory) == BEFORE


def test_full_disk_leaves_the_task_that_was_to_be_replaced(
    directory: SpoolDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name, change in (("write_task_spec", replace), ("durable_write", replace_outcome)):
        with monkeypatch.context() as patch:
            patch.setattr(spool, name, full)
            with pytest.raises(OSError, match="No space"):
                change(directory)
        check_rubbish(directory)
        assert (state(directory), outcome(directory)) == (BEFORE, b"old")


def test_directory_of_an_earlier_term_does_not_open(directory: SpoolDirectory) -> None:
    later = SpoolDirectory(directory.live.parent, 2)
    with pytest.raises(Deposed, match="began term 2"):
        SpoolDirectory(directory.live.parent, 1)
    assert list(later.draft.parent.iterdir()) == [later.draft]


def test_sweep_of_a_deposed_directory_removes_no_attempt_that_was_to_be_archived(
    directory: SpoolDirectory,
) -> None:
    (directory.live / "att_1").rename(directory.draft / f"att_1{FORGOTTEN}")
    directory.draft.rename(directory.trash / f"{directory.draft.name}.{'0' * 12}")  # its successor begins
    directory.sweep()
    assert (directory.archived / "att_1" / "n1" / "log").read_bytes() == LOG
    assert list(directory.trash.iterdir()) == []


def test_only_attempts_and_tasks_are_listed(directory: SpoolDirectory) -> None:
    (directory.live / "att_1" / "n1.log").write_bytes(LOG)
    (directory.live / ".hidden").mkdir()
    (directory.live / "att_9").write_bytes(b"no folder")
    assert directory.attempts() == ["att_1", "att_9"]
    assert [path.name for path in directory.tasks("att_1")] == ["n1", "n2"]
    assert directory.tasks("att_9") == directory.tasks("att_8") == []


@pytest.mark.parametrize("name", ["..", "../live", "a/b", ""])
def test_names_that_lead_elsewhere_name_nothing(directory: SpoolDirectory, name: str) -> None:
    assert not directory.is_archived(name)
    for attempt_id, node in ((name, "n1"), ("att_1", name)):
        chunk = directory.read_log(attempt_id, node, 5, 100)
        assert (chunk.data, chunk.next_offset, chunk.is_complete) == (b"", 5, True)
