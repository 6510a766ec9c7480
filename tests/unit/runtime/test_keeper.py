"""A keeper that cannot begin its share: without the order it goes away, with it it tells the end."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.clock import BootClock
from shoal.engines.fake import VirtualClock
from shoal.runtime import keeper, spool
from shoal.runtime.desk import DeskClient, Refused
from shoal.runtime.keeper import DONE, NO_ORDER, Keeper
from shoal.wire import (
    Assignment,
    Credentials,
    Dispatch,
    DispatchAnswer,
    EndKind,
    Fetch,
    GpuHandle,
    Order,
    Summons,
)
from tests.support.shares import SOURCE
from tests.unit.engines.test_desk_terms import ORDER


class PaperDesk(DeskClient):
    """Gives one order, whose archive is not to be had, and remembers what it was told."""

    def learn(self, urls: tuple[str, ...]) -> None:
        """Nobody else is there."""

    def __init__(self, order: Order = ORDER, *, has_archive: bool = False) -> None:
        self.assignment = Assignment(
            order=order, credentials=Credentials(proof_key="key"), has_archive=has_archive
        )
        self.fetched: list[Fetch] = []
        self.told: list[tuple[str, Dispatch]] = []

    def fetch(self, ticket: str, asked: Fetch) -> Assignment:
        self.fetched.append(asked)
        return self.assignment

    def fetch_archive(self, ticket: str, asked: Fetch, path: str) -> None:
        raise Refused("the snapshot is gone")

    def tell(self, key: str, told: Dispatch, piece: bytes) -> DispatchAnswer:
        self.told.append((key, told))
        return DispatchAnswer(is_recorded=True)


def run(monkeypatch: pytest.MonkeyPatch, desk: PaperDesk, root: Path, devices_from: str = "") -> int:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    summons = Summons(
        attempt_id="att_1",
        urls=("https://a:1",),
        ca="ca",
        ticket="t",
        spool=str(root),
        devices_from=devices_from,
    )
    return Keeper(summons, "n1", desk).run()


def the_end(desk: PaperDesk) -> str:
    [(key, told)] = desk.told
    assert (key, told.process) == ("key", desk.fetched[0].process)
    assert told.outcome is not None
    assert (told.outcome.kind, told.outcome.node, told.outcome.epoch) == (EndKind.LOST, "n1", 1)
    return told.outcome.message


def test_no_order_is_fetched_where_there_is_no_place_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "everybodys"
    root.mkdir()
    root.chmod(0o777)
    desk = PaperDesk()
    assert run(monkeypatch, desk, root) == NO_ORDER
    assert desk.fetched == []
    assert "is not a directory that only user" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", "a" * 32])
def test_a_keeper_has_the_name_that_it_was_given_or_makes_its_own(name: str) -> None:
    summons = Summons(attempt_id="att_1", urls=("https://a:1",), ca="", ticket="t", process=name)
    made = {Keeper(summons, "n1", PaperDesk(ORDER))._fetch.process for _ in range(2)}
    assert made == {name} if name else len(made) == 2


def test_an_archive_that_is_not_to_be_had_is_the_end_of_the_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    desk = PaperDesk(has_archive=True)
    assert run(monkeypatch, desk, tmp_path / "spool") == DONE
    assert the_end(desk) == "n1 could not begin its share: the snapshot is gone"
    assert "the snapshot is gone" in capfd.readouterr().err
    assert list((tmp_path / "spool" / "spool" / "live" / "att_1").iterdir()) == []


def test_a_node_that_forks_no_more_tells_the_end_of_the_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    desk = PaperDesk()
    assert run(monkeypatch, desk, tmp_path / "spool") == DONE
    assert "Resource temporarily unavailable" in the_end(desk)


@pytest.mark.parametrize("given", ["GPU-5f2c1f3e", "MIG-1/2/3", "0", "0,1,2", "", "0,GPU-5f2c1f3e", "a,b"])
def test_other_devices_than_the_order_is_for_are_not_guessed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    monkeypatch.setenv("GIVEN", given)
    desk = PaperDesk(msgspec.structs.replace(ORDER, gpu_ids=(4, 5)))
    assert run(monkeypatch, desk, tmp_path / "spool", devices_from="GIVEN") == DONE
    assert f"its order is for 2 GPUs; the cluster gave 'GIVEN={given}'" in the_end(desk)


@pytest.mark.parametrize(
    ("limit_s", "most_s", "ago_s", "given_s"),
    [
        (60.0, None, 0.0, 60.0),
        (None, 50.0, 0.0, None),
        (60.0, 50.5, 0.0, 50.0),
        (60.0, 90.5, 0.0, 60.0),
        (60.0, 90.5, 50.0, 40.0),  # of the share before it, whose place it has
        (60.0, 50.0, 70.0, 0.0),
    ],
)
def test_keepers_supervisor_ends_its_share_before_the_cluster_does(
    limit_s: float | None, most_s: float | None, ago_s: float, given_s: float | None
) -> None:
    summons = Summons(attempt_id="att_1", urls=("https://a:1",), ca="", ticket="t", time_limit_s=most_s)
    order = msgspec.structs.replace(ORDER, time_limit_s=limit_s)
    began_at = BootClock().monotonic() - ago_s
    fitted = Keeper(summons, "n1", PaperDesk(order), began_at=began_at)._fitted(order)
    assert fitted.time_limit_s == given_s


@pytest.mark.parametrize("name", ["", "GIVEN"])
def test_keepers_supervisor_has_no_standby_for_nobody_there_would_call_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("GIVEN", "3,5")
    summons = Summons(attempt_id="att_1", urls=("https://a:1",), ca="", ticket="t", devices_from=name)
    order = msgspec.structs.replace(ORDER, has_standby=True, gpu_ids=(0, 1))
    fitted = Keeper(summons, "n1", PaperDesk(order))._fitted(order)
    assert not fitted.has_standby
    assert fitted.gpu_ids == ((3, 5) if name else (0, 1))


@pytest.mark.parametrize(
    ("given", "gpu_ids", "uuids"),
    [
        ("3,5", (3, 5), ("", "")),
        ("GPU-5f2c1f3e-aa,GPU-0d1", (0, 1), ("GPU-5f2c1f3e-aa", "GPU-0d1")),
        ("MIG-GPU-5f2c/1/0,MIG-77-e", (0, 1), ("MIG-GPU-5f2c/1/0", "MIG-77-e")),
    ],
)
def test_devices_are_those_that_the_cluster_chose_by_number_or_by_uuid(
    monkeypatch: pytest.MonkeyPatch, given: str, gpu_ids: tuple[int, ...], uuids: tuple[str, ...]
) -> None:
    monkeypatch.setenv("GIVEN", given)
    summons = Summons(attempt_id="att_1", urls=("https://a:1",), ca="", ticket="t", devices_from="GIVEN")
    order = msgspec.structs.replace(ORDER, gpu_ids=(6, 7), gpus=(GpuHandle(index=6, minor=6),))
    fitted = Keeper(summons, "n1", PaperDesk(order))._fitted(order)
    assert fitted.are_gpus_chosen_there
    assert (fitted.gpu_ids, fitted.gpu_minors) == (gpu_ids, ())
    assert tuple(gpu.uuid for gpu in fitted.gpus) == uuids


class LosingDesk(PaperDesk):
    """Its share cannot be begun, twice; the third time there is no order any more."""

    def fetch(self, ticket: str, asked: Fetch) -> Assignment:
        self.fetched.append(asked)
        if len(self.fetched) == 3:
            raise Refused("it has ended")
        return self.assignment


@pytest.mark.parametrize(("can_follow", "num_nodes", "fetched"), [(True, 2, 3), (True, 1, 1), (False, 2, 1)])
def test_a_keeper_that_lost_its_share_beside_others_asks_for_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, can_follow: bool, num_nodes: int, fetched: int
) -> None:
    nodes = ("n1", "n2")[:num_nodes]
    order = msgspec.structs.replace(ORDER, nodes=nodes, max_restarts=9, incarnation=4)
    desk = LosingDesk(order, has_archive=True)
    monkeypatch.setattr(keeper, "DeskClient", lambda *_: desk)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # What a keeper makes of its process would be for all later tests of this one.
    monkeypatch.setattr(os, "umask", lambda _: 0)
    for name in ("hide_memory", "become_subreaper"):
        monkeypatch.setattr(f"shoal.runtime.kernel.{name}", lambda: None)
    summons = Summons(
        attempt_id="att_1",
        urls=("https://a:1",),
        ca="ca",
        ticket="t",
        spool=str(tmp_path / "spool"),
        incarnation=4,
        can_follow=can_follow,
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(summons))))
    assert keeper.main(["n1"]) == DONE
    assert [one.after for one in desk.fetched] == [None, 4, 4][:fetched]
    assert len({one.process for one in desk.fetched}) == fetched
    assert [told.will_follow for _, told in desk.told] == [fetched > 1] * len(desk.told)


def test_the_end_of_a_share_is_told_also_where_the_disk_does_not_take_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = os.write

    def full(fd: object, data: bytes) -> int:
        if isinstance(fd, int) and fd != 2:
            return write(fd, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(keeper, "_kill_children", lambda: True)
    monkeypatch.setattr(Keeper, "_fork", lambda *_: -1)
    monkeypatch.setattr(os, "waitpid", lambda *_: (1, 9))
    monkeypatch.setattr(spool, "write_outcome", full)
    monkeypatch.setattr(os, "write", full)
    desk = PaperDesk()
    assert run(monkeypatch, desk, tmp_path / "spool") == DONE
    assert the_end(desk) == "its supervisor died without an outcome"


class TestDiskThatDoesNotGive:
    """A log, a start and an outcome that cannot be read are no reason to end what runs."""

    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> set[str]:
        """Names of files that give nothing while they are in here."""
        names: set[str] = set()
        stat, read = os.stat, keeper._read_piece

        def fail(path: str) -> None:
            if Path(path).name in names:
                raise OSError(errno.EIO, "Input/output error")

        def a_stat(path: Any, **how: Any) -> os.stat_result:
            fail(os.fspath(path) if isinstance(path, (str, os.PathLike)) else "")
            return stat(path, **how)

        def a_read(path: str, offset: int) -> bytes:
            fail(path)
            return read(path, offset)

        def spooled(name: str, real: Any) -> Any:
            def a_word(share: spool.Share) -> Any:
                fail(name)
                return real(share)

            return a_word

        monkeypatch.setattr(os, "stat", a_stat)
        monkeypatch.setattr(keeper, "_read_piece", a_read)
        for name in ("started", "outcome"):
            monkeypatch.setattr(spool, f"read_{name}", spooled(name, getattr(spool, f"read_{name}")))
        return names

    def test_keeper_goes_on_and_says_that_it_lives(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        broken: set[str],
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        desk = PaperDesk()
        ends = iter([(0, 0)] * 5 + [(1, 9)])

        def mend() -> bool:
            broken.clear()
            return True

        monkeypatch.setattr(keeper, "_kill_children", mend)
        monkeypatch.setattr(Keeper, "_fork", lambda *_: -1)
        monkeypatch.setattr(os, "waitpid", lambda *_: next(ends))
        for name, value in (("PING_S", 0.01), ("LONE_PING_S", 0.01), ("TURN_S", 0.02), ("KILL_AFTER_S", 0.1)):
            monkeypatch.setattr(keeper, name, value)
        broken |= {"log", "started", "outcome"}
        assert run(monkeypatch, desk, tmp_path / "spool") == DONE
        *living, (_, last) = desk.told
        assert living, "signs of life"
        assert {told.outcome for _, told in living} == {None}
        assert last.outcome is not None
        assert last.outcome.message == "its supervisor died without an outcome"
        assert capfd.readouterr().err.count("the disk does not give what there is to tell") == 1

    def test_the_end_waits_for_the_rest_of_the_log_but_not_for_ever(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: set[str]
    ) -> None:
        desk = PaperDesk(has_archive=True)
        broken.add("log")
        clock = VirtualClock()
        monkeypatch.setattr(keeper, "BootClock", lambda: clock)
        monkeypatch.setattr(time, "sleep", clock.advance)
        assert run(monkeypatch, desk, tmp_path / "spool") == DONE
        assert the_end(desk).startswith("n1 could not begin its share")
        assert clock.monotonic() >= keeper.UNREAD_S


def test_a_log_of_several_pieces_goes_before_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Taking(PaperDesk):
        def tell(self, key: str, told: Dispatch, piece: bytes) -> DispatchAnswer:
            self.told.append((key, told))
            return DispatchAnswer(size=told.offset + len(piece), is_recorded=told.outcome is not None)

    monkeypatch.setattr(keeper, "PIECE", 4)

    def prepare(_: Keeper, share: spool.Share, *__: object) -> None:
        Path(share.directory).mkdir(parents=True)
        Path(share.log).write_bytes(b"123456789")
        raise Refused("enough")

    desk = Taking()
    monkeypatch.setattr(Keeper, "_prepare", prepare)
    assert run(monkeypatch, desk, tmp_path / "spool") == DONE
    assert [(told.offset, told.outcome is None) for _, told in desk.told] == [
        (0, True),
        (4, True),
        (8, False),
    ]


def test_a_keeper_says_what_does_not_die_until_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Witness(PaperDesk):
        def tell(self, key: str, told: Dispatch, piece: bytes) -> DispatchAnswer:
            self.told.append((key, told))
            return DispatchAnswer(is_recorded=told.outcome is not None)

    desk = Witness()
    monkeypatch.setattr(keeper, "_kill_children", lambda: sum(1 for _, told in desk.told if told.left) >= 2)
    monkeypatch.setattr(Keeper, "_fork", lambda *_: -1)
    monkeypatch.setattr(os, "waitpid", lambda *_: (1, 9))
    monkeypatch.setattr(keeper, "KILL_AFTER_S", 0.3)
    for name in ("PING_S", "LONE_PING_S"):
        monkeypatch.setattr(keeper, name, 0.01)
    assert run(monkeypatch, desk, tmp_path / "spool") == DONE
    first, *_, last = [told for _, told in desk.told]
    assert (first.left, first.outcome) == ("", None)  # it has a moment to die first
    assert last.outcome is not None
    assert (last.left, last.outcome.kind) == ("", EndKind.LOST)
    assert {told.left for _, told in desk.told} == {
        "",
        "the supervisor on n1 is dead, and something of it does not die",
    }


def test_nobody_dies_for_words_that_nobody_takes(tmp_path: Path) -> None:
    code = (
        "import os; os.close(2); from shoal.runtime.keeper import _say; _say('a\\udcff word'); print('lives')"
    )
    env = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"lives\n")
