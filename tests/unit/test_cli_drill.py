"""What `shoal drill` says."""

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

from shoal.cli import daemon, drill
from shoal.cli.drill_words import begun, measuring, report, row
from shoal.errors import StateError
from shoal.home import LOCK
from tests.support.cli import Shell
from tests.support.fake_server import FakeServer

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
    "told": "",
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


def test_it_says_what_it_does_and_then_what_that_cost() -> None:
    assert begun(DRILL) == "drill drl_1: killing rank 3 of vision/7 on sim-01"
    assert report({**DRILL, "result": RESULT}) == [
        "outcome        recovered",
        "noticed        after 0.01 s",
        "next step      after 0.27 s",
        "steps lost     0",
        "goodput        99% of the 20 s from then on, at 0.031 s a step",
    ]


def test_what_is_not_known_is_not_told() -> None:
    unknown = dict.fromkeys(("noticed_s", "stepped_s", "steps_lost", "goodput", "window_s"))
    result = {**RESULT, **unknown, "outcome": "not recovered", "because": "no step within 120 s"}
    assert report({**DRILL, "result": result}) == ["outcome        not recovered: no step within 120 s"]


def test_job_that_went_on_before_any_step_says_what_is_therefore_not_known() -> None:
    result = {**RESULT, **dict.fromkeys(("steps_lost", "goodput", "window_s", "step_s"))}
    assert report({**DRILL, "result": result})[3:] == [
        "steps lost     not known: no step had been told of yet",
        "goodput        not known: no step had been told of yet",
    ]
    result["steps_lost"] = 0
    assert report({**DRILL, "result": result})[3:] == [
        "steps lost     0",
        "goodput        not known: too few steps had been told of",
    ]


def test_of_a_program_that_tells_of_no_step_none_is_claimed() -> None:
    unknown = dict.fromkeys(("steps_lost", "goodput", "window_s", "step_s"))
    result = {**RESULT, **unknown, "tells_steps": False, "new_attempts": 1, "sign": "output", "watched_s": 20}
    assert report({**DRILL, "result": result}) == [
        "outcome        recovered",
        "noticed        after 0.01 s",
        "runs again     after 0.27 s, in a new attempt: they write output",
        "watched        for 20 s from then on: no rank failed",
        "steps          the program tells of none: it was judged by whether its ranks run on",
    ]
    told = report({**DRILL, "result": {**result, "num_ended": 1}})
    assert "watched        for 20 s from then on: no rank failed; ranks had failed once before" in told
    assert row({**DRILL, "result": result})[3:] == ("0.01s", "-", "-", "-", "recovered")
    ended = {**result, "outcome": "not recovered", "because": "its ranks did not run again within 120 s"}
    assert "next step" not in " ".join(report({**DRILL, "result": {**ended, "stepped_s": None}}))


def test_goodput_of_several_jobs_has_a_window_and_no_pace() -> None:
    lines = report({**DRILL, "kind": "kill-control", "result": {**RESULT, "step_s": None}})
    assert lines[-1] == "goodput        99% of 20 s around it"


@pytest.mark.parametrize(
    ("missing", "words"),
    [(("step_s",), "99% of 20 s around it"), (("step_s", "window_s"), "99%")],
)
def test_server_that_says_less_of_goodput_is_understood(missing: tuple[str, ...], words: str) -> None:
    result = {name: value for name, value in RESULT.items() if name not in missing}
    assert report({**DRILL, "result": result})[-1] == f"goodput        {words}"


def test_new_attempts_are_told() -> None:
    lines = report({**DRILL, "result": {**RESULT, "new_attempts": 1}})
    assert "next step      after 0.27 s, in a new attempt" in lines


def test_a_drill_without_a_result_is_under_way() -> None:
    when, kind, ref, *numbers, outcome = row(DRILL)
    assert (kind, ref, outcome) == ("kill-rank", "vision/7", "under way")
    assert set(numbers) == {"-"}
    assert when == "15 Jan 10:05"


def test_a_row_of_the_history_has_the_numbers() -> None:
    assert row({**DRILL, "result": RESULT})[3:] == ("0.01s", "0.27s", "0", "99%", "recovered")


@pytest.mark.parametrize(
    ("typed", "field"),
    [("--for=700s", "for_s"), ("--for 1s --window 700s", "window_s"), ("--for 1s --within 700s", "within_s")],
)
def test_refusal_names_the_flag_that_was_typed_and_not_the_field(
    shell: Shell, fake: FakeServer, typed: str, field: str
) -> None:
    problem = f"`{field}` must be at most 600, not 700.0"
    fake.answers["POST", "/v1/drills"] = fake.problem(422, "spec.invalid", "no", problems=[problem])
    result = shell("drill", "partition", f"job_{17:026d}", *typed.split())
    assert result.code == 2
    assert result.err == f"error: `--{field.removesuffix('_s')}` must be at most 600, not 700.0\n"


def test_flags_of_a_drill_are_asked_for(shell: Shell, fake: FakeServer) -> None:
    done = {**DRILL, "result": RESULT}
    fake.answers["POST", f"/v1/jobs/job_{17:026d}/drills"] = DRILL
    fake.answers["GET", "/v1/drills"] = {"items": [done], "next_cursor": None}
    result = shell("drill", "hang", f"job_{17:026d}", "--rank", "3", "--window", "5s", "--force", "--json")
    assert (result.code, result.json()["id"]) == (0, "drl_1")
    asked = next(one for one in fake.seen if one.method == "POST")
    assert asked.json() == {
        "kind": "hang", "rank": 3, "window_s": 5.0, "within_s": 120.0, "is_forced": True
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["kill-rank", "kill-control"])
def test_what_is_waited_for_and_how_long_is_said_on_one_line(kind: str) -> None:
    goal = "all jobs are heard" if kind == "kill-control" else "the job goes on"
    told = measuring({**DRILL, "kind": kind}, window_s=20.0, within_s=120.0)
    assert told == f"measuring for 20 s, and until {goal} (at most 120 s)"
    assert len(f"{told}: 120 s so far") < 80


def test_while_a_job_is_measured_that_is_said_and_not_among_the_data(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fake.answers["POST", f"/v1/jobs/job_{17:026d}/drills"] = DRILL
    fake.answers["GET", "/v1/drills"] = {"items": [{**DRILL, "result": RESULT}], "next_cursor": None}
    done = shell("drill", "kill-rank", f"job_{17:026d}", "--window", "5s", "--within", "1m", "--json")
    assert (done.code, done.json()["id"]) == (0, "drl_1")
    assert done.err.startswith("measuring for 5 s, and until the job goes on (at most 60 s)")


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def hold(home: Path, text: str, told_pid: int) -> Any:
    """As if a control plane held the home; close what is returned to let go."""
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
def test_nobody_is_killed_while_a_control_plane_starts(
    tmp_path: Path, server: subprocess.Popen[bytes], text: str
) -> None:
    with hold(tmp_path, text, server.pid), pytest.raises(StateError, match="is just being started"):
        drill._kill_server(tmp_path)
    with pytest.raises(StateError, match="no control plane is running"):
        drill._kill_server(tmp_path)
    assert server.poll() is None


def test_what_nobody_starts_again_is_started_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(drill, "RESTART_S", 0.01)
    monkeypatch.setattr(daemon, "start", lambda: started.append(True))
    drill._start_again(1, is_managed=True)
    assert started == [True]
