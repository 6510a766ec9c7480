"""The command line against a real control plane, which the commands themselves start, restart and stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.client import Shoal
from shoal.home import pid_holding
from tests.support.planes.real import RankGate
from tests.support.serving.sidecars import write_pair

SHOAL = (sys.executable, "-m", "shoal.cli.main")
LIMIT_S = 60.0


@dataclass
class Person:
    """A person at a terminal, with a home of their own."""

    home: Path
    place: Path

    @property
    def env(self) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
        return {**environment, "SHOAL_HOME": str(self.home), "NO_COLOR": "1", "COLUMNS": "80"}

    def __call__(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SHOAL, *argv],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=self.env,
            cwd=self.place,
        )

    def begin(self, *argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*SHOAL, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
            cwd=self.place,
        )

    def json(self, *argv: str) -> Any:
        done = self(*argv, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    (tmp_path / "work").mkdir()
    person = Person(tmp_path / "home", tmp_path / "work")
    yield person
    if pid_holding(person.home) is not None:
        person("down", "--jobs")


def until(true: Callable[[], Any], description: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (seen := true()):
        assert time.monotonic() < deadline, f"never: {description}"
        time.sleep(0.05)
    return seen


def server_pid(person: Person) -> int:
    return int(json.loads((person.home / "server.json").read_text())["pid"])


def test_one_run_command_starts_everything_and_returns_the_exit_code(person: Person) -> None:
    (person.place / "words.txt").write_text("from the snapshot\n")
    done = person("run", "--", "sh", "-c", "cat words.txt; exit 7")
    assert done.returncode == 7, done.stderr
    assert done.stdout == "[0] from the snapshot\n"
    assert "no control plane was running; started one at http://127.0.0.1:" in done.stderr
    assert "rank 0 exited with code 7" in done.stderr


def test_files_written_under_an_open_umask_are_private(person: Person) -> None:
    before = os.umask(0)  # the command below inherits it
    try:
        done = person("run", "--", "true")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert person("down").returncode == 0
    kept = [path for path in person.home.rglob("*") if not path.is_symlink()]
    assert {"keys", "logs"} <= {path.name for path in kept}
    opened = [
        f"{path} {path.stat().st_mode:o}" for path in (person.home, *kept) if path.stat().st_mode & 0o077
    ]
    assert opened == []


def test_the_admin_token_is_shown_once_and_a_second_up_reports_the_first(person: Person) -> None:
    first, second = person("up"), person("up")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.count("shl_") == 1
    assert "shl_" not in second.stdout
    assert f"already up at {json.loads((person.home / 'server.json').read_text())['url']}" in second.stdout
    assert person("login").stdout.startswith("you are ")
    down = person("down")
    assert "keep running" not in down.stdout, "no job runs"
    assert person("queue").returncode == 6
    assert "no control plane is running" in person("down").stdout


def test_two_ups_at_once_make_one_control_plane(person: Person) -> None:
    both = [person.begin("up", "--json") for _ in range(2)]
    document = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert document[0]["pid"] == document[1]["pid"]
    assert sorted(entry["was_running"] for entry in document) == [False, True]
    assert sum(entry["token"] is not None for entry in document) == 1


def test_a_control_plane_killed_in_the_middle_of_a_run_is_not_noticed(person: Person) -> None:
    assert person("up").returncode == 0
    run = person.begin(
        "run", "--", "sh", "-c", "for i in 1 2 3 4 5 6; do echo line $i; sleep 0.5; done; exit 5"
    )
    assert run.stdout is not None
    lines = [run.stdout.readline()]
    os.kill(server_pid(person), signal.SIGKILL)
    until(lambda: pid_holding(person.home) is None, "the killed server lets go")
    assert person("up").returncode == 0
    lines += run.stdout.readlines()  # `communicate` would pass over what was read ahead with the first line
    _, notes = run.communicate(timeout=LIMIT_S)
    assert lines == [f"[0] line {n}\n" for n in range(1, 7)]
    assert run.returncode == 5, notes
    assert person.json("queue", "--all")[0]["epoch"] == 1


def test_interrupting_a_run_leaves_the_job_running(person: Person) -> None:
    assert person("up").returncode == 0
    run = person.begin("run", "--name", "long", "--", "sh", "-c", "echo here; sleep 300")
    assert run.stdout is not None
    assert run.stdout.readline() == "[0] here\n"
    run.send_signal(signal.SIGINT)
    _, notes = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 130
    assert "keeps running" in notes
    assert "Traceback" not in notes
    for name in ("1", "default/1", "long", person.json("queue")[0]["job_id"]):
        assert person("why", name).stdout.startswith("default/1 is running on")
    assert person("stop", "long", "--wait").stdout == "default/1: cancelled\n"
    assert person("logs", "long").stdout.startswith("[0] here\n")
    assert person("retry", "long").returncode == 0


def test_jobs_keep_running_while_the_control_plane_is_down(person: Person, gate: RankGate) -> None:
    assert person("run", "-d", "--", "sh", "-c", gate.run_line(exit_code=9)).stdout == "default/1\n"
    gate.wait_for_ranks()
    until(lambda: person.json("queue")[0]["status"] == "running", "it runs")
    assert person("down").returncode == 0
    assert person("up").returncode == 0
    gate.open()
    ended = until(lambda: [j for j in person.json("queue", "--all") if j["ended_at"]], "it ends")
    assert (ended[0]["exit_code"], ended[0]["epoch"]) == (9, 1)


def test_options_come_back_with_the_next_start(person: Person) -> None:
    assert person("up", "--demo", "3x8").returncode == 0
    names = {node["name"] for node in person.json("nodes") if node["is_simulated"]}
    assert len(names) == 3
    os.kill(server_pid(person), signal.SIGKILL)
    until(lambda: pid_holding(person.home) is None, "the killed server lets go")
    assert person("run", "-d", "--gpus", "8", "--nodes", "3", "--", "true").returncode == 0
    assert {node["name"] for node in person.json("nodes") if node["is_simulated"]} == names


def test_equal_flags_and_file_give_the_same_job(person: Person) -> None:
    """The server parses flags and the command parses a file, and both must freeze the same spec."""
    (person.place / "job.yaml").write_text(
        "name: same\nrun: echo 'a b'\nresources: {cpus: 0.5, memory: 64MB.., nodes: 1}\ntime_limit: 90m\n"
        "env: {A: '1', B: x=y}\nretry: {max: 2, on: [exit, oom], backoff: 10s}\nworkdir: null\n"
        "log_rules: [{match: NCCL.*error, action: exclude_node}]\npriority: -5\nranks_per_node: 2\n"
    )
    assert person("run", "-d", "job.yaml").returncode == 0
    flags = ("--name", "same", "--cpus", "0.5", "--memory", "64MB..", "--nodes", "1", "--time-limit", "90m")
    more = ("-e", "A=1", "-e", "B=x=y", "--retry", "2", "--retry-on", "exit", "--retry-on", "oom")
    rest = ("--retry-backoff", "10s", "--workdir", "", "--log-rule", "NCCL.*error=exclude_node")
    last = ("--priority", "-5", "--ranks-per-node", "2", "--", "echo", "a b")
    done = person("run", "-d", *flags, *more, *rest, *last)
    assert done.stdout == "default/2\n", done.stderr
    with Shoal(env=person.env) as shoal:
        specs = [shoal.job(ref).data["spec"] for ref in ("default/1", "default/2")]
    assert specs[0] == specs[1]
    assert specs[0]["priority"] == -5


def test_an_array_reports_progress_and_fails_if_one_element_does(person: Person) -> None:
    assert person("up").returncode == 0
    command = ("run", "--array", "0..3", "--", "sh", "-c", 'test "$SLURM_ARRAY_TASK_ID" != 2')
    done = person(*command)
    assert done.returncode == 1, done.stderr
    assert "4 of 4 done" in done.stderr
    assert "1 failed" in done.stderr


def test_listening_to_the_world_without_tls_is_refused(person: Person) -> None:
    for flag in ((), ("--foreground",)):
        done = person("up", "--listen", "0.0.0.0:0", *flag)
        assert done.returncode == 2
        assert "refusing to listen on 0.0.0.0 without TLS" in done.stderr
    assert pid_holding(person.home) is None


def test_a_taken_port_is_named(person: Person) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = person("up", "--listen", f"127.0.0.1:{port}")
    assert done.returncode == 6
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_taken_port_of_services_is_named_before_the_first_service(person: Person) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = person("up", "--serve-on", f"127.0.0.1:{port}")
    assert done.returncode == 6
    assert f"services cannot be called at 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "--serve-on 127.0.0.1:0" in done.stderr
    again = person("up", "--listen", "127.0.0.1:0", "--serve-on", "127.0.0.1:0")
    assert (again.returncode, again.stderr) == (0, "")


def test_a_server_with_its_own_certificate_is_trusted_on_its_own_machine(person: Person) -> None:
    cert, key = write_pair(person.place)
    done = person("up", "--tls-cert", cert.name, "--tls-key", key.name)
    assert done.returncode == 0, done.stderr
    assert json.loads((person.home / "server.json").read_text())["url"].startswith("https://127.0.0.1:")
    assert person("run", "--", "echo", "over TLS").stdout == "[0] over TLS\n"
