"""Row 25: many submissions at once never pass the quota, and a key used twice is one job."""

from __future__ import annotations

from pathlib import Path

import anyio

from tests.support.planes import asgi
from tests.support.planes.world import ApiWorld, open_world


def submit_at_once(world: ApiWorld, count: int, key: str | None = None) -> list[int]:
    """The statuses of `count` submissions sent together."""
    headers = [
        ("host", "localhost"),
        ("authorization", f"Bearer {world.tokens['member']}"),
        ("content-type", "application/json"),
    ]
    if key is not None:
        headers.append(("idempotency-key", key))
    body = b'{"spec": {"run": "true", "name": "race"}, "project": "vision"}'
    statuses: list[int] = []

    async def one() -> None:
        got = await asgi.request(world.app, "POST", "/v1/jobs", headers=headers, body=body)
        statuses.append(got.status)

    async def together() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(one)

    world.portal.call(together)
    return statuses


def count_open(world: ApiWorld) -> int:
    return world.read(lambda tx: int(tx.jobs.count_open("vision")))


def test_a_hundred_submissions_at_the_edge_never_pass_the_quota(tmp_path: Path) -> None:
    with open_world(tmp_path, is_durable=True) as world:
        limit = count_open(world) + 10
        limited = world.call("PATCH", "/v1/projects/vision", role="admin", data={"max_open_jobs": limit})
        assert limited.status == 200
        statuses = submit_at_once(world, 100)
        assert sorted(set(statuses)) == [201, 429]
        assert statuses.count(201) == 10
        assert count_open(world) == limit


def test_an_array_counts_whole_against_the_quota(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        limit = count_open(world) + 10
        world.call("PATCH", "/v1/projects/vision", role="admin", data={"max_open_jobs": limit})
        body = {"spec": {"run": "true", "array": 11}, "project": "vision"}
        assert world.call("POST", "/v1/jobs", role="member", data=body).status == 429
        assert count_open(world) == limit - 10


def test_one_key_at_the_same_moment_is_one_job(tmp_path: Path) -> None:
    with open_world(tmp_path, is_durable=True) as world:
        before = count_open(world)
        assert submit_at_once(world, 30, key="the-same") == [201] * 30
        assert count_open(world) == before + 1
