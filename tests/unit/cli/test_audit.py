"""The output of `shoal audit --verify`: what differs, where, and the exit code."""

from __future__ import annotations

from typing import Any

from shoal.cli.event_text import describe_event
from tests.support.fakes.api_server import FakeApiServer, Shell


def verdict(**changed: Any) -> dict[str, Any]:
    head = {"seq": 99, "hash": "ab" * 32}
    whole = {"is_intact": True, "first_bad": None, "because": None, "head": head}
    return {**whole, "differences": [], "num_differences": 0, "anchors": [], **changed}


def test_a_row_changed_in_the_database_is_named_and_the_command_fails(
    shell: Shell, fake: FakeApiServer
) -> None:
    because = "users `usr_1`: cluster_role is `admin` in the table, `None` in the log (event 58)"
    outcome = [{"because": because}]
    fake.answers["GET", "/v1/audit/verify"] = verdict(
        is_intact=False, because=because, differences=outcome, num_differences=3
    )
    result = shell("audit", "--verify")
    assert result.code == 1
    assert result.out.splitlines() == [
        "the log is whole, but 3 things in the database differ from it:",
        f"  {because}",
        "  and 2 more",
    ]


def test_a_broken_log_says_that_nothing_was_compared_with_it(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/audit/verify"] = verdict(is_intact=False, first_bad=7, because="changed")
    result = shell("audit", "--verify")
    assert (result.code, result.out) == (1, "broken at entry 7: changed\n")
    assert "were not compared" in result.err


def test_unreachable_anchor_copy_is_a_warning_and_forged_one_a_failure(
    shell: Shell, fake: FakeApiServer
) -> None:
    away = {"path": "/backup/shoal-1.anchor", "seq": None, "problem": "No such file or directory"}
    fake.answers["GET", "/v1/audit/verify"] = [
        verdict(anchors=[away]),
        verdict(is_intact=False, because="it was forged", anchors=[{**away, "problem": "it was forged"}]),
    ]
    result = shell("audit", "--verify")
    assert result.code == 0
    assert "warning: /backup/shoal-1.anchor: No such file or directory" in result.err
    forged = shell("audit", "--verify")
    assert (forged.code, forged.out) == (1, "not to be trusted: it was forged\n")


def test_counted_refusals_are_summarized_in_one_line() -> None:
    data = {"what": "5 requests", "count": 5, "until": 0.0, "elsewhere": 2}
    routes = {"POST /v1/users 403": 3, "GET /v1/jobs/{job_id} 404": 2}
    event = {"kind": "access.denied", "actor": "user:ben", "data": {**data, "routes": routes}}
    assert describe_event(event) == (
        "denied by ben: 5 requests until 1970-01-01 00:00:00 UTC; 2 for resources of projects that the "
        "caller may not see: 3 x POST /v1/users 403, 2 x GET /v1/jobs/{job_id} 404"
    )
