"""`shoal checkpoints`: which exist, which would be used, how often the job saves and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.cli.jobs.checkpoints import pace_text
from tests.support.fakes.api_server import FakeApiServer, Shell

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
    values = {
        "step": step,
        "epoch": 2,
        "rendezvous_round": 1,
        "saved_at": 0.0,
        "size_bytes": 2048,
        "world_size": 4,
    }
    more = {"places": ["memory", "directory"], "state": "complete", "problem": "", "is_next": False}
    return {**values, **more, **changes}


def listing_reply(*items: dict[str, Any], **changes: Any) -> dict[str, Any]:
    values = {"ref": "vision/17", "name": "train", "status": "running", "has_directory": True}
    more = {
        "decision": DECISION,
        "program_saves": [],
        "num_program_saves": 0,
        "has_more_program_saves": False,
    }
    return {**values, "items": list(items), **more, **changes}


def test_checkpoints_are_listed_with_the_one_to_continue_from(shell: Shell, fake: FakeApiServer) -> None:
    damage = saved(200, state="damaged", problem="shard is not what was written")
    fake.answers["GET", PATH] = listing_reply(damage, saved(100, is_next=True))
    lines = shell("checkpoints", JOB_ID).out.splitlines()
    first = ["200", "01-01", "00:00:00Z", "2", "KiB", "2", "1", "damaged", "memory,"]
    assert lines[2].split()[:9] == first
    expected = "\n".join(lines)
    assert "complete, next" in expected
    assert "step 200: shard is not what was written" in expected
    assert lines[-1].startswith("saves: every 120 steps, about 1m00s; each blocks training for 0.02 s")


def test_verified_damage_exits_1(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", PATH] = listing_reply(saved(200, state="damaged", problem="x"))
    assert shell("checkpoints", JOB_ID).code == 0
    assert shell("checkpoints", JOB_ID, "--verify").code == 1
    assert fake.requests[-1].query == {"verify": ["true"]}


def test_job_without_a_checkpoint_directory_gets_a_hint(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", PATH] = listing_reply(has_directory=False, decision=None)
    assert "`checkpoint: {}` in its file" in shell("checkpoints", JOB_ID).err
    fake.answers["GET", PATH] = listing_reply(decision=None)
    assert "nothing saved yet" in shell("checkpoints", JOB_ID).err
    fake.answers["GET", PATH] |= {"status": "succeeded"}
    assert "nothing was saved" in shell("checkpoints", JOB_ID).err


def test_saves_of_the_program_itself_are_listed_as_unverified(shell: Shell, fake: FakeApiServer) -> None:
    save = {"name": "a\x1b[2J.pt", "saved_at": 1.0, "size_bytes": 2048, "problem": ""}
    fake.answers["GET", PATH] = listing_reply(decision=None, program_saves=[save], num_program_saves=3)
    result = shell("checkpoints", JOB_ID)
    heads, row = result.out.splitlines()[1:]
    assert heads.split() == ["THE", "PROGRAM'S", "OWN", "WRITTEN", "SIZE", "STATE"]
    assert row.split()[1:] == ["01-01", "00:00:01Z", "2", "KiB", "unverified"]
    assert "\x1b" not in row
    assert result.err.splitlines() == ["-- the newest 1 of 3"]


def test_unreadable_and_unlisted_saves_are_mentioned(shell: Shell, fake: FakeApiServer) -> None:
    why = "part cannot be read: Permission denied"
    save = {"name": "run/", "saved_at": 0.0, "size_bytes": 0, "problem": why}
    fake.answers["GET", PATH] = listing_reply(
        decision=None, program_saves=[save], num_program_saves=1, has_more_program_saves=True
    )
    result = shell("checkpoints", JOB_ID)
    row, problem = result.out.splitlines()[2:]
    assert row.split() == ["run/", "-", "0", "B", "unverified"]
    assert problem == f"run/: {why}"
    assert "the list ends after 5,000 files" in result.err
    fake.answers["GET", PATH] = listing_reply(decision=None, has_more_program_saves=True)
    assert "nothing saved yet" not in shell("checkpoints", JOB_ID).err


def test_older_server_without_save_counts_is_understood(shell: Shell, fake: FakeApiServer) -> None:
    before = listing_reply(program_saves=[{"name": "a.pt", "saved_at": 1.0, "size_bytes": 1}])
    del before["has_more_program_saves"], before["num_program_saves"]
    fake.answers["GET", PATH] = before
    assert "a.pt" in shell("checkpoints", JOB_ID).out


def test_older_server_without_program_saves_is_understood(shell: Shell, fake: FakeApiServer) -> None:
    before = listing_reply(saved(5))
    del before["program_saves"], before["num_program_saves"], before["has_more_program_saves"]
    fake.answers["GET", PATH] = before
    assert "complete" in shell("checkpoints", JOB_ID).out


def test_checkpoints_for_machines(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", PATH] = listing_reply(saved(5))
    assert json.loads(shell("checkpoints", JOB_ID, "--json").out) == listing_reply(saved(5))


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({"reason": "every"}, "as the program sets it"),
        ({"reason": "interval", "interval_s": 600.0}, "as the job sets it: every 10m"),
        (
            {"reason": "first", "cost_s": None},
            "every 120 steps, about 1m00s; until the cost of one is known",
        ),
        ({}, "by that cost and a failure every 2h00m (Young and Daly)"),
    ],
)
def test_pace_is_printed_with_its_reason(changes: dict[str, Any], arguments: str) -> None:
    assert pace_text({**DECISION, **changes}).endswith(arguments)
