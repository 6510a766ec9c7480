"""Every route that changes something, at the largest it takes, beside a submission in another project.

Nobody's transaction is long: what one does is counted, not timed. A route that is not in the table fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from shoal.settings import ServerLimits
from shoal.store.array_work import ArrayVerb
from shoal.store.commit import Answer, Committer
from shoal.store.transaction import Tx
from tests.attacks.inventory import GUARDED, Shot, aimed, fire, new_user, title
from tests.support import asgi
from tests.support.transactions import Change, counted
from tests.support.world import ROOT, World, eventually, open_world

MAX_STATEMENTS = 2500
"""Of one transaction: at 20 to 60 us each, 0.05 to 0.15 s."""
ELEMENTS = 3_000
"""More than one transaction has room for; an array may have 10,000."""
SOME = 1_500
NODES = ["node-2"] * 10_000
REPLICAS = 1000
ROW = {title(row): row for row in GUARDED}
CHANGING = sorted(name for name in ROW if not name.startswith(("GET", "HEAD")))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("large"), is_durable=True) as world:
        world.portal.call(world.plane.update_project, ROOT, "vision", {"max_open_jobs": 100_000})
        yield world


Make = Callable[[World], tuple[Shot, str]]


def of_one(role: str) -> Callable[[str], Make]:
    """A route about one thing, which is not larger for anybody."""
    return lambda name: lambda world: (aimed(world, ROW[name]), role)


def array(world: World, size: int = ELEMENTS) -> Shot:
    blocked = {"run": "true", "array": size, "after": [world.jobs["vision"]]}
    return Shot("POST", "/v1/jobs", data={"spec": blocked, "project": "vision"})


def stop_of_array(world: World, size: int = ELEMENTS) -> Shot:
    shot = array(world, size)
    made = world.call(shot.method, shot.target, role="member", data=shot.data)
    assert made.status == 201, made.body
    return Shot("POST", f"/v1/arrays/{made.json()['array_id']}/stop", data={})


def service(world: World, count: int = REPLICAS) -> Shot:
    shot = aimed(world, ROW["POST /v1/services"])
    spec = {**shot.data["spec"], "replicas": count, "resources": {"cpus": 0.01}}
    return Shot(shot.method, shot.target, data={**shot.data, "spec": spec})


def scaled(world: World) -> Shot:
    shot = aimed(world, ROW["POST /v1/services/{service_id}/scale"])
    return Shot(shot.method, shot.target, data={"min": REPLICAS, "max": REPLICAS})


def stop_of_service(world: World) -> Shot:
    shot = service(world)
    made = world.call(shot.method, shot.target, role="member", data=shot.data)
    assert made.status == 201, made.body
    return Shot("POST", f"/v1/services/{made.json()['id']}/stop", data={})


def window(world: World) -> Shot:
    shot = aimed(world, ROW["POST /v1/windows"])
    return Shot(shot.method, shot.target, data={**shot.data, "nodes": NODES})


def renewal(world: World) -> Shot:
    shot = aimed(world, ROW["POST /v1/supervisor/renew"])
    samples = [
        {
            "name": f"loss-{number}",
            "rank": 0,
            "axis": "step",
            "points": [(x, 1.0, 1.0, 1.0) for x in range(64)],
        }
        for number in range(1000)
    ]
    return Shot(shot.method, shot.target, data={**shot.data, "metrics": samples})


def stop_of_awaited(world: World) -> Shot:
    """The stop of a job that a whole array waits for."""
    awaited = world.submit("member", "vision")
    blocked = {"run": "true", "array": ELEMENTS, "after": [awaited]}
    made = world.call("POST", "/v1/jobs", role="member", data={"spec": blocked, "project": "vision"})
    assert made.status == 201, made.body
    return Shot("POST", f"/v1/jobs/{awaited}/stop", data={})


def tokens_of(world: World, user: str) -> str:
    """As many tokens as a user may have, one made with the other. Returns the id of the first."""
    asked = {"label": "made by a test", "user": user}
    first = world.call("POST", "/v1/tokens", role="admin", data=asked).json()
    text = first["text"]
    for _ in range(ServerLimits().max_tokens_per_user - 1):
        made = world.call("POST", "/v1/tokens", token=text, data=asked)
        assert made.status == 201, made.body
        text = made.json()["text"]
    return str(first["id"])


def revocation(world: World) -> Shot:
    return Shot("DELETE", f"/v1/tokens/{tokens_of(world, new_user(world))}")


def dismissal(world: World) -> Shot:
    user = new_user(world)
    tokens_of(world, user)
    return Shot("PATCH", f"/v1/users/{user}", data={"is_active": False})


LARGEST: dict[str, Make] = {
    "POST /v1/jobs": lambda world: (array(world), "member"),
    "POST /v1/arrays/{array_id}/stop": lambda world: (stop_of_array(world), "member"),
    "POST /v1/services": lambda world: (service(world), "member"),
    "POST /v1/services/{service_id}/scale": lambda world: (scaled(world), "member"),
    "POST /v1/services/{service_id}/stop": lambda world: (stop_of_service(world), "member"),
    "POST /v1/windows": lambda world: (window(world), "operator"),
    "POST /v1/supervisor/renew": lambda world: (renewal(world), "supervisor"),
    "POST /v1/jobs/{job_id}/stop": lambda world: (stop_of_awaited(world), "member"),
    "DELETE /v1/tokens/{token_id}": lambda world: (revocation(world), "admin"),
    "PATCH /v1/users/{name}": lambda world: (dismissal(world), "admin"),
    **{
        name: of_one("member")(name)
        for name in (
            "POST /v1/jobs/{job_id}/retry",
            "POST /v1/jobs/{job_id}/drills",
            "PUT /v1/archives/{digest}",
            "POST /v1/services/{service_id}/rollout",
            "POST /v1/tokens",
        )
    },
    **{
        name: of_one("admin")(name)
        for name in (
            "POST /v1/users",
            "POST /v1/projects",
            "PATCH /v1/projects/{name}",
            "PUT /v1/projects/{name}/members/{user}",
            "DELETE /v1/projects/{name}/members/{user}",
            "POST /v1/nodes/{name}/cordon",
            "POST /v1/nodes/{name}/drain",
            "POST /v1/nodes/{name}/resume",
            "POST /v1/nodes/{name}/declare-dead",
            "DELETE /v1/nodes/{name}",
            "DELETE /v1/windows/{window_id}",
            "POST /v1/drills",
        )
    },
    "POST /v1/serving/reports": of_one("data_plane")("POST /v1/serving/reports"),
    "POST /v1/desk/fetch": of_one("ticket")("POST /v1/desk/fetch"),
    "POST /v1/desk/archive": of_one("ticket")("POST /v1/desk/archive"),
    "POST /v1/desk/dispatch": of_one("supervisor")("POST /v1/desk/dispatch"),
}
REFUSED = frozenset(
    {
        *("POST /v1/jobs/{job_id}/drills", "POST /v1/jobs/{job_id}/retry"),
        "POST /v1/services/{service_id}/rollout",
        *("POST /v1/desk/fetch", "POST /v1/desk/archive", "POST /v1/desk/dispatch"),
        *("POST /v1/nodes/{name}/declare-dead", "DELETE /v1/nodes/{name}"),
    }
)
"""Where the state of things says no: nothing runs yet or has ended, or no release came before."""
LAST = "POST /v1/nodes/{name}/drain"
"""Afterwards node-2 takes nothing."""


def test_every_route_that_changes_something_has_its_largest_request() -> None:
    assert sorted(LARGEST) == CHANGING


@pytest.mark.parametrize("name", sorted(CHANGING, key=lambda name: (name == LAST, name)))
def test_no_transaction_of_the_largest_request_is_long(large: World, name: str) -> None:
    """Neither the request's own, nor those of the loops that follow from it."""
    shot, role = LARGEST[name](large)
    with counted() as changes:
        status = fire(large, shot, role)
        before = len(changes)
        large.submit("stranger", "speech")
        eventually(lambda: len(changes) > before)
    assert (status < 300) is (name not in REFUSED), f"{name}: {status}"
    longest = max(changes, key=lambda change: change.num_statements)
    assert longest.num_statements <= MAX_STATEMENTS, f"{longest.name} in {name}"


