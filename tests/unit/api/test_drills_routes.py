"""Drills over HTTP: which roles may drill which jobs, and which roles see the reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.planes.world import ApiWorld, open_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("drills")) as opened:
        yield opened


def a_job(world: ApiWorld) -> str:
    """A running job of Ben's."""
    spec = {"run": "sleep 1000", "name": "train", "retry": {"max": 3}, "checkpoint": {}}
    made = world.call("POST", "/v1/jobs", role="member", data={"spec": spec, "project": "vision"})
    assert made.status == 201, made.body
    job_id = str(made.json()["jobs"][0]["job_id"])
    deadline = time.monotonic() + 30
    while world.newest_attempt(job_id).state != "running":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return job_id


def drill(world: ApiWorld, job_id: str, role: str = "member", **fields: Any) -> Any:
    data = {"kind": "kill-rank", "within_s": 1.0, **fields}
    return world.call("POST", f"/v1/jobs/{job_id}/drills", role=role, data=data)


def test_owners_drill_their_ranks_and_operators_the_nodes_they_run_on(world: ApiWorld) -> None:
    job_id = a_job(world)
    assert drill(world, job_id, "other").status == 403
    assert drill(world, job_id, kind="kill-node").status == 422, "not by this door"
    made = drill(world, job_id)
    assert made.status == 201
    assert (made.json()["kind"], made.json()["rank"], made.json()["result"]) == ("kill-rank", 0, None)
    of_node = {"kind": "kill-node", "job_id": a_job(world), "within_s": 1.0}
    assert world.call("POST", "/v1/drills", role="member", data=of_node).status == 403
    assert world.call("POST", "/v1/drills", role="operator", data=of_node).status == 201


def test_drills_are_seen_by_those_who_see_the_job(world: ApiWorld) -> None:
    made = drill(world, a_job(world)).json()
    seen = {
        role: [one["id"] for one in world.call("GET", "/v1/drills", role=role).json()["items"]]
        for role in ("viewer", "operator", "stranger")
    }
    assert made["id"] in seen["viewer"]
    assert made["id"] in seen["operator"]
    assert made["id"] not in seen["stranger"]
    mine = world.call("GET", f"/v1/drills?job={made['job_id']}", role="member").json()["items"]
    assert [one["id"] for one in mine] == [made["id"]]


@pytest.mark.parametrize("data", [{"kind": "kill-node"}, {"kind": "kill-control", "job_id": "job_1"}])
def test_a_drill_needs_a_job_unless_it_kills_the_control_plane(world: ApiWorld, data: dict[str, Any]) -> None:
    assert world.call("POST", "/v1/drills", role="operator", data=data).status == 422


def test_repeated_request_is_not_a_second_drill(world: ApiWorld) -> None:
    job_id, key = a_job(world), [("idempotency-key", "d-1")]
    data = {"kind": "hang", "within_s": 1.0}
    first, again = (
        world.call("POST", f"/v1/jobs/{job_id}/drills", role="member", data=data, headers=key)
        for _ in range(2)
    )
    assert (first.status, first.json()["id"]) == (201, again.json()["id"])
