"""One control plane in one home; remembered options; a token that is printed once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shoal.cli.control_plane import data_plane, server, up
from shoal.cli.control_plane import home as home_module
from shoal.cli.control_plane import home as homes
from shoal.cli.control_plane.daemon import RunningServer, server_environment, start
from shoal.client.connection import Connection
from shoal.client.credentials import LOCAL, Credentials, find_endpoint
from shoal.engines.ray.head import HeadRecord, RayHead
from shoal.errors import SpecError, StateError
from shoal.home import last_port, pid_holding
from shoal.runtime.files.spool import boot_id, start_ticks
from shoal.settings import Settings


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))


HOLD = """
import sys
from pathlib import Path
from shoal.cli.control_plane.home import hold
held = hold(Path(sys.argv[1]))
print(1, flush=True)
sys.stdin.read()
"""


def test_home_has_one_holder_and_a_killed_one_releases_it(tmp_path: Path) -> None:
    assert pid_holding(tmp_path) is None
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert pid_holding(tmp_path) == process.pid
        with pytest.raises(StateError, match="already running"):
            homes.hold(tmp_path)
    finally:
        process.kill()
        process.communicate()
    assert pid_holding(tmp_path) is None
    homes.hold(tmp_path).close()


def test_the_home_is_for_its_owner_alone(tmp_path: Path) -> None:
    homes.prepare_home(tmp_path / "home")
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="cannot use"):
        homes.prepare_home(tmp_path / "file")


def test_the_first_token_is_saved_then_shown_once(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "first-token").write_text("shl_tok_1_x")
    assert homes.adopt_first_token(Settings(home=tmp_path)) == "shl_tok_1_x"
    assert homes.adopt_first_token(Settings(home=tmp_path)) is None
    assert Credentials(tmp_path).token(LOCAL) == "shl_tok_1_x"


def test_home_with_a_past_and_no_token_requests_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, request_file = Settings(home=tmp_path), tmp_path / "keys" / "asked-token"
    assert not homes.ask_for_token(settings), "the first start makes the first one"
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "signing.key").touch()
    two = replace(settings, shared=tmp_path / "shared", database_url="postgresql://db/shoal")
    assert not homes.ask_for_token(two), "others have theirs"
    assert not request_file.exists()
    assert homes.ask_for_token(settings)
    assert request_file.exists()
    Credentials(tmp_path).save(LOCAL, "shl_x")
    assert not homes.ask_for_token(settings)
    Credentials(tmp_path).forget(LOCAL)
    assert homes.ask_for_token(settings)
    Credentials(tmp_path).path.write_text("broken")
    with pytest.raises(SpecError, match="cannot read") as caught:
        homes.ask_for_token(settings)
    assert caught.value.hint is not None
    assert "`shoal down` and `shoal up` make another token" in caught.value.hint


@pytest.mark.parametrize("counts", [{"running": 1}, {"queued": 3}, None])
def test_down_says_that_jobs_keep_running_if_some_do_or_it_is_unknown(
    counts: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(_: object) -> dict[str, object]:
        if counts is None:
            raise StateError("no answer")
        return {"counts": counts}

    monkeypatch.setattr(up, "pid_holding", lambda _: 7)
    monkeypatch.setattr("shoal.cli.control_plane.daemon.stop", lambda _: 7)
    monkeypatch.setattr(Connection, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(Connection, "__exit__", lambda *_: None)
    monkeypatch.setattr(Connection, "status", status)
    up.down()
    assert ("running jobs keep running" in capsys.readouterr().out) == (counts != {"queued": 3})


def test_down_says_that_the_started_ray_keeps_running_and_how_to_stop_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "the Ray that Shoal started keeps running; `shoal connect local` stops it"
    head = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        (tmp_path / "ray").mkdir()
        ticks, inode = start_ticks(head.pid) or 0, (tmp_path / "ray").stat().st_ino
        record = HeadRecord(port=1, pid=head.pid, ticks=ticks, boot=boot_id(), inode=inode)
        (tmp_path / "ray" / "head.json").write_bytes(msgspec.json.encode(record))
        up.down()
        assert expected in capsys.readouterr().out
        shutil.copytree(tmp_path / "ray", tmp_path / "copy" / "ray")
        assert not RayHead(tmp_path / "copy" / "ray", "").stop(), "it is the original's"
        up.down(json=True)
        assert json.loads(capsys.readouterr().out)["pid"] is None
    finally:
        head.kill()
        head.wait()
    up.down()
    assert expected not in capsys.readouterr().out


@pytest.mark.parametrize("is_first_start", [True, False])
def test_login_keeps_its_server_when_a_first_token_is_saved(tmp_path: Path, is_first_start: bool) -> None:
    Credentials(tmp_path).save("https://far:1", "shl_far")
    Credentials(tmp_path).use("https://far:1")
    if is_first_start:
        (tmp_path / "keys").mkdir()
        (tmp_path / "keys" / "first-token").write_text("shl_tok_1_x")
    homes.adopt_first_token(Settings(home=tmp_path))
    homes.write_server_file(tmp_path, {"url": "http://127.0.0.1:5", "pid": 1})
    there = find_endpoint({"SHOAL_HOME": str(tmp_path)})
    assert (there.url, there.token) == ("https://far:1", "shl_far")
    homes.remove_server_file(tmp_path, 1)
    assert find_endpoint({"SHOAL_HOME": str(tmp_path)}).url == "https://far:1"


def test_a_home_keeps_its_port_over_a_clean_end(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, port=0)
    first, _ = server.listen(settings, is_fixed=False)
    with first:
        port = first.getsockname()[1]
    server.announce(replace(settings, port=port), "", taken=None, is_foreground=False)
    homes.remove_server_file(tmp_path, os.getpid())
    second, taken = server.listen(settings, is_fixed=False)
    with second:
        assert (second.getsockname()[1], taken) == (port, None)
        third, taken = server.listen(settings, is_fixed=False)
        with third:
            other = third.getsockname()[1]
        assert other not in (0, port)
        assert taken == port
    server.announce(replace(settings, port=other), "", taken=taken, is_foreground=False)
    assert last_port(tmp_path) == other
    fourth, taken = server.listen(settings, is_fixed=False)
    with fourth:
        assert (fourth.getsockname()[1], taken) == (port, None)


def test_only_a_port_taken_at_this_start_is_mentioned(tmp_path: Path) -> None:
    homes.write_server_file(tmp_path, {"url": "http://127.0.0.1:5", "pid": 1})
    running = RunningServer("http://127.0.0.1:5", 1, was_running=False)
    assert list(up.remarks(running)) == []
    notes = list(up.remarks(replace(running, taken_port=7462)))
    assert notes == ["note: port 7462 was taken; this server has 5 instead"]
    notes = list(up.remarks(replace(running, taken_serve_port=7463)))
    assert notes == ["note: port 7463 was taken; services have another one, which `shoal services` shows"]


def test_port_of_services_that_is_taken_is_refused_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "LEAVING_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings(home=tmp_path, serve_port=port)
        assert data_plane.taken_port(settings, is_fixed=False) == port
        with pytest.raises(StateError) as wrong:
            data_plane.taken_port(settings, is_fixed=True)
    assert wrong.value.message == f"services cannot be called at 127.0.0.1:{port}: Address already in use"
    assert wrong.value.hint is not None
    assert wrong.value.hint.endswith("`shoal up --serve-on 127.0.0.1:0`")
    assert data_plane.taken_port(settings, is_fixed=True) is None


def test_port_of_services_that_the_homes_own_data_plane_has_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own_listener:
        port = own_listener.getsockname()[1]
        monkeypatch.setattr(data_plane, "running_data_plane", lambda _: {"url": f"http://127.0.0.1:{port}"})
        assert data_plane.taken_port(Settings(home=tmp_path, serve_port=port), is_fixed=True) is None


def test_up_says_when_commands_talk_to_another_server(tmp_path: Path) -> None:
    Credentials(tmp_path).use("https://far:1")
    (note,) = up.remarks(RunningServer("http://127.0.0.1:7462", 1, was_running=True))
    assert "commands talk to https://far:1, chosen by shoal login; `shoal login local`" in note


def test_up_with_options_that_differ_from_the_running_server_is_refused(tmp_path: Path) -> None:
    homes.remember(tmp_path, {"keep_logs": "30d"})
    with homes.hold(tmp_path):
        homes.write_server_file(tmp_path, {"url": "http://127.0.0.1:5", "pid": os.getpid()})
        same: tuple[dict[str, str | None], ...] = (
            {},
            {"demo": "none"},
            {"keep_logs": "720h", "listen": None},
        )
        for flags in same:
            assert start(flags).was_running
        with pytest.raises(StateError, match=r"`--demo 4x8` \(there: not given\)") as caught:
            start({"demo": "4x8", "keep_logs": "30d"})
        assert "--keep-logs" not in caught.value.message
        assert "`shoal down` first" in str(caught.value.hint)
    assert homes.load_remembered(tmp_path) == {"keep_logs": "30d"}


def test_a_policy_that_no_server_could_start_with_is_not_remembered(tmp_path: Path) -> None:
    homes.remember(tmp_path, {"keep_logs": "30d"})
    wrong = tmp_path / "policy.yaml"
    wrong.write_text("max_evictions: -3")
    with pytest.raises(SpecError, match="`max_evictions` is a number from 0"):
        start({"policy": str(wrong)})
    assert homes.load_remembered(tmp_path) == {"keep_logs": "30d"}


def test_server_removes_only_its_own_address_file(tmp_path: Path) -> None:
    homes.write_server_file(tmp_path, {"url": "http://127.0.0.1:5", "pid": 5})
    homes.remove_server_file(tmp_path, 4)
    assert json.loads((tmp_path / "server.json").read_text())["pid"] == 5
    homes.remove_server_file(tmp_path, 5)
    assert not (tmp_path / "server.json").exists()


def test_options_are_remembered_for_their_owner_alone(tmp_path: Path) -> None:
    assert homes.load_remembered(tmp_path) == {}
    homes.remember(tmp_path, {"database_url": "postgresql://u:pw@h/d"})
    assert homes.load_remembered(tmp_path) == {"database_url": "postgresql://u:pw@h/d"}
    assert (tmp_path / "options.json").stat().st_mode & 0o777 == 0o600


def test_server_process_gets_options_as_variables_and_no_callers_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "shl_mine")
    monkeypatch.setenv("SHOAL_URL", "https://far")
    environment = server_environment({"database_url": "sqlite:///x", "demo": "4x8"}, tmp_path)
    assert environment["SHOAL_DATABASE_URL"] == "sqlite:///x"
    assert environment["SHOAL_DEMO"] == "4x8"
    assert environment["SHOAL_HOME"] == str(tmp_path)
    assert not {"SHOAL_TOKEN", "SHOAL_URL"} & set(environment)
    assert environment["PATH"] == os.environ["PATH"]


def test_up_of_a_standby_names_the_leader(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = "http://127.0.0.1:1", "http://127.0.0.1:2"
    up.announce(RunningServer(second, 7, was_running=False, role="standby", leader=first))
    output = capsys.readouterr().out
    assert f"Shoal is up at {second} (process 7) and stands by: {first} leads" in output
    assert f"`shoal login {first},{second}`" in output


@pytest.mark.parametrize(
    ("nodes", "expected"), [(2, "2 nodes"), (1, "1 node"), (0, "`shoal nodes` shows its nodes")]
)
def test_up_names_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, expected: str
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert up.engine_text() == "", "this machine"
    homes.remember(tmp_path, {"engine": "slurm", "nodes_on": "127.0.0.1:7464"})
    assert up.engine_text() == "", "nothing is connected"
    (tmp_path / "slurm.json").write_text(json.dumps({"cluster": "lab", "heads": ["a"]}))
    assert up.engine_text() == "over the Slurm `lab` (a): `shoal nodes` shows its nodes", "no server answers"
    answer: list[dict[str, object]] = [{"is_alive": number < nodes} for number in range(3)]
    monkeypatch.setattr(Connection, "nodes", lambda _: answer)
    assert up.engine_text() == f"over the Slurm `lab` (a): {expected}"
    if nodes:
        answer[0]["unanswered"] = {"since": 7.0, "has_answered": True}
        assert up.engine_text() == f"over the Slurm `lab` (a): {expected} when it last answered"


def test_data_plane_that_crashed_counts_as_not_running(tmp_path: Path) -> None:
    """The child is a zombie: its parent became another program, and no process has reaped it."""
    child = subprocess.Popen(["sleep", "300"])
    ticks, home = start_ticks(child.pid), home_module.home_identity(tmp_path)
    facts = {"pid": child.pid, "ticks": ticks, "url": "http://127.0.0.1:3", "home": home}
    (tmp_path / "serving.json").write_text(json.dumps(facts))
    assert home_module.running_data_plane(tmp_path) == facts
    (tmp_path / "copy").mkdir()
    shutil.copy2(tmp_path / "serving.json", tmp_path / "copy")
    assert home_module.running_data_plane(tmp_path / "copy") is None, "it is the original's"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) == facts["ticks"]
    assert home_module.running_data_plane(tmp_path) is None
    child.wait()
