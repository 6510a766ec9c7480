"""Two backups of one running home at once: the second does not touch the first one's copy of the database."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from shoal.cli.backup import commands, database_copy
from shoal.client.credentials import write_private
from shoal.errors import ServerUnreachable, StateError, StoreUnavailable
from shoal.settings import Settings, load_settings
from shoal.store import LogHead
from tests.support.runtime.tasks import until


class Store:
    def __init__(self) -> None:
        self.num_copies = 0
        self.problem: Exception | None = None

    def copy_to(self, target: Path) -> LogHead:
        if self.problem is not None:
            raise self.problem
        self.num_copies += 1
        target.write_text(f"copy {self.num_copies}")
        return LogHead(self.num_copies, "x")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store) -> Iterator[Settings]:
    """Settings of a home whose control plane answers requests."""
    for module in (commands, database_copy):
        monkeypatch.setattr(module, "pid_holding", lambda _: 1)
    monkeypatch.setattr(database_copy, "LOOK_EVERY_S", 0.01)
    home = tmp_path / "home"
    home.mkdir()
    with anyio.from_thread.start_blocking_portal() as portal:
        serving = portal.start_task_soon(database_copy.serve_requests, home, store)
        yield replace(load_settings({}), home=home)
        serving.cancel()


def test_second_backup_is_refused_while_the_first_has_its_copy(settings: Settings, tmp_path: Path) -> None:
    with commands._database(settings, tmp_path / "a.tar", lambda _: None) as (first, head):
        with (
            pytest.raises(StateError, match="another backup") as refused,
            commands._database(settings, tmp_path / "b.tar", lambda _: None),
        ):
            pass
        assert refused.value.hint == "try again when it is done"
        assert (first.read_text(), head.seq) == ("copy 1", 1)
    with commands._database(settings, tmp_path / "b.tar", lambda _: None) as (second, head):
        assert (second.read_text(), head.seq) == ("copy 2", 2)
    assert list((settings.home / "backup").iterdir()) == []


def test_concurrent_backups_get_their_own_copy_or_are_refused(settings: Settings, tmp_path: Path) -> None:
    begin, outcomes = threading.Barrier(8), []

    def ask() -> None:
        begin.wait()
        try:
            with commands._database(settings, tmp_path / "a.tar", lambda _: None) as (copy, head):
                outcomes.append(copy.read_text() == f"copy {head.seq}")
        except StateError as error:
            outcomes.append("another backup" in error.message)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 8


def test_request_of_a_killed_backup_does_not_take_the_next_reply(settings: Settings, tmp_path: Path) -> None:
    folder = settings.home / "backup"
    folder.mkdir(exist_ok=True)
    for name in ("0", "f"):  # before and after whatever the next one is called
        (folder / f"{name * 16}.asked").touch()
    with commands._database(settings, tmp_path / "a.tar", lambda _: None) as (copy, head):
        assert copy.read_text() == f"copy {head.seq}"


@pytest.mark.parametrize(
    "problem",
    [
        StoreUnavailable("the store is not available: disk I/O error"),
        AttributeError("no `backup`"),
        RuntimeError(),
    ],
)
def test_database_that_cannot_be_copied_is_the_backups_error_and_the_next_one_is_made(
    settings: Settings, tmp_path: Path, store: Store, problem: Exception
) -> None:
    store.problem = problem
    with (
        pytest.raises(StateError, match=r"disk I/O error|no `backup`|RuntimeError"),
        commands._database(settings, tmp_path / "a.tar", lambda _: None),
    ):
        pass
    store.problem = None
    with commands._database(settings, tmp_path / "a.tar", lambda _: None) as (copy, _):
        assert copy.read_text() == "copy 1"


def test_request_is_gone_before_its_copy_begins_so_the_next_start_does_not_meet_it_again(
    tmp_path: Path,
) -> None:
    request = tmp_path / "a.asked"
    request.touch()

    class Ends(Store):
        def copy_to(self, target: Path) -> LogHead:
            raise SystemExit

    with pytest.raises(SystemExit):
        database_copy._serve_request(request, Ends())
    assert not request.exists()


def test_copy_of_a_control_plane_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / database_copy.FOLDER
    folder.mkdir()
    copy = folder / "a.copy"
    copy.touch()

    with anyio.from_thread.start_blocking_portal() as portal:
        serving = portal.start_task_soon(database_copy.serve_requests, tmp_path, Store())
        until(lambda: not copy.exists())
        serving.cancel()


def test_lack_of_threads_delays_the_backup_by_one_turn(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = anyio.to_thread.run_sync, list[bool]()

    async def fail_once(*result: Any) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("can't start new thread")
        return await real(*result)

    monkeypatch.setattr(anyio.to_thread, "run_sync", fail_once)
    with commands._database(settings, tmp_path / "a.tar", lambda _: None) as (copy, _):
        assert copy.read_text() == "copy 1"
    assert failed == [True]


def test_backup_whose_reply_cannot_be_written_does_not_wait_forever(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = True

    def write_or_fail(path: Path, text: str) -> None:
        if is_full and path.suffix == ".answer":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_private(path, text)

    monkeypatch.setattr(database_copy, "write_private", write_or_fail)
    monkeypatch.setattr(database_copy, "TAKEN_S", 0.1)
    with (
        pytest.raises(ServerUnreachable, match="does not make a copy"),
        commands._database(settings, tmp_path / "a.tar", lambda _: None),
    ):
        pass
    is_full = False
    monkeypatch.setattr(database_copy, "TAKEN_S", 60.0)
    with commands._database(settings, tmp_path / "a.tar", lambda _: None) as (copy, _):
        assert copy.read_text() == "copy 2"