@pytest.mark.parametrize("verb", list(ArrayVerb))
def test_a_submission_of_another_project_is_committed_between_two_batches(
    large: World, verb: ArrayVerb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while an array is under way, and is not the last to be written."""
    large.portal.call(large.plane.update_project, ROOT, "vision", {"max_open_jobs": 100_000})
    shot = array(large, SOME) if verb is ArrayVerb.SUBMIT else stop_of_array(large, SOME)
    written: list[str] = []
    apply, other = Committer.apply, list[Future[asgi.Answer]]()

    def applying(self: Committer, fn: Callable[[Tx], Any]) -> Answer:
        name = Change(fn).name
        if name.startswith(("finish_submission", "finish_stop")) and not other:
            # From the thread that writes, while this batch is: it waits before most others are asked for.
            other.append(large.portal.start_task_soon(_submit_elsewhere, large))
        written.append(name)
        return apply(self, fn)

    monkeypatch.setattr(Committer, "apply", applying)
    assert fire(large, shot, "member") in (200, 201)
    (job,) = other
    assert job.result(timeout=10).status == 201
    batches = [place for place, name in enumerate(written) if name.startswith("finish_")]
    theirs = [place for place, name in enumerate(written) if name == "submit.<locals>.change"]
    assert any(batches[0] < place < batches[-1] for place in theirs)


async def _submit_elsewhere(world: World) -> asgi.Answer:
    body = json.dumps({"spec": {"run": "true"}, "project": "speech"}).encode()
    headers = [
        ("host", "localhost"),
        ("authorization", f"Bearer {world.tokens['stranger']}"),
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
    ]
    return await asgi.request(world.app, "POST", "/v1/jobs", headers=headers, body=body)
