"""The shell scripts, run here on files of our own."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

from shoal.cluster import prerequisites, shell, teardown
from shoal.cluster.facts import read_facts
from shoal.cluster.inventory import InventoryHost
from shoal.cluster.render import File
from tests.support.fakes.machines import CLUSTER_ID, facts_text


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(shell, "STATE_DIR", str(tmp_path / "state"))


def run(script: str, stdin: bytes = b"") -> None:
    subprocess.run(["sh", "-c", script], input=stdin, check=True)


def write(path: Path, content: bytes) -> None:
    owner = f"{pwd.getpwuid(os.getuid()).pw_name}:{grp.getgrgid(os.getgid()).gr_name}"
    run(shell.write(File(str(path), content, owner=owner), is_foreign=True), content)


def test_first_earlier_file_is_the_backup(tmp_path: Path) -> None:
    path, kept = tmp_path / "slurm.conf", tmp_path / "slurm.conf.before-shoal"
    path.write_bytes(b"theirs")
    write(path, b"ours")
    for changed in (b"changed once", b"changed twice"):
        path.write_bytes(changed)
        write(path, b"ours")
    assert (path.read_bytes(), kept.read_bytes()) == (b"ours", b"theirs")
    later = {backup.read_bytes() for backup in tmp_path.glob("slurm.conf.before-shoal.later*")}
    assert later == {b"changed once", b"changed twice"}


def test_names_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.0.0.9 old # shoal-cluster\n")
    before = os.open(hosts, os.O_RDONLY)  # a process that reads it meanwhile
    monkeypatch.setattr(shell, "HOSTS", str(hosts))
    run(shell.write_names(["10.0.0.1 a", "10.0.0.2 b"]))
    wanted = "127.0.0.1 localhost\n10.0.0.1 a # shoal-cluster\n10.0.0.2 b # shoal-cluster\n"
    assert hosts.read_text() == wanted
    assert b"10.0.0.9 old" in os.read(before, 1000)
    os.close(before)
    run(shell.has_names(["10.0.0.1 a", "10.0.0.2 b"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts", "state"]


def test_the_machines_own_name_leads_to_the_network_and_back_to_loopback_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_name = os.uname().nodename.partition(".")[0]
    before = f"127.0.0.1 localhost\n127.0.1.1 {own_name}.lan {own_name}\n127.0.1.1 x{own_name}\n\n# theirs\n"
    hosts = tmp_path / "hosts"
    hosts.write_text(before)
    monkeypatch.setattr(shell, "HOSTS", str(hosts))
    names = [f"10.0.0.1 {own_name}"]
    with pytest.raises(subprocess.CalledProcessError):
        run(shell.has_names(names))
    run(shell.write_names(names))
    run(shell.has_names(names))
    assert f"\n127.0.1.1 {own_name}" not in hosts.read_text()
    assert f"\n127.0.1.1 x{own_name}\n" in hosts.read_text()
    run(shell.write_names(names))
    run(shell.remove_names())
    assert hosts.read_text() == before
    run(shell.has_no_names())


def test_partly_transferred_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "slurm.conf"
    path.write_bytes(b"theirs")
    file = File(str(path), b"ours, all of it", owner="root:root")
    with pytest.raises(subprocess.CalledProcessError):
        run(shell.write(file, is_foreign=True), b"ours")
    assert path.read_bytes() == b"theirs"
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["slurm.conf", "state"]


def test_claim_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before that, the machine is still a known member and is cleaned by the next try."""
    place = tmp_path / "state"
    monkeypatch.setattr(teardown, "STATE_DIR", str(place))
    (place / "started").mkdir()
    for name in ("cluster", "files", "started/slurmd"):
        (place / name).write_text("lab\n")
    fact = read_facts(facts_text("a", "10.0.0.1", "own cluster lab"), InventoryHost(address="10.0.0.1"))
    last = teardown.teardown_steps(InventoryHost(address="10.0.0.1"), fact, has_packages_removed=False)[
        -1
    ].apply
    head, _, tail = last.rpartition("\n")
    run(head)
    assert [path.name for path in place.rglob("*")] == ["cluster"]
    run(tail)
    assert not place.exists()


