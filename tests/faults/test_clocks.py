"""Clocks that jump by an hour, both ways, under the control plane and under the supervisors."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.faults.people import Person, is_root, lines, running, until

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not is_root(), reason="the cluster's jobs mount a directory, which takes root"),
    pytest.mark.skipif(not LIBRARIES, reason="there is no libfaketime: `apt install faketime`"),
]

WRAPPER = """\
#!/bin/bash
case "$*" in *shoal.runtime.*) clock={clocks}/supervisor ;; *) clock={clocks}/control ;; esac
export LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE=$clock FAKETIME_CACHE_DURATION=1 DONT_FAKE_MONOTONIC=1
exec -a "$0" {python} "$@"
"""
FAILING = 'echo "$(cut -d " " -f 1 /proc/uptime)" >> /witness/failing; exit 3'
"""A rank sees the machine's own clocks."""
BACKOFF_S = 6.0
LIMIT_S = 14.0


class Clocks:
    """A Python whose programs believe what two files say: one for the control plane, one for supervisors."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "clocks"
        self._folder.mkdir()
        self.set("control", 0)
        self.set("supervisor", 0)
        # A virtual environment of its own: Python looks for its packages beside the program's name.
        own = root / "python"
        (own / "bin").mkdir(parents=True)
        for name in ("pyvenv.cfg", "lib"):
            (own / name).symlink_to(Path(sys.prefix) / name)
        self.python = own / "bin" / "python"
        words = {"clocks": self._folder, "library": LIBRARIES[0], "python": sys.executable}
        self.python.write_text(WRAPPER.format(**words))
        self.python.chmod(0o755)

    def set(self, whose: str, ahead_s: int) -> None:
        """At once, for processes that run already too."""
        part = self._folder / "part"
        part.write_text(f"{ahead_s:+d}\n")
        part.rename(self._folder / whose)


def test_jumps_of_an_hour_end_no_job_and_move_no_limit_backoff_or_fence(root: Path) -> None:
    clocks = Clocks(root)
    with running(root, python=str(clocks.python)) as person:
        healthy = person.start("healthy", fence="60s", time_limit="30m")
        person.wait_for(healthy, "running")
        for whose, ahead_s in (
            ("control", 3600),
            ("supervisor", 3600),
            ("control", -3600),
            ("supervisor", -3600),
        ):
            clocks.set(whose, ahead_s)
            wait_for_a_few_turns(person, healthy)
            check_clock(person, ahead_s if whose == "control" else None)
        assert person.job(healthy)["status"] == "running"
        assert lines(person.cluster.witness / "healthy") == ["start 1"]
        person.let_go("healthy")
        assert person.wait_for(healthy, "succeeded")["epoch"] == 1
        assert abs(supervisors_word(person, "healthy") + 3600 - time.time()) < 300
        assert person.is_log_intact()


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_time_limit_and_backoff_take_as_long_as_they_say(root: Path, ahead_s: int) -> None:
    clocks = Clocks(root)
    with running(root, python=str(clocks.python)) as person:
        began = time.monotonic()
        limited = person.start("limited", time_limit=f"{LIMIT_S}s")
        failing = person.start(
            "failing", retry={"max": 1, "on": ["exit"], "backoff": f"{BACKOFF_S}s"}, run=FAILING
        )
        until(lambda: person.job(failing)["epoch"] == 2, "it failed and waits to be tried again")
        for whose in ("control", "supervisor"):
            clocks.set(whose, ahead_s)
        person.wait_for(failing, "failed")
        first, second = map(float, lines(person.cluster.witness / "failing"))
        assert second - first >= BACKOFF_S
        ended = person.wait_for(limited, "failed")
        assert time.monotonic() - began >= LIMIT_S
        assert "time limit" in ended["because"]
        assert lines(person.cluster.witness / "limited") == ["start 1"]


def check_clock(person: Person, ahead_s: int | None) -> None:
    """That the control plane believes it: a clock that did not jump would prove nothing."""
    if ahead_s is None:
        return
    key = f"note-{ahead_s}"
    assert person.submit(person.short(key), key) in (200, 201)
    seen = person.job(person.acknowledged[key])["submitted_at"]
    assert abs(seen - time.time() - ahead_s) < 300


def supervisors_word(person: Person, name: str) -> float:
    """When the job ended, as its supervisor believes."""
    for outcome in (person.cluster.home / "spool").glob("*/*/*/outcome.json"):
        if json.loads((outcome.parent / "task_spec.json").read_bytes())["job_name"] == name:
            return float(json.loads(outcome.read_bytes())["ended_at"])
    raise AssertionError(f"no outcome of {name} was written")


def wait_for_a_few_turns(person: Person, job_id: str) -> None:
    """Loops look every second and leases are renewed every five: let each happen under the new clock."""
    until_s = time.monotonic() + 7.0
    while time.monotonic() < until_s:
        assert person.job(job_id)["status"] == "running"
        time.sleep(0.5)
