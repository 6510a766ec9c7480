"""The output of `shoal drill`."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import drill
from shoal.cli.control_plane import daemon
from shoal.cli.drill import history_row, progress_text, result_lines, start_line
from shoal.errors import StateError
from shoal.home import LOCK
from tests.support.fakes.api_server import FakeApiServer, Shell

DRILL: dict[str, Any] = {
    "id": "drl_1",
    "kind": "kill-rank",
    "job_id": "job_1",
    "ref": "vision/7",
    "project": "vision",
    "node": "sim-01",
    "rank": 3,
    "for_s": None,
    "by": "ana",
    "started_at": 1_800_007_500.0,
    "result": None,
}
RESULT: dict[str, Any] = {
    "outcome": "recovered",
    "because": "",
    "detail": "",
    "noticed_s": 0.01,
    "stepped_s": 0.274,
    "steps_lost": 0,
    "goodput": 0.986,
    "window_s": 20.1,
    "step_s": 0.03111,
    "new_attempts": 0,
    "tells_steps": True,
    "sign": None,
    "watched_s": None,
    "num_ended": 0,
    "finished_at": 1_800_007_521.0,
}


def test_drill_prints_what_it_does_and_what_it_cost() -> None:
    assert start_line(DRILL) == "drill drl_1: killing rank 3 of vision/7 on sim-01"
    assert result_lines({**DRILL, "result": RESULT}) == [
        "outcome        recovered",
        "noticed        after 0.01 s",
        "next step      after 0.27 s",
        "steps lost     0",
        "goodput        99% of the 20 s after it, at 0.031 s a step",
    ]


def test_unknown_results_are_left_out() -> None:
    unknown = dict.fromkeys(("noticed_s", "stepped_s", "steps_lost", "goodput", "window_s"))
    result = {**RESULT, **unknown, "outcome": "not recovered", "because": "no step within 120 s"}
    assert result_lines({**DRILL, "result": result}) == ["outcome        not recovered: no step within 120 s"]


def test_recovery_before_any_step_says_what_is_not_known() -> None:
    result = {**RESULT, **dict.fromkeys(("steps_lost", "goodput", "window_s", "step_s"))}
    assert result_lines({**DRILL, "result": result})[3:] == [
        "steps lost     not known: the program had not reported a step",
        "goodput        not known: the program had not reported a step",
    ]
    result["steps_lost"] = 0
    assert result_lines({**DRILL, "result": result})[3:] == [
        "steps lost     0",
        "goodput        not known: the program had reported too few steps",
    ]


def test_program_without_steps_gets_no_step_results() -> None:
    unknown = dict.fromkeys(("steps_lost", "goodput", "window_s", "step_s"))
    result = {**RESULT, **unknown, "tells_steps": False, "new_attempts": 1, "sign": "output", "watched_s": 20}
    assert result_lines({**DRILL, "result": result}) == [
        "outcome        recovered",
        "noticed        after 0.01 s",
        "runs again     after 0.27 s, in a new attempt: they write output",
        "watched        for 20 s after that: no rank failed",
        "steps          the program reports none: the drill watched whether its ranks keep running",
    ]
    lines = result_lines({**DRILL, "result": {**result, "num_ended": 1}})
    assert "watched        for 20 s after that: no rank failed; ranks had failed once before" in lines
    assert history_row({**DRILL, "result": result})[3:] == ("0.01s", "-", "-", "-", "recovered")
    ended = {**result, "outcome": "not recovered", "because": "its ranks did not run again within 120 s"}
    assert "next step" not in " ".join(result_lines({**DRILL, "result": {**ended, "stepped_s": None}}))


def test_goodput_of_several_jobs_has_a_window_and_no_pace() -> None:
    lines = result_lines({**DRILL, "kind": "kill-control", "result": {**RESULT, "step_s": None}})
    assert lines[-1] == "goodput        99% of 20 s around it"


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [(("step_s",), "99% of 20 s around it"), (("step_s", "window_s"), "99%")],
)
def test_older_server_without_goodput_window_is_understood(missing: tuple[str, ...], arguments: str) -> None:
    result = {name: value for name, value in RESULT.items() if name not in missing}
    assert result_lines({**DRILL, "result": result})[-1] == f"goodput        {arguments}"


def test_new_attempts_are_printed() -> None:
    lines = result_lines({**DRILL, "result": {**RESULT, "new_attempts": 1}})
    assert "next step      after 0.27 s, in a new attempt" in lines


def test_a_drill_without_a_result_is_under_way() -> None:
    when, kind, ref, *numbers, outcome = history_row(DRILL)
    assert (kind, ref, outcome) == ("kill-rank", "vision/7", "under way")
    assert set(numbers) == {"-"}
    assert when == "15 Jan 10:05"


def test_a_row_of_the_history_has_the_numbers() -> None:
    assert history_row({**DRILL, "result": RESULT})[3:] == ("0.01s", "0.27s", "0", "99%", "recovered")


@pytest.mark.parametrize(
    ("typed", "field"),
    [("--for=700s", "for_s"), ("--for 1s --window 700s", "window_s"), ("--for 1s --within 700s", "within_s")],
)
def test_refusal_names_the_flag_that_was_typed_and_not_the_field(
    shell: Shell, fake: FakeApiServer, typed: str, field: str
) -> None:
    problem = f"`{field}` must be at most 600, not 700.0"
    fake.answers["POST", "/v1/drills"] = fake.problem(422, "spec.invalid", "no", problems=[problem])
    result = shell("drill", "partition", f"job_{17:026d}", *typed.split())
    assert result.code == 2
    assert result.err == f"error: `--{field.removesuffix('_s')}` must be at most 600, not 700.0\n"


def test_flags_of_a_drill_are_asked_for(shell: Shell, fake: FakeApiServer) -> None:
    done = {**DRILL, "result": RESULT}
    fake.answers["POST", f"/v1/jobs/job_{17:026d}/drills"] = DRILL
    fake.answers["GET", "/v1/drills"] = {"items": [done], "next_cursor": None}
    result = shell("drill", "hang", f"job_{17:026d}", "--rank", "3", "--window", "5s", "--force", "--json")
    assert (result.code, result.json()["id"]) == (0, "drl_1")
    request = next(sent for sent in fake.requests if sent.method == "POST")
    assert request.json() == {
        "kind": "hang", "rank": 3, "window_s": 5.0, "within_s": 120.0, "is_forced": True
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["kill-rank", "kill-control"])
def test_wait_is_announced_on_one_line(kind: str) -> None:
    goal = "all jobs answer" if kind == "kill-control" else "the job recovers"
    text = progress_text({**DRILL, "kind": kind}, window_s=20.0, within_s=120.0)
    assert text == f"measuring for 20 s, and until {goal} (at most 120 s)"
    assert len(f"{text}: 120 s so far") < 80


def test_progress_of_a_measurement_goes_to_standard_error(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fake.answers["POST", f"/v1/jobs/job_{17:026d}/drills"] = DRILL
    fake.answers["GET", "/v1/drills"] = {"items": [{**DRILL, "result": RESULT}], "next_cursor": None}
    done = shell("drill", "kill-rank", f"job_{17:026d}", "--window", "5s", "--within", "1m", "--json")
    assert (done.code, done.json()["id"]) == (0, "drl_1")
    assert done.err.startswith("measuring for 5 s, and until the job recovers (at most 60 s)")


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def hold(home: Path, text: str, told_pid: int) -> Any:
    """Lock the home as a control plane does; closing the returned file releases it."""
    (home / LOCK).write_text(text, encoding="ascii")
    (home / "server.json").write_text(json.dumps({"url": "http://x", "pid": told_pid}), encoding="utf-8")
    lock = (home / LOCK).open("r", encoding="ascii")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_the_process_that_holds_the_home_is_killed(tmp_path: Path, server: subprocess.Popen[bytes]) -> None:
    with hold(tmp_path, str(server.pid), server.pid):
        assert drill._kill_server(tmp_path)["pid"] == server.pid
    assert server.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("text", ["", "0", "1"])
def test_no_process_is_killed_while_a_control_plane_starts(
    tmp_path: Path, server: subprocess.Popen[bytes], text: str
) -> None:
    with hold(tmp_path, text, server.pid), pytest.raises(StateError, match="is starting"):
        drill._kill_server(tmp_path)
    with pytest.raises(StateError, match="no control plane is running"):
        drill._kill_server(tmp_path)
    assert server.poll() is None


def test_unmanaged_control_plane_is_restarted_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(drill, "RESTART_S", 0.01)
    monkeypatch.setattr(daemon, "start", lambda: started.append(True))
    drill._start_again(1, is_managed=True)
    assert started == [True]