@pytest.mark.parametrize(("is_killed", "code"), [(True, 0), (False, 1)])
def test_a_daemon_that_ignores_sigterm_is_killed_where_that_loses_nothing(
    tmp_path: Path, *, is_killed: bool, code: int
) -> None:
    pid_file = tmp_path / "pid"
    command = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]
    with subprocess.Popen(command, stdout=PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == b"ready\n"
            pid_file.write_text(str(daemon.pid))
            process = Path(f"/proc/{daemon.pid}/comm").read_text().strip()
            service = shell.Daemon("x", "x", process, str(pid_file), "true", stop_s=1, is_killed=is_killed)
            done = subprocess.run(
                ["sh", "-c", shell.stop(service, "none")], stderr=PIPE, text=True, check=False
            )
            message = f"{process} ({daemon.pid}) does not end: State:\tS (sleeping) in "
            assert (done.returncode, bool(done.stderr)) == (code, bool(code))
            assert done.stderr.startswith(message if code else "")
            assert pid_file.exists() is bool(code)
        finally:
            daemon.kill()


def test_zombie_does_not_run_whenever_it_is_reaped() -> None:
    """Two reads of its status would see a zombie that is reaped between them as a process that lives."""
    alive = shell._is_alive(shell.Daemon("x", "x", "sleep", "/pid", "true"), "$1")
    assert alive.count("/proc/") == 1

    def runs(pid: int) -> bool:
        script = f"if {alive}; then exit 0; fi; exit 3"
        return subprocess.run(["sh", "-c", script, "-", str(pid)], check=False).returncode == 0

    with subprocess.Popen(["sleep", "60"]) as process:
        assert runs(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not runs(process.pid), "a zombie"
    assert not runs(process.pid), "reaped"
    assert not runs(os.getpid()), "another process"


def test_earlier_file_is_restored_in_one_move(tmp_path: Path) -> None:
    path, kept = tmp_path / "munge.key", tmp_path / "munge.key.before-shoal"
    path.write_bytes(b"ours")
    kept.write_bytes(b"theirs")
    _, change = shell.removal(str(path))
    assert "rm -f" not in change.partition("else")[0]
    run(change)
    assert (path.read_bytes(), kept.exists()) == (b"theirs", False)


def test_mark_is_never_written_through_a_planted_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    folder, precious = tmp_path / "scratch", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("theirs")
    mark = folder / prerequisites.SHARED_MARK
    mark.symlink_to(precious)
    for _ in range(2):
        run(prerequisites.write_shared_mark(str(folder), "lab of a"))
        run(prerequisites.has_shared_mark(str(folder), "lab of a"))
        assert (mark.is_symlink(), precious.read_text()) == (False, "theirs")
    assert list(folder.iterdir()) == [mark]


def test_failed_mark_leaves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    mark = tmp_path / prerequisites.SHARED_MARK
    mark.mkdir()
    with pytest.raises(subprocess.CalledProcessError):
        run(prerequisites.write_shared_mark(str(tmp_path), "lab of a"))
    assert list(mark.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"state", mark.name}


@pytest.mark.parametrize(
    ("seen", "arguments"),
    [
        ("lab of a", ""),
        ("lab of b\nhint: rm /", "{folder} has the mark 'lab of b', not 'lab of a': mount it as on a\n"),
        ("x\\nhint: rm /", "{folder} has the mark 'x\\nhint: rm /', not 'lab of a': mount it as on a\n"),
        (None, "{folder} is a directory of this machine alone; mount it as on a\n"),
    ],
)
def test_a_directory_with_the_mark_of_another_cluster_is_not_the_controllers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str | None, arguments: str
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.setattr(prerequisites, "MARK_ATTEMPTS", 1)
    if seen is not None:
        (tmp_path / prerequisites.SHARED_MARK).write_text(f"{seen}\n")
    script = prerequisites.explain_missing_mark(str(tmp_path), "lab of a", "a")
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (int(bool(arguments)), arguments.format(folder=tmp_path))


def test_claim_without_an_id_gets_one_id(tmp_path: Path) -> None:
    """An older Shoal made the claim: the next run adds an id, and later runs do not change it."""
    (tmp_path / "state" / "cluster").write_text("lab\n")
    run(shell.is_claimed("lab"))
    with pytest.raises(subprocess.CalledProcessError):
        run(shell.is_claimed(f"lab {CLUSTER_ID}"))
    run(shell.make_claim(f"lab {CLUSTER_ID}", "direct"))
    run(shell.is_claimed(f"lab {CLUSTER_ID}"))
