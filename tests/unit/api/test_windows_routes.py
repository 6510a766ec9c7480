"""Maintenance and reservations over HTTP: refusals, and how much other users see of a reservation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.planes.world import ApiWorld, open_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("windows")) as opened:
        yield opened


def body(**fields: Any) -> dict[str, Any]:
    return {"kind": "reservation", "nodes": ["node-2"], "duration_s": 600.0, "project": "vision", **fields}


def test_reservation_hides_its_project_from_strangers(world: ApiWorld) -> None:
    begins = time.time() + 7200
    request = body(from_at=begins, because="for the vision demo")
    made = world.call("POST", "/v1/windows", role="operator", data=request)
    assert made.status == 201, made.body
    assert made.json()["until_at"] == begins + 600
    seen = {
        role: world.call("GET", "/v1/windows", role=role).json()["items"][0]
        for role in ("viewer", "stranger")
    }
    assert (seen["viewer"]["project"], seen["viewer"]["because"]) == ("vision", "for the vision demo")
    assert (seen["stranger"]["project"], seen["stranger"]["because"]) == (None, "")
    assert seen["stranger"]["nodes"] == ["node-2"]
    gone = world.call("DELETE", f"/v1/windows/{made.json()['id']}", role="operator")
    assert gone.json()["id"] == made.json()["id"]
    left = world.call("GET", "/v1/windows", role="viewer").json()["items"]
    assert made.json()["id"] not in {window["id"] for window in left}
    assert world.call("DELETE", f"/v1/windows/{made.json()['id']}", role="operator").status == 404


def test_repeated_declaration_is_not_a_second_one(world: ApiWorld) -> None:
    key = [("idempotency-key", "w-1")]
    request = body(from_at=time.time() + 90_000)
    first, again = (
        world.call("POST", "/v1/windows", role="operator", data=request, headers=key) for _ in range(2)
    )
    assert (first.status, first.json()["id"]) == (201, again.json()["id"])
    assert world.call("POST", "/v1/windows", role="operator", data=request).status == 409


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"duration_s": 1.0}, 422),
        ({"duration_s": "600"}, 422),
        ({"nodes": []}, 422),
        ({"nodes": [], "count": 0}, 422),
        ({"kind": "holiday"}, 422),
        ({"project": None}, 422),
        ({"project": "nowhere"}, 404),
        ({"nodes": ["node-9"]}, 404),
        ({"from_at": 0.0}, 422),
        ({"users": ["ana"]}, 422),
    ],
)
def test_window_that_makes_no_sense_is_refused(world: ApiWorld, wrong: dict[str, Any], status: int) -> None:
    assert world.call("POST", "/v1/windows", role="operator", data=body(**wrong)).status == status
