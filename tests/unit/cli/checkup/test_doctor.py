"""`shoal doctor` finds what is broken, prints what to type, and does not fail itself."""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import time
from pathlib import Path

import pynvml
import pytest

from shoal.cli.checkup import doctor, machine, server
from shoal.cli.checkup.machine import Finding, Level
from shoal.cli.checkup.server import (
    check_certificates,
    check_credentials,
    check_database,
    check_loops,
    check_nodes,
    check_policy,
    check_server,
    check_server_clock,
    check_services,
)
from shoal.cli.control_plane.home import remember
from shoal.client.credentials import LOCAL, Credentials, Endpoint
from shoal.control import project_uids
from shoal.control.bootstrap import load_authority, load_certificate
from shoal.engines.fake import VirtualClock
from shoal.local_sockets import FIRST_PROJECT_UID
from shoal.runtime.confine import firewall
from shoal.runtime.files import spool
from shoal.settings import Settings
from tests.support.fakes.api_server import Shell, running_fake
from tests.support.runtime.tasks import a_task_spec


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "home", monkeypatch, capsys)


def test_a_sound_machine_without_a_server_yet_is_not_broken(shell: Shell) -> None:
    result = shell("doctor", "--json")
    document = {finding["name"]: finding for finding in result.json()}
    assert result.code == 0, document
    assert {
        "python",
        "home",
        "disk",
        "files",
        "clock",
        "cgroups",
        "bwrap",
        "port",
        "gpus",
        "database",
    } <= set(document)
    assert "shoal up" in document["server"]["hint"]


def test_broken_finding_exits_1_with_a_hint(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5})())
    result = shell("doctor")
    assert result.code == 1
    assert "broken disk" in result.out
    assert "-> free some: `du -sh" in result.out


def test_findings_wrap_between_words(shell: Shell) -> None:
    expected = " ".join(f"word{n}" for n in range(30))
    shown = doctor.finding_lines(Finding("moon", Level.WARN, expected, f"`{expected}` /a/{'long' * 20}"))
    assert [line for line in shown if len(line) > 80] == [f"                       /a/{'long' * 20}"]
    assert " ".join("\n".join(shown).split()) == f"warn moon {expected} -> `{expected}` /a/{'long' * 20}"
    assert all(line.startswith(" " * 20) for line in shown[1:])


def test_unreachable_remote_server_does_not_suggest_doctor_again(shell: Shell) -> None:
    Credentials(shell.home).use("http://127.0.0.1:1")
    finding = check_server()
    assert finding.level is Level.BROKEN
    assert "shoal doctor" not in finding.hint
    assert "`shoal login local`" in finding.hint


def test_check_that_raises_does_not_stop_the_others() -> None:
    def check_moon() -> Finding:
        raise OSError("no moon tonight")

    def check_sun() -> Finding:
        return Finding("sun", Level.OK, "shines")

    result = list(doctor.examine((check_moon, check_sun)))
    assert [(finding.name, finding.level) for finding in result] == [("moon", Level.WARN), ("sun", Level.OK)]


