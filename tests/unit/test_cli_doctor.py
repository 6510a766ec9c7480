"""The doctor finds what is broken, says what to type, and is never ill itself."""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import time
from pathlib import Path

import pynvml
import pytest

from shoal.cli import checkup_machine, checkup_server, doctor
from shoal.cli.checkup import Finding, Level
from shoal.cli.checkup_server import (
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
from shoal.cli.home import remember
from shoal.client.credentials import LOCAL, Credentials, Endpoint
from shoal.control import uids
from shoal.control.authority import load_authority, load_certificate
from shoal.engines.fake import VirtualClock
from shoal.loopback import FIRST_PROJECT_UID
from shoal.runtime import spool
from shoal.runtime.confine import firewall
from shoal.settings import Settings
from tests.support.cli import Shell
from tests.support.fake_server import running_fake
from tests.support.shares import an_order


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "home", monkeypatch, capsys)


def test_a_sound_machine_without_a_server_yet_is_not_broken(shell: Shell) -> None:
    result = shell("doctor", "--json")
    found = {finding["name"]: finding for finding in result.json()}
    assert result.code == 0, found
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
    } <= set(found)
    assert "shoal up" in found["server"]["hint"]


def test_something_broken_exits_1_and_says_what_to_type(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5})())
    result = shell("doctor")
    assert result.code == 1
    assert "broken disk" in result.out
    assert "-> free some: `du -sh" in result.out


def test_what_was_found_is_broken_between_words(shell: Shell) -> None:
    told = " ".join(f"word{n}" for n in range(30))
    shown = doctor.lines(Finding("moon", Level.WARN, told, f"`{told}` /a/{'long' * 20}"))
    assert [line for line in shown if len(line) > 80] == [f"                       /a/{'long' * 20}"]
    assert " ".join("\n".join(shown).split()) == f"warn moon {told} -> `{told}` /a/{'long' * 20}"
    assert all(line.startswith(" " * 20) for line in shown[1:])


def test_a_server_elsewhere_that_does_not_answer_is_not_a_case_for_the_doctor_again(shell: Shell) -> None:
    Credentials(shell.home).use("http://127.0.0.1:1")
    found = check_server()
    assert found.level is Level.BROKEN
    assert "shoal doctor" not in found.hint
    assert "`shoal login local`" in found.hint


def test_a_check_that_fails_itself_does_not_end_the_visit() -> None:
    def check_moon() -> Finding:
        raise OSError("no moon tonight")

    def check_sun() -> Finding:
        return Finding("sun", Level.OK, "shines")

    found = list(doctor.examine((check_moon, check_sun)))
    assert [(finding.name, finding.level) for finding in found] == [("moon", Level.WARN), ("sun", Level.OK)]


