"""What `shoal drill` says."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import daemon, drill
from shoal.cli.drill_words import begun, report, row
from shoal.errors import StateError
from shoal.home import LOCK

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
    "new_attempts": 0,
    "finished_at": 1_800_007_521.0,
}


def test_it_says_what_it_does_and_then_what_that_cost() -> None:
    assert begun(DRILL) == "drill drl_1: killing rank 3 of vision/7 on sim-01"
    assert report({**DRILL, "result": RESULT}) == [
        "outcome        recovered",
        "noticed        after 0.01 s",
        "next step      after 0.27 s",
        "steps lost     0",
        "goodput        99% over 20 s",
    ]


def test_what_is_not_known_is_not_told() -> None:
    unknown = dict.fromkeys(("noticed_s", "stepped_s", "steps_lost", "goodput", "window_s"))
    result = {**RESULT, **unknown, "outcome": "not recovered", "because": "no step within 120 s"}
    assert report({**DRILL, "result": result}) == ["outcome        not recovered: no step within 120 s"]


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