def test_a_home_that_cannot_be_written_is_broken(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", "/proc/nowhere/home")
    finding = machine.check_home()
    assert finding.level is Level.BROKEN
    assert "SHOAL_HOME" in finding.hint


def test_a_home_that_shoal_up_would_refuse_is_broken(shell: Shell) -> None:
    keys = shell.home / "keys"
    keys.mkdir(parents=True, mode=0o700)
    (keys / "signing.key").touch(mode=0o600)
    shell.home.chmod(0o700)
    assert machine.check_home().level is Level.OK
    (keys / "signing.key").chmod(0o644)
    finding = machine.check_home()
    assert finding.level is Level.BROKEN
    assert f"chmod go= {keys}/signing.key" in finding.hint
    (keys / "signing.key").chmod(0o600)
    shell.home.chmod(0o777)
    finding = machine.check_home()
    assert finding.level is Level.BROKEN
    assert f"chmod go-w {shell.home}" in finding.hint


def test_credentials_that_others_can_read_are_broken(shell: Shell) -> None:
    Credentials(shell.home).save(LOCAL, "shl_x")
    assert check_credentials().level is Level.OK
    Credentials(shell.home).path.write_text("{")
    finding = check_credentials()
    assert finding.level is Level.BROKEN
    assert "`shoal up` make another token" in finding.hint
    Credentials(shell.home).path.chmod(0o644)
    finding = check_credentials()
    assert (finding.level, finding.hint) == (Level.BROKEN, f"`chmod 600 {Credentials(shell.home).path}`")


def test_unreachable_database_is_broken_and_its_password_not_shown(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATABASE_URL", "postgresql+psycopg://u:s3cret@127.0.0.1:1/d")
    finding = check_database()
    assert finding.level is Level.BROKEN
    assert "s3cret" not in finding.message + finding.hint


def test_a_token_the_server_does_not_know_is_broken(shell: Shell) -> None:
    with running_fake() as fake:
        shell.connect_to(fake)
        assert check_server().level is Level.OK
        fake.answers["GET", "/v1/me"] = fake.problem(401, "unauthenticated", "expired")
        finding = check_server()
    assert finding.level is Level.BROKEN
    assert "shoal login" in finding.hint


@pytest.mark.parametrize(
    ("ahead_s", "level", "arguments"),
    [
        (0.0, Level.OK, "of this machine's"),
        (3600.0, Level.WARN, "ahead of this machine's"),
        (-3600.0, Level.WARN, "behind this machine's"),
    ],
)
def test_a_servers_clock_is_compared_with_this_machines(
    shell: Shell, ahead_s: float, level: Level, arguments: str
) -> None:
    with running_fake() as fake:
        shell.connect_to(fake)
        fake.ahead_s = ahead_s
        finding = check_server_clock()
    assert (finding.level, arguments in finding.message) == (level, True)


def test_server_that_refuses_the_token_is_not_asked_for_its_clock(shell: Shell) -> None:
    with running_fake() as fake:
        shell.connect_to(fake)
        fake.answers["GET", "/v1/me"] = fake.problem(401, "unauthenticated", "expired")
        assert check_server_clock().message == "not checked: see `server`"


def test_refused_token_hint_names_a_way_that_works(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_fake() as fake:
        shell.connect_to(fake)
        monkeypatch.delenv("SHOAL_TOKEN")
        here = Endpoint(fake.url, "shl_x", is_local=True)
        monkeypatch.setattr(server, "find_endpoint", lambda: here)
        monkeypatch.setattr(server, "pid_holding", lambda _: 1)
        fake.answers["GET", "/v1/me"] = fake.problem(401, "unauthenticated", "expired")
        ours = check_server()
        remember(shell.home, {"shared": "/shared", "database_url": "postgresql://db/shoal"})
        shared, unsaved = check_server(), check_credentials()
        monkeypatch.setenv("SHOAL_TOKEN", "shl_x")
        overridden = check_server()
    assert ours.hint == "`shoal login local --forget`, `shoal down`, `shoal up`: that makes another token"
    assert shared.hint.startswith("`shoal login local --forget`, `shoal login local` with a token that")
    assert "`shoal up`" not in shared.hint + unsaved.hint, "which makes none there"
    assert overridden.hint.startswith("`unset SHOAL_TOKEN`")
    assert "--forget" not in overridden.hint, "what is saved may be good"


def test_remarks_of_the_engine_about_nodes_are_printed(shell: Shell) -> None:
    expected = "what confines jobs here is not known: timed out"
    with running_fake() as fake:
        shell.connect_to(fake)
        fake.answers["GET", "/v1/nodes"] = {
            "items": [{"name": "box", "remarks": [expected]}],
            "next_cursor": None,
        }
        finding = check_nodes()
        assert (finding.level, finding.message) == (Level.OK, f"1 known; box: {expected}")
        unknown = {"name": "box", "confinement": "unknown", "remarks": [expected]}
        fake.answers["GET", "/v1/nodes"] = {"items": [unknown], "next_cursor": None}
        finding = check_nodes()
        elsewhere = {**unknown, "engine": "slurm", "remarks": []}
        fake.answers["GET", "/v1/nodes"] = {"items": [elsewhere], "next_cursor": None}
        there = check_nodes()
    assert (finding.level, finding.hint) == (Level.WARN, "check again with `shoal nodes box`")
    assert f"box: {expected}; jobs start on box all the same" in finding.message
    assert there.level is Level.OK
    assert there.message == "1 known; each supervisor finds out on its node what confines its job"


@pytest.mark.parametrize("is_shared", [False, True])
def test_network_of_a_running_job_whose_rules_were_flushed_is_open(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_shared: bool
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    state = tmp_path / ("shared" if is_shared else "home")
    if is_shared:
        remember(tmp_path / "home", {"shared": str(state), "database_url": "postgresql://db/shoal"})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(firewall, "find_nft", lambda: "/usr/sbin/nft")
    monkeypatch.setattr(firewall, "works", lambda: True)
    monkeypatch.setattr(firewall, "closed_uids", lambda: {1_900_000_001})
    assert machine.check_network().level is Level.OK
    for attempt, uid in (("att_1", 1_900_000_001), ("att_2", 1_900_000_002), ("att_3", 1_900_000_000)):
        place = state / "spool" / "live" / attempt / "node-1"
        place.mkdir(parents=True)
        share = spool.SpoolTask(place)
        spool.write_task_spec(share, a_task_spec(attempt_id=attempt, uid=uid))
        with monkeypatch.context() as of_machine:
            if attempt == "att_3":
                of_machine.setattr(spool, "boot_id", lambda: "another machine's")
            spool.claim(share, 0.0)
    finding = machine.check_network()
    assert finding.level is Level.WARN
    assert "user 1900000002" in finding.message


def test_simulated_gpus_are_not_suggested_if_jobs_run_on_another_cluster(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise pynvml.NVMLError(1)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert "--demo" in machine.check_gpus().message
    monkeypatch.setenv("SHOAL_ENGINE", "slurm")
    finding = machine.check_gpus().message
    assert "--demo" not in finding
    assert "`shoal nodes`" in finding


def test_power_cap_of_an_empty_rack_is_a_warning(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("power_caps: {r1: 1000, r9: 1000}\n")
    shell.home.mkdir()
    remember(shell.home, {"policy": str(policy)})
    monkeypatch.setattr(Endpoint, "is_local", True)
    with running_fake() as fake:
        shell.connect_to(fake)
        boxes = [{"name": "box", "labels": {"rack": "r1"}}]
        fake.answers["GET", "/v1/nodes"] = {"items": boxes, "next_cursor": None}
        finding = check_policy()
        policy.write_text("power_caps: {r1: 1000}\n")
        assert check_policy().level is Level.OK
    assert finding.level is Level.WARN
    assert finding.message == "`power_caps`: no node has the label `rack` with `r9`; nodes are in `r1`"


def test_a_token_that_ends_soon_is_a_warning(shell: Shell) -> None:
    with running_fake() as fake:
        shell.connect_to(fake)
        fake.answers["GET", "/v1/me"] = {"user": "ana", "token": {"expires_at": 1.0}, "projects": []}
        finding = check_server()
    assert finding.level is Level.WARN
    assert "token" in finding.hint


def test_a_server_that_answers_and_cannot_work_is_broken(shell: Shell) -> None:
    failing = {"loop": "place", "since": 0.0, "times": 12, "why": "no space left on device"}
    with running_fake() as fake:
        shell.connect_to(fake)
        fake.answers["GET", "/v1/status"] = {"failing": []}
        assert check_loops().level is Level.OK
        fake.answers["GET", "/v1/status"] = {"failing": [failing]}
        finding = check_loops()
    assert finding.level is Level.BROKEN
    assert finding.message == (
        "`place` has failed 12 times since 1970-01-01 00:00:00 UTC: no space left on device"
    )
    assert "control.log" in finding.hint


def test_services_at_another_port_than_theirs_are_broken(shell: Shell) -> None:
    with running_fake() as fake:
        shell.connect_to(fake)
        fake.answers["GET", "/v1/status"] = {"taken_service_port": None}
        assert check_services().level is Level.OK
        fake.answers["GET", "/v1/status"] = {"taken_service_port": 7463}
        finding = check_services()
    assert finding.level is Level.BROKEN
    assert "port 7463 is another program's" in finding.message
    assert "sport = :7463" in finding.hint


@pytest.mark.parametrize(
    ("authority_days", "server_days", "level", "hint"),
    [
        (0, 0, Level.OK, ""),
        (3000, 340, Level.WARN, "`shoal up` renews it"),
        (3000, 400, Level.BROKEN, "`shoal up` renews it"),
        (3600, 0, Level.WARN, "rm {home}/keys/ca.pem {home}/keys/ca.key"),
        (3700, 0, Level.BROKEN, "rm {home}/keys/ca.pem {home}/keys/ca.key"),
    ],
)
def test_expiry_of_node_certificates_is_reported_in_advance(
    shell: Shell, authority_days: int, server_days: int, level: Level, hint: str
) -> None:
    assert check_certificates().message == "none: no other machine connects here"
    now, day_s = time.time(), 86400.0
    load_authority(shell.home, VirtualClock(now - authority_days * day_s))
    settings = Settings(home=shell.home, nodes_host="10.0.0.1", nodes_port=7464)
    load_certificate(settings, VirtualClock(now - server_days * day_s))
    finding = check_certificates()
    assert finding.level is level
    assert hint.format(home=shell.home) in finding.hint
    ends = [
        time.strftime("%Y-%m-%d", time.gmtime(now + (days - age) * day_s))
        for days, age in ((397, server_days), (3650, authority_days))
    ]
    assert finding.message == f"for nodes: valid until {ends[0]}, the authority until {ends[1]} (UTC)"


@pytest.mark.parametrize(("hard", "level"), [(256, Level.BROKEN), (1024, Level.WARN), (4096, Level.OK)])
def test_open_files_are_judged_by_the_hard_limit(
    monkeypatch: pytest.MonkeyPatch, hard: int, level: Level
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    assert machine.check_files().level is level


@pytest.mark.parametrize(("is_noted", "level"), [(True, Level.BROKEN), (False, Level.OK)])
def test_account_in_a_block_of_projects_users_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Level, *, is_noted: bool
) -> None:
    uid = FIRST_PROJECT_UID + 7
    carl = pwd.struct_passwd(("carl", "x", uid, 100, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [carl])
    monkeypatch.setattr(project_uids, "subordinate_ranges", lambda: iter(()))
    monkeypatch.setattr(project_uids, "REGISTRY", tmp_path)
    if is_noted:
        (tmp_path / str(FIRST_PROJECT_UID)).touch()
    finding = machine.check_uids()
    assert (finding.level, f"carl has uid {uid}" in finding.message) == (level, is_noted)
