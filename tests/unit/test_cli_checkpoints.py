"""`shoal checkpoints`: what is there, what would be used, how often and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.cli.checkpoints import pace
from tests.support.cli import Shell
from tests.support.fake_server import FakeServer

JOB_ID = f"job_{17:026d}"
PATH = f"/v1/jobs/{JOB_ID}/checkpoints"
DECISION = {
    "reason": "cost",
    "steps": 120,
    "step_s": 0.5,
    "cost_s": 0.02,
    "written_s": 1.5,
    "interval_s": None,
    "mtbf_s": 7200.0,
}


def saved(step: int, **changes: Any) -> dict[str, Any]:
    values = {"step": step, "epoch": 2, "generation": 1, "saved_at": 0.0, "size_bytes": 2048, "world_size": 4}
    more = {"places": ["memory", "directory"], "state": "complete", "problem": "", "is_next": False}
    return {**values, **more, **changes}


def told(*items: dict[str, Any], **changes: Any) -> dict[str, Any]:
    values = {"ref": "vision/17", "name": "train", "status": "running", "has_directory": True}
    more = {"decision": DECISION, "own": [], "num_own": 0, "is_own_cut": False}
    return {**values, "items": list(items), **more, **changes}


def test_checkpoints_are_listed_with_the_one_to_go_on_from(shell: Shell, fake: FakeServer) -> None:
    damage = saved(200, state="damaged", problem="shard is not what was written")
    fake.answers["GET", PATH] = told(damage, saved(100, is_next=True))
    lines = shell("checkpoints", JOB_ID).out.splitlines()
    first = ["200", "01-01", "00:00:00Z", "2", "KiB", "2", "1", "damaged", "memory,"]
    assert lines[2].split()[:9] == first
    said = "\n".join(lines)
    assert "complete, next" in said
    assert "step 200: shard is not what was written" in said
    assert lines[-1].startswith("saves: every 120 steps, about 1m00s; one holds training up 0.02 s")


def test_damage_that_was_looked_for_is_an_exit_code(shell: Shell, fake: FakeServer) -> None:
    fake.answers["GET", PATH] = told(saved(200, state="damaged", problem="x"))
    assert shell("checkpoints", JOB_ID).code == 0
    assert shell("checkpoints", JOB_ID, "--verify").code == 1
    assert fake.seen[-1].query == {"verify": ["true"]}


def test_job_without_a_directory_is_told_how_to_get_one(shell: Shell, fake: FakeServer) -> None:
    fake.answers["GET", PATH] = told(has_directory=False, decision=None)
    assert "`checkpoint: {}` in the job" in shell("checkpoints", JOB_ID).err
    fake.answers["GET", PATH] = told(decision=None)
    assert "nothing saved yet" in shell("checkpoints", JOB_ID).err
    fake.answers["GET", PATH] |= {"status": "succeeded"}
    assert "nothing is saved here" in shell("checkpoints", JOB_ID).err


def test_what_the_program_saved_by_itself_is_marked_as_its_own_and_unverified(
    shell: Shell, fake: FakeServer
) -> None:
    own = {"name": "a\x1b[2J.pt", "saved_at": 1.0, "size_bytes": 2048, "problem": ""}
    fake.answers["GET", PATH] = told(decision=None, own=[own], num_own=3)
    found = shell("checkpoints", JOB_ID)
    heads, row = found.out.splitlines()[1:]
    assert heads.split() == ["THE", "PROGRAM'S", "OWN", "WRITTEN", "SIZE", "STATE"]
    assert row.split()[1:] == ["01-01", "00:00:01Z", "2", "KiB", "unverified"]
    assert "\x1b" not in row
    assert found.err.splitlines() == ["-- the newest 1 of 3"]


def test_what_could_not_be_read_and_where_the_look_ended_is_said(shell: Shell, fake: FakeServer) -> None:
    why = "part cannot be read: Permission denied"
    own = {"name": "run/", "saved_at": 0.0, "size_bytes": 0, "problem": why}
    fake.answers["GET", PATH] = told(decision=None, own=[own], num_own=1, is_own_cut=True)
    found = shell("checkpoints", JOB_ID)
    row, problem = found.out.splitlines()[2:]
    assert row.split() == ["run/", "-", "0", "B", "unverified"]
    assert problem == f"run/: {why}"
    assert "one look ends after 5,000 files" in found.err
    fake.answers["GET", PATH] = told(decision=None, is_own_cut=True)
    assert "nothing saved yet" not in shell("checkpoints", JOB_ID).err


def test_server_that_says_less_of_other_files_is_understood(shell: Shell, fake: FakeServer) -> None:
    before = told(own=[{"name": "a.pt", "saved_at": 1.0, "size_bytes": 1}])
    del before["is_own_cut"], before["num_own"]
    fake.answers["GET", PATH] = before
    assert "a.pt" in shell("checkpoints", JOB_ID).out


def test_server_that_does_not_look_for_other_files_is_understood(shell: Shell, fake: FakeServer) -> None:
    before = told(saved(5))
    del before["own"], before["num_own"], before["is_own_cut"]
    fake.answers["GET", PATH] = before
    assert "complete" in shell("checkpoints", JOB_ID).out


def test_checkpoints_for_machines(shell: Shell, fake: FakeServer) -> None:
    fake.answers["GET", PATH] = told(saved(5))
    assert json.loads(shell("checkpoints", JOB_ID, "--json").out) == told(saved(5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reason": "every"}, "as the program says"),
        ({"reason": "interval", "interval_s": 600.0}, "as the job says: each 10m"),
        (
            {"reason": "first", "cost_s": None},
            "every 120 steps, about 1m00s; until it is known what one costs",
        ),
        ({}, "by that cost and a failure each 2h00m (Young and Daly)"),
    ],
)
def test_pace_is_told_with_its_reason(changes: dict[str, Any], words: str) -> None:
    assert pace({**DECISION, **changes}).endswith(words)
