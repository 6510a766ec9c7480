"""Every route that changes something, at the largest it takes, beside a submission in another project.

No transaction is long: its statements are counted, not timed. A route that is not in the table fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from shoal.settings import ServerLimits
from shoal.store.tables.submissions import ArrayVerb
from shoal.store.transaction import ChangeResult, Committer, Tx
from tests.attacks.inventory import GUARDED, Shot, aimed, fire, new_user, title
from tests.support.planes import asgi
from tests.support.planes.world import ROOT, ApiWorld, eventually, open_world
from tests.support.store_costs import CountedChange, counted_changes

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
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("large"), is_durable=True) as world:
        world.portal.call(world.plane.update_project, ROOT, "vision", {"max_open_jobs": 100_000})
        yield world


Make = Callable[[ApiWorld], tuple[Shot, str]]


def of_one(role: str) -> Callable[[str], Make]:
    """A route about one thing, whose size does not vary."""
    return lambda name: lambda world: (aimed(world, ROW[name]), role)


def array(world: ApiWorld, size: int = ELEMENTS) -> Shot:
    blocked = {"run": "true", "array": size, "after": [world.jobs["vision"]]}
    return Shot("POST", "/v1/jobs", data={"spec": blocked, "project": "vision"})


def stop_of_array(world: ApiWorld, size: int = ELEMENTS) -> Shot:
    shot = array(world, size)
    created = world.call(shot.method, shot.target, role="member", data=shot.data)
    assert created.status == 201, created.body
    return Shot("POST", f"/v1/arrays/{created.json()['array_id']}/stop", data={})


def service(world: ApiWorld, count: int = REPLICAS) -> Shot:
    shot = aimed(world, ROW["POST /v1/services"])
    spec = {**shot.data["spec"], "replicas": count, "resources": {"cpus": 0.01}}
    return Shot(shot.method, shot.target, data={**shot.data, "spec": spec})


def scaled(world: ApiWorld) -> Shot:
    shot = aimed(world, ROW["POST /v1/services/{service_id}/scale"])
    return Shot(shot.method, shot.target, data={"min": REPLICAS, "max": REPLICAS})


def stop_of_service(world: ApiWorld) -> Shot:
    shot = service(world)
    created = world.call(shot.method, shot.target, role="member", data=shot.data)
    assert created.status == 201, created.body
    return Shot("POST", f"/v1/services/{created.json()['id']}/stop", data={})


def window(world: ApiWorld) -> Shot:
    shot = aimed(world, ROW["POST /v1/windows"])
    return Shot(shot.method, shot.target, data={**shot.data, "nodes": NODES})


def renewal(world: ApiWorld) -> Shot:
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


def stop_of_awaited(world: ApiWorld) -> Shot:
    """The stop of a job that a whole array waits for."""
    awaited = world.submit("member", "vision")
    blocked = {"run": "true", "array": ELEMENTS, "after": [awaited]}
    created = world.call("POST", "/v1/jobs", role="member", data={"spec": blocked, "project": "vision"})
    assert created.status == 201, created.body
    return Shot("POST", f"/v1/jobs/{awaited}/stop", data={})


def tokens_of(world: ApiWorld, user: str) -> str:
    """Make as many tokens as a user may have, each with the one before. Return the id of the first."""
    fields = {"label": "made by a test", "user": user}
    first = world.call("POST", "/v1/tokens", role="admin", data=fields).json()
    text = first["text"]
    for _ in range(ServerLimits().max_tokens_per_user - 1):
        created = world.call("POST", "/v1/tokens", token=text, data=fields)
        assert created.status == 201, created.body
        text = created.json()["text"]
    return str(first["id"])


def revocation(world: ApiWorld) -> Shot:
    return Shot("DELETE", f"/v1/tokens/{tokens_of(world, new_user(world))}")


def dismissal(world: ApiWorld) -> Shot:
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
    "POST /v1/mailbox/fetch": of_one("bootstrap")("POST /v1/mailbox/fetch"),
    "POST /v1/mailbox/archive": of_one("bootstrap")("POST /v1/mailbox/archive"),
    "POST /v1/mailbox/dispatch": of_one("supervisor")("POST /v1/mailbox/dispatch"),
}
REFUSED = frozenset(
    {
        *("POST /v1/jobs/{job_id}/drills", "POST /v1/jobs/{job_id}/retry"),
        "POST /v1/services/{service_id}/rollout",
        *("POST /v1/mailbox/fetch", "POST /v1/mailbox/archive", "POST /v1/mailbox/dispatch"),
        *("POST /v1/nodes/{name}/declare-dead", "DELETE /v1/nodes/{name}"),
    }
)
"""The present state refuses: no job runs or has ended, or there is no earlier release."""
LAST = "POST /v1/nodes/{name}/drain"
"""Last, because node-2 takes no work afterwards."""


def test_every_route_that_changes_something_has_its_largest_request() -> None:
    assert sorted(LARGEST) == CHANGING


@pytest.mark.parametrize("name", sorted(CHANGING, key=lambda name: (name == LAST, name)))
def test_no_transaction_of_the_largest_request_is_long(large: ApiWorld, name: str) -> None:
    """Neither the request's own, nor those of the loops that follow from it."""
    shot, role = LARGEST[name](large)
    with counted_changes() as changes:
        status = fire(large, shot, role)
        before = len(changes)
        large.submit("stranger", "speech")
        eventually(lambda: len(changes) > before)
    assert (status < 300) is (name not in REFUSED), f"{name}: {status}"
    longest = max(changes, key=lambda change: change.num_statements)
    assert longest.num_statements <= MAX_STATEMENTS, f"{longest.name} in {name}"


@pytest.mark.parametrize("verb", list(ArrayVerb))
def test_a_submission_of_another_project_is_committed_between_two_batches(
    large: ApiWorld, verb: ArrayVerb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while an array is under way, and is not the last to be written."""
    large.portal.call(large.plane.update_project, ROOT, "vision", {"max_open_jobs": 100_000})
    shot = array(large, SOME) if verb is ArrayVerb.SUBMIT else stop_of_array(large, SOME)
    written: list[str] = []
    apply, other = Committer.apply, list[Future[asgi.AsgiReply]]()

    def applying(self: Committer, fn: Callable[[Tx], Any]) -> ChangeResult:
        name = CountedChange(fn).name
        if name.startswith(("finish_submission", "finish_stop")) and not other:
            # From the thread that writes, during this batch: the submission waits before most other batches
            # are asked for.
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


async def _submit_elsewhere(world: ApiWorld) -> asgi.AsgiReply:
    body = json.dumps({"spec": {"run": "true"}, "project": "speech"}).encode()
    headers = [
        ("host", "localhost"),
        ("authorization", f"Bearer {world.tokens['stranger']}"),
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
    ]
    return await asgi.request(world.app, "POST", "/v1/jobs", headers=headers, body=body)
