"""Systemd units: those in `deploy/systemd` keep jobs running, and Shoal warns if it runs in another unit."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from shoal.cli.checkup import machine
from shoal.cli.checkup.machine import Level
from shoal.cli.control_plane import up
from shoal.cli.main import build_app
from shoal.engines.ray import agent as agent_module
from shoal.engines.ray.agent import Agent, ending_unit, service_of
from shoal.engines.ray.parse import parse_nodes
from tests.style.tree import ROOT
from tests.support.fakes.api_server import Shell
from tests.unit.engines.ray.test_ray_parse_and_render import answer, facts, row

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
RAYLET = "0::/system.slice/ray.service\n"
OF_USER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "home", monkeypatch, capsys)


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What it answers; this process is in `ray.service`."""
    answer_file = tmp_path / "said"
    answer_file.write_text("KillMode=control-group\nLoadState=loaded\n")
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {answer_file}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(agent_module, "service_of", lambda _: ("ray.service", []))
    return answer_file


def read(unit: Path) -> RawConfigParser:
    parsed = RawConfigParser(strict=False, interpolation=None)  # a key may come again, as `Environment=` does
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(unit.read_text(encoding="utf-8"))
    return parsed


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_end_of_a_unit_of_ours_ends_no_job(unit: Path) -> None:
    service = read(unit)["Service"]
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    assert service["Restart"] == ("on-failure" if unit.name == "shoal.service" else "always")
    assert "PrivateTmp" not in service


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_our_units(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze: apt-get install systemd")
    program = shlex.split(read(unit)["Service"]["ExecStart"])[0]
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text(encoding="utf-8").replace(f"={program} ", "=/bin/true "))
    done = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_control_planes_unit_starts_a_command_that_exists() -> None:
    _, *arguments = shlex.split(read(ROOT / "deploy/systemd/shoal.service")["Service"]["ExecStart"])
    build_app(arguments[0]).parse_args(arguments, exit_on_error=False, print_error=False)
    assert arguments == ["up", "--foreground"]


@pytest.mark.parametrize("name", ["ray-head", "ray-node"])
def test_a_ray_of_our_units_wants_tokens_and_stays_in_front(name: str) -> None:
    text = (ROOT / f"deploy/systemd/{name}.service").read_text(encoding="utf-8")
    assert "\nEnvironment=RAY_AUTH_MODE=token\n" in text
    assert " --block " in text  # otherwise its processes have no parent


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (RAYLET, ("ray.service", [])),
        (f"4:memory:/other.service\n1:name=systemd:/system.slice/ray.service\n{RAYLET}", ("ray.service", [])),
        ("0::/system.slice/ray.service/main\n", ("ray.service", [])),
        ("0::/system.slice/system-ray.slice/ray@a\\x2db.service\n", ("ray@a\\x2db.service", [])),
        (f"{OF_USER}/shoal.service\n", ("shoal.service", ["--user"])),
        (f"{OF_USER}/vte-spawn.scope\n", ("", [])),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ("", [])),
        ("0::/system.slice/docker-5f2c.scope\n", ("", [])),
        ("0::/odd:name.slice\n", ("", [])),
        ("0::/\n", ("", [])),
        ("", ("", [])),
    ],
)  # fmt: skip
def test_whose_control_group_it_is(cgroup: str, expected: tuple[str, list[str]]) -> None:
    assert service_of(cgroup) == expected


@pytest.mark.parametrize(
    ("answer", "unit"),
    [
        ("KillMode=control-group\nLoadState=loaded\n", "ray.service"),
        ("LoadState=loaded\nKillMode=mixed\n", "ray.service"),
        ("KillMode=process\nLoadState=loaded\n", ""),
        ("KillMode=none\nLoadState=loaded\n", ""),
        ("KillMode=control-group\nLoadState=not-found\n", ""),  # a manager of others has it: a container's
        ("KillMode=control-group\n", ""),
        ("", ""),  # no systemd runs here: it said so on standard error
    ],
)
def test_a_unit_ends_what_is_in_it_by_its_kill_mode(systemctl: Path, answer: str, unit: str) -> None:
    systemctl.write_text(answer)
    assert ending_unit() == unit
    assert systemctl.with_name("asked").read_text() == "show --property=LoadState,KillMode -- ray.service\n"


def test_without_systemctl_nothing_is_claimed(systemctl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert ending_unit() == ""


def test_a_node_of_ray_says_that_its_jobs_end_with_a_unit_and_asks_seldom(systemctl: Path) -> None:
    agent = Agent()
    units = [agent.facts("")["ends_with"] for _ in range(3)]
    assert units == ["ray.service"] * 3
    assert len(systemctl.with_name("asked").read_text().splitlines()) == 1
    [node] = parse_nodes(answer(row(), **{"a" * 8: facts(ends_with=units[0])}))
    assert node.facts.is_alive
    [remark] = node.facts.remarks
    assert "killed when ray.service ends" in remark
    assert "KillMode=process" in remark


def test_systemctl_runs_only_where_its_answer_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, was_free = Agent(), list[bool]()

    def slow() -> str:
        was_free.append(not agent._guard.locked())
        return "ray.service"

    monkeypatch.setattr(agent_module, "ending_unit", slow)
    assert agent.facts("")["ends_with"] == "ray.service"
    assert was_free == [True]


def test_the_doctor_and_up_warn_of_a_unit_that_kills_jobs(
    shell: Shell, systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = machine.check_unit()
    assert (problem.level, "ray.service" in problem.message) == (Level.WARN, True)
    monkeypatch.setattr(
        "shoal.cli.control_plane.server.main", lambda *, is_foreground: 0 if is_foreground else 1
    )
    stayed = shell("up", "--foreground")
    assert stayed.code == 0
    assert "warning: systemd kills jobs" in stayed.err
    systemctl.write_text("KillMode=process\nLoadState=loaded\n")
    assert machine.check_unit().level is Level.OK
    assert up.unit_warning(1, "local") == ("", "")


@pytest.mark.parametrize("engine", ["local", "slurm", "ray"])
@pytest.mark.parametrize("whose", [[], ["--user"]])
def test_advice_about_a_unit_fits_the_engine_and_can_be_typed(
    shell: Shell, systemctl: Path, monkeypatch: pytest.MonkeyPatch, engine: str, whose: list[str]
) -> None:
    monkeypatch.setattr(agent_module, "service_of", lambda _: ("shoal@a.service", whose))
    monkeypatch.setenv("SHOAL_ENGINE", engine)
    problem = machine.check_unit()
    assert ("kills jobs on this machine" in problem.message) is (engine == "local")
    assert ("kills the data plane" in problem.message) is (engine != "local")
    assert problem.hint.startswith(f"`{' '.join(['systemctl', *whose, 'edit', 'shoal@a.service'])}`")
