"""What is left of a share whose keeper is gone, with real supervisors."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.runtime import burial, places, spool, tree
from shoal.runtime.burial import LEFT, NOT_YET, OVER, USAGE, bury, main
from tests.support.shares import a_claim, an_order, processes_with, shares_in, until

GIVES_AWAY = "only root gives files away: `sudo make test`"
as_root = pytest.mark.skipif(os.getuid() != 0, reason=GIVES_AWAY)


def test_a_share_that_was_never_prepared_is_over(tmp_path: Path) -> None:
    assert main([str(tmp_path), "att_1", "n0", "0"]) == OVER
    assert main([str(tmp_path), "att_1", "n0"]) == USAGE


def test_the_supervisor_and_its_ranks_are_ended(tmp_path: Path) -> None:
    with shares_in(tmp_path) as make:
        running = make(an_order(run="trap '' TERM; sleep 1000 & wait"))
        running.spawn()
        until(lambda: os.path.exists(running.share.started))  # noqa: PTH110
        assert bury(running.share) == OVER
        assert not spool.is_locked(running.share)
        running.processes[0].wait(10)


def test_one_that_cannot_be_told_by_its_command_line_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "kill_supervisors", lambda _: None)
    with shares_in(tmp_path) as make:
        running = make(an_order(run="sleep 1000"))
        running.spawn()
        until(lambda: os.path.exists(running.share.started))  # noqa: PTH110
        assert bury(running.share) == OVER
        running.processes[0].wait(10)


def test_a_supervisor_that_comes_later_finds_nothing_to_do(tmp_path: Path) -> None:
    with shares_in(tmp_path) as make:
        running = make(an_order())
        assert bury(running.share) == OVER
        process = running.spawn()
        process.wait(30)
        assert not os.path.exists(running.share.started)  # noqa: PTH110


def test_somebody_who_holds_on_is_not_said_to_be_gone(tmp_path: Path) -> None:
    with shares_in(tmp_path) as make:
        running = make(an_order())
        lock = spool.take_lock(running.share)
        assert lock is not None
        assert bury(running.share, timeout_s=0.3) == LEFT
        os.close(lock)


def test_what_does_not_die_is_told_from_what_nobody_can_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with shares_in(tmp_path) as make, monkeypatch.context() as patch:
        patch.setattr(spool, "kill_leftovers", lambda *_: False)
        running = make(an_order())
        assert bury(running.share, timeout_s=0.3) == LEFT
        assert "something of it does not die" in capfd.readouterr().err
        (running.directory / "order.json").unlink()
        assert bury(running.share, timeout_s=0.3) == NOT_YET
        assert "its order is gone" in capfd.readouterr().err


def test_of_a_share_whose_files_were_swept_away_nobody_says_that_it_is_over(tmp_path: Path) -> None:
    with shares_in(tmp_path) as make:
        running = make(an_order(run="setsid sleep 1000 & wait"))
        running.spawn()
        until(lambda: os.path.exists(running.share.started))  # noqa: PTH110
        for name in ("order.json", "lock", "claimed", "started"):
            (running.directory / name).unlink()
        assert bury(running.share, timeout_s=0.3) == NOT_YET


def test_one_without_marks_that_may_be_of_the_share_is_neither_killed_nor_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = f"sleep {random.randrange(10**6, 10**9)}"
    with shares_in(tmp_path) as make:
        running = make(an_order(run=f"env -i setsid {mark} & wait", confinement=()))
        running.spawn()
        until(lambda: os.path.exists(running.share.started))  # noqa: PTH110
        until(lambda: len(processes_with(mark.replace(" ", "\0"))) == 1)
        [left] = processes_with(mark.replace(" ", "\0"))
        assert bury(running.share, timeout_s=1.0) == NOT_YET
        assert f"processes [{left}] may be of it" in capfd.readouterr().err
        os.kill(left, signal.SIGKILL)
        assert bury(running.share) == OVER


def lay_claim(root: Path, process: subprocess.Popen[bytes]) -> None:
    """A share below that root whose claim says that this healthy process is its supervisor."""
    place = root / "spool" / "live" / "att_1" / "n0"
    place.mkdir(parents=True, mode=0o700)
    ticks = spool.start_ticks(process.pid)
    claim = a_claim(spool.Share(place), pid=process.pid, start_ticks=ticks)
    (place / "claimed").write_bytes(msgspec.json.encode(claim))
    assert spool.take_lock(spool.Share(place)) is not None  # held for as long as this process lives
    for path in (root, *(root / name for name in ("spool", "spool/live", "spool/live/att_1"))):
        path.chmod(0o700)


@pytest.fixture
def healthy() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burial, "PAUSE_S", 0.0)


@pytest.fixture
def everybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bury, "__defaults__", (0.3,))
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


def bury_below(root: Path) -> int:
    return main([str(root), "att_1", "n0", "0"])


def test_who_is_claimed_to_supervise_a_share_of_ones_own_is_ended(
    everybodys: Path, healthy: subprocess.Popen[bytes]
) -> None:
    """That the others below are spared shows something."""
    lay_claim(everybodys / f"shoal-{os.getuid()}", healthy)
    assert bury_below(everybodys) == LEFT
    healthy.wait(10)


@as_root
@pytest.mark.parametrize("name", [f"shoal-{os.getuid()}", f"shoal-{os.getuid()}-0"])
def test_nobody_is_killed_by_what_another_user_has_laid_where_our_shares_would_be(
    everybodys: Path, healthy: subprocess.Popen[bytes], name: str
) -> None:
    lay_claim(everybodys / name, healthy)
    give_away(everybodys / name)
    assert bury_below(everybodys) == OVER
    assert healthy.poll() is None


@as_root
def test_another_users_place_keeps_no_share_of_ours_from_its_burial(
    everybodys: Path, healthy: subprocess.Popen[bytes]
) -> None:
    (everybodys / f"shoal-{os.getuid()}").touch()
    own = Path(places.make_root(str(everybodys)))
    lay_claim(own, healthy)
    (everybodys / f"shoal-{os.getuid()}").unlink()
    (everybodys / f"shoal-{os.getuid()}" / "spool" / "live" / "att_1" / "n0" / "lock").mkdir(parents=True)
    give_away(everybodys / f"shoal-{os.getuid()}")
    assert bury_below(everybodys) == LEFT
    healthy.wait(10)


@pytest.mark.parametrize("where", ["", "spool", "spool/live", "spool/live/att_1", "spool/live/att_1/n0"])
@pytest.mark.parametrize("trap", ["open", "link", "another's"])
def test_nobody_is_killed_by_what_others_could_have_laid_below_our_own_root(
    everybodys: Path,
    healthy: subprocess.Popen[bytes],
    capfd: pytest.CaptureFixture[str],
    where: str,
    trap: str,
) -> None:
    root = everybodys / f"shoal-{os.getuid()}"
    lay_claim(root, healthy)
    path = root / where
    if trap == "another's" and os.getuid() != 0:
        pytest.skip(GIVES_AWAY)
    if trap == "open":
        path.chmod(0o775)
    elif trap == "link":
        path.rename(everybodys.parent / "there")
        path.symlink_to(everybodys.parent / "there")
    else:
        os.chown(path, 1, 1)
    is_passed_over = not where and trap != "open"  # never a root of ours
    assert bury_below(everybodys) == (OVER if is_passed_over else NOT_YET)
    assert healthy.poll() is None
    assert ("chmod go-w" in capfd.readouterr().err) is not is_passed_over


@pytest.mark.parametrize("trap", ["open", "another's"])
def test_nobody_is_killed_by_what_lies_in_a_spool_that_was_named_and_is_not_ours(
    tmp_path: Path, healthy: subprocess.Popen[bytes], trap: str
) -> None:
    root = tmp_path / "named"
    lay_claim(root, healthy)
    if trap == "open":
        root.chmod(0o777)
    elif os.getuid() != 0:
        pytest.skip(GIVES_AWAY)
    else:
        give_away(root)
    assert bury_below(root) == NOT_YET
    assert healthy.poll() is None


def give_away(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        os.chown(path, 1, 1)


def test_who_hides_its_environment_is_in_doubt_unless_it_is_older_or_shoals_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = [sys.executable, "-c", "import time; time.sleep(60)", "-m", "shoal.runtime.keep", "n1"]
    with subprocess.Popen(["/bin/sleep", "60"], cwd="/") as other, subprocess.Popen(own, cwd="/") as keeper:
        try:
            until(lambda: b"shoal" in Path(f"/proc/{keeper.pid}/cmdline").read_bytes())
            both = {other.pid, keeper.pid}
            since = spool.start_ticks(other.pid)
            assert since is not None
            assert not tree.doubtful("/nowhere", since) & both

            def hidden(pid: int) -> bytes:
                raise PermissionError(13, "Permission denied")

            monkeypatch.setattr(tree, "_environment", hidden)
            assert tree.doubtful("/nowhere", since) & both == {other.pid}
            assert not tree.doubtful("/nowhere", since + 10**6) & both
        finally:
            other.kill()
            keeper.kill()