def test_a_home_that_cannot_be_written_is_broken(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", "/proc/nowhere/home")
    found = checkup_machine.check_home()
    assert found.level is Level.BROKEN
    assert "SHOAL_HOME" in found.hint


def test_a_home_that_shoal_up_would_refuse_is_broken(shell: Shell) -> None:
    keys = shell.home / "keys"
    keys.mkdir(parents=True, mode=0o700)
    (keys / "signing.key").touch(mode=0o600)
    shell.home.chmod(0o700)
    assert checkup_machine.check_home().level is Level.OK
    (keys / "signing.key").chmod(0o644)
    found = checkup_machine.check_home()
    assert found.level is Level.BROKEN
    assert f"chmod go= {keys}/signing.key" in found.hint
    (keys / "signing.key").chmod(0o600)
    shell.home.chmod(0o777)
    found = checkup_machine.check_home()
    assert found.level is Level.BROKEN
    assert f"chmod go-w {shell.home}" in found.hint


def test_credentials_that_others_can_read_are_broken(shell: Shell) -> None:
    Credentials(shell.home).save(LOCAL, "shl_x")
    assert check_credentials().level is Level.OK
    Credentials(shell.home).path.write_text("{")
    found = check_credentials()
    assert found.level is Level.BROKEN
    assert "`shoal up` make another token" in found.hint
    Credentials(shell.home).path.chmod(0o644)
    found = check_credentials()
    assert (found.level, found.hint) == (Level.BROKEN, f"`chmod 600 {Credentials(shell.home).path}`")


def test_a_database_that_nobody_serves_is_broken_and_its_password_is_not_shown(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATABASE_URL", "postgresql+psycopg://u:s3cret@127.0.0.1:1/d")
    found = check_database()
    assert found.level is Level.BROKEN
    assert "s3cret" not in found.told + found.hint


def test_a_token_the_server_does_not_know_is_broken(shell: Shell) -> None:
    with running_fake() as fake:
        shell.talk_to(fake)
        assert check_server().level is Level.OK
        fake.answers["GET", "/v1/me"] = fake.problem(401, "unauthenticated", "expired")
        found = check_server()
    assert found.level is Level.BROKEN
    assert "shoal login" in found.hint


@pytest.mark.parametrize(
    ("ahead_s", "level", "words"),
    [
        (0.0, Level.OK, "of this machine's"),
        (3600.0, Level.WARN, "ahead of this machine's"),
        (-3600.0, Level.WARN, "behind this machine's"),
    ],
)
def test_a_servers_clock_is_compared_with_this_machines(
    shell: Shell, ahead_s: float, level: Level, words: str
) -> None:
    with running_fake() as fake:
        shell.talk_to(fake)
        fake.ahead_s = ahead_s
        found = check_server_clock()
    assert (found.level, words in found.told) == (level, True)


def test_a_server_that_does_not_know_us_is_asked_for_no_clock(shell: Shell) -> None:
    with running_fake() as fake:
        shell.talk_to(fake)
        fake.answers["GET", "/v1/me"] = fake.problem(401, "unauthenticated", "expired")
        assert check_server_clock().told == "not asked: see `server`"


def test_whoever_is_not_known_is_told_of_a_way_that_there_is(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_fake() as fake:
        shell.talk_to(fake)
        monkeypatch.delenv("SHOAL_TOKEN")
        here = Endpoint(fake.url, "shl_x", is_local=True)
        monkeypatch.setattr(checkup_server, "find_endpoint", lambda: here)
        monkeypatch.setattr(checkup_server, "holder", lambda _: 1)
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


def test_what_the_engine_says_about_its_nodes_is_told(shell: Shell) -> None:
    told = "what confines jobs here is not known: timed out"
    with running_fake() as fake:
        shell.talk_to(fake)
        fake.answers["GET", "/v1/nodes"] = {
            "items": [{"name": "box", "remarks": [told]}],
            "next_cursor": None,
        }
        found = check_nodes()
        assert (found.level, found.told) == (Level.OK, f"1 known; box: {told}")
        unknown = {"name": "box", "confinement": "unknown", "remarks": [told]}
        fake.answers["GET", "/v1/nodes"] = {"items": [unknown], "next_cursor": None}
        found = check_nodes()
        elsewhere = {**unknown, "engine": "slurm", "remarks": []}
        fake.answers["GET", "/v1/nodes"] = {"items": [elsewhere], "next_cursor": None}
        there = check_nodes()
    assert (found.level, found.hint) == (Level.WARN, "look again with `shoal nodes box`")
    assert f"box: {told}; jobs start on box all the same" in found.told
    assert there.level is Level.OK
    assert there.told == "1 known; what confines jobs there each supervisor finds out where it starts"


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
    assert checkup_machine.check_network().level is Level.OK
    for attempt, uid in (("att_1", 1_900_000_001), ("att_2", 1_900_000_002), ("att_3", 1_900_000_000)):
        place = state / "spool" / "live" / attempt / "node-1"
        place.mkdir(parents=True)
        share = spool.Share(place)
        spool.write_order(share, an_order(attempt_id=attempt, uid=uid))
        with monkeypatch.context() as of_machine:
            if attempt == "att_3":
                of_machine.setattr(spool, "boot_id", lambda: "another machine's")
            spool.claim(share, 0.0)
    found = checkup_machine.check_network()
    assert found.level is Level.WARN
    assert "user 1900000002" in found.told


def test_simulated_gpus_are_no_advice_where_jobs_run_elsewhere(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise pynvml.NVMLError(1)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert "--demo" in checkup_machine.check_gpus().told
    monkeypatch.setenv("SHOAL_ENGINE", "slurm")
    told = checkup_machine.check_gpus().told
    assert "--demo" not in told
    assert "`shoal nodes`" in told


def test_cap_of_a_rack_that_no_node_is_in_is_a_warning(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("power_caps: {r1: 1000, r9: 1000}\n")
    shell.home.mkdir()
    remember(shell.home, {"policy": str(policy)})
    monkeypatch.setattr(Endpoint, "is_local", True)
    with running_fake() as fake:
        shell.talk_to(fake)
        boxes = [{"name": "box", "labels": {"rack": "r1"}}]
        fake.answers["GET", "/v1/nodes"] = {"items": boxes, "next_cursor": None}
        found = check_policy()
        policy.write_text("power_caps: {r1: 1000}\n")
        assert check_policy().level is Level.OK
    assert found.level is Level.WARN
    assert found.told == "`power_caps`: no node has the label `rack` with `r9`; nodes are in `r1`"


def test_a_token_that_ends_soon_is_a_warning(shell: Shell) -> None:
    with running_fake() as fake:
        shell.talk_to(fake)
        fake.answers["GET", "/v1/me"] = {"user": "ana", "token": {"expires_at": 1.0}, "projects": []}
        found = check_server()
    assert found.level is Level.WARN
    assert "token" in found.hint


def test_a_server_that_answers_and_cannot_work_is_broken(shell: Shell) -> None:
    failing = {"loop": "place", "since": 0.0, "times": 12, "why": "no space left on device"}
    with running_fake() as fake:
        shell.talk_to(fake)
        fake.answers["GET", "/v1/status"] = {"failing": []}
        assert check_loops().level is Level.OK
        fake.answers["GET", "/v1/status"] = {"failing": [failing]}
        found = check_loops()
    assert found.level is Level.BROKEN
    assert found.told == (
        "`place` has failed 12 times since 1970-01-01 00:00:00 UTC: no space left on device"
    )
    assert "control.log" in found.hint


def test_services_at_another_port_than_theirs_are_broken(shell: Shell) -> None:
    with running_fake() as fake:
        shell.talk_to(fake)
        fake.answers["GET", "/v1/status"] = {"taken_service_port": None}
        assert check_services().level is Level.OK
        fake.answers["GET", "/v1/status"] = {"taken_service_port": 7463}
        found = check_services()
    assert found.level is Level.BROKEN
    assert "port 7463 is another program's" in found.told
    assert "sport = :7463" in found.hint


@pytest.mark.parametrize(
    ("authority_days", "server_days", "level", "hint"),
    [
        (0, 0, Level.OK, ""),
        (3000, 340, Level.WARN, "`shoal up` makes another"),
        (3000, 400, Level.BROKEN, "`shoal up` makes another"),
        (3600, 0, Level.WARN, "rm {home}/keys/ca.pem {home}/keys/ca.key"),
        (3700, 0, Level.BROKEN, "rm {home}/keys/ca.pem {home}/keys/ca.key"),
    ],
)
def test_dates_of_the_certificates_for_nodes_are_told_before_they_come(
    shell: Shell, authority_days: int, server_days: int, level: Level, hint: str
) -> None:
    assert check_certificates().told == "none: no other machine asks here"
    now, day_s = time.time(), 86400.0
    load_authority(shell.home, VirtualClock(now - authority_days * day_s))
    settings = Settings(home=shell.home, nodes_host="10.0.0.1", nodes_port=7464)
    load_certificate(settings, VirtualClock(now - server_days * day_s))
    found = check_certificates()
    assert found.level is level
    assert hint.format(home=shell.home) in found.hint
    ends = [
        time.strftime("%Y-%m-%d", time.gmtime(now + (days - age) * day_s))
        for days, age in ((397, server_days), (3650, authority_days))
    ]
    assert found.told == f"for nodes: good until {ends[0]}, their authority until {ends[1]} (UTC)"


@pytest.mark.parametrize(("hard", "level"), [(256, Level.BROKEN), (1024, Level.WARN), (4096, Level.OK)])
def test_what_counts_is_how_many_files_may_be_had_not_how_many_a_shell_begins_with(
    monkeypatch: pytest.MonkeyPatch, hard: int, level: Level
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    assert checkup_machine.check_files().level is level


@pytest.mark.parametrize(("is_noted", "level"), [(True, Level.BROKEN), (False, Level.OK)])
def test_account_in_a_block_of_projects_users_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Level, *, is_noted: bool
) -> None:
    uid = FIRST_PROJECT_UID + 7
    carl = pwd.struct_passwd(("carl", "x", uid, 100, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [carl])
    monkeypatch.setattr(uids, "subordinate_ranges", lambda: iter(()))
    monkeypatch.setattr(uids, "REGISTRY", tmp_path)
    if is_noted:
        (tmp_path / str(FIRST_PROJECT_UID)).touch()
    found = checkup_machine.check_uids()
    assert (found.level, f"carl has uid {uid}" in found.told) == (level, is_noted)
