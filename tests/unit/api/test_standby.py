"""What a control plane says that stands by: who leads, and nothing else to anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.api.standby import StandbyApp, Waiting
from shoal.settings import Settings
from tests.support.asgi import Answer, Headers, request

LEADER = "http://127.0.0.1:7001"
HOST = ("Host", "127.0.0.1:7002")
TOKEN = ("Authorization", "Bearer shl_tok_1_secret")


async def ask(known: Waiting, method: str, path: str, headers: Headers = (HOST,)) -> Answer:
    app = StandbyApp(Settings(home=Path("/tmp/h"), port=7002), lambda: known)
    return await request(app, method, path, headers=headers)


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (Waiting(LEADER), {"status": "ok", "role": "standby", "leader": LEADER}),
        (Waiting(None), {"status": "ok", "role": "standby", "leader": None}),
        (Waiting(is_well=False), {"status": "degraded", "role": "standby", "leader": None}),
    ],
)
async def test_health_says_the_role_and_the_leader(known: Waiting, told: dict[str, object]) -> None:
    answer = await ask(known, "GET", "/healthz")
    assert (answer.status, answer.json()) == (200, told)


@pytest.mark.parametrize("path", ["/", "/v1/jobs", "/v1/supervisor/renew", "/healthz/", "/openapi.json"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize("headers", [(HOST,), (HOST, TOKEN)])
async def test_everything_else_is_for_the_leader_whoever_asks(
    method: str, path: str, headers: Headers
) -> None:
    answer = await ask(Waiting(LEADER), method, path, headers)
    told = answer.json()
    assert (answer.status, told["code"], told["leader"]) == (503, "control.standing_by", LEADER)
    assert answer.header("location") is None
    assert (answer.header("retry-after"), answer.header("x-content-type-options")) == ("1", "nosniff")


async def test_page_that_points_its_own_name_here_learns_nothing() -> None:
    answer = await ask(Waiting(LEADER), "GET", "/healthz", (("Host", "evil.example"),))
    assert answer.status == 421
    assert LEADER.encode() not in answer.body
