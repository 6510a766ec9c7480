"""A control plane on standby names the leader and reveals nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.api.http.standby import LeaderStatus, StandbyApp
from shoal.settings import Settings
from tests.support.planes.asgi import AsgiReply, Headers, request

LEADER = "http://127.0.0.1:7001"
HOST = ("Host", "127.0.0.1:7002")
TOKEN = ("Authorization", "Bearer shl_tok_1_secret")


async def ask(status: LeaderStatus, method: str, path: str, headers: Headers = (HOST,)) -> AsgiReply:
    app = StandbyApp(Settings(home=Path("/tmp/h"), port=7002), lambda: status)
    return await request(app, method, path, headers=headers)


@pytest.mark.parametrize(
    ("status", "health"),
    [
        (LeaderStatus(LEADER), {"status": "ok", "role": "standby", "leader": LEADER}),
        (LeaderStatus(None), {"status": "ok", "role": "standby", "leader": None}),
        (LeaderStatus(is_well=False), {"status": "degraded", "role": "standby", "leader": None}),
    ],
)
async def test_health_says_the_role_and_the_leader(status: LeaderStatus, health: dict[str, object]) -> None:
    answer = await ask(status, "GET", "/healthz")
    assert (answer.status, answer.json()) == (200, health)


@pytest.mark.parametrize("path", ["/", "/v1/jobs", "/v1/supervisor/renew", "/healthz/", "/openapi.json"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize("headers", [(HOST,), (HOST, TOKEN)])
async def test_standby_refuses_every_other_request_and_names_the_leader(
    method: str, path: str, headers: Headers
) -> None:
    answer = await ask(LeaderStatus(LEADER), method, path, headers)
    problem = answer.json()
    assert (answer.status, problem["code"], problem["leader"]) == (503, "control.standing_by", LEADER)
    assert answer.header("location") is None
    assert (answer.header("retry-after"), answer.header("x-content-type-options")) == ("1", "nosniff")


async def test_page_that_points_its_own_name_here_learns_nothing() -> None:
    answer = await ask(LeaderStatus(LEADER), "GET", "/healthz", (("Host", "evil.example"),))
    assert answer.status == 421
    assert LEADER.encode() not in answer.body
