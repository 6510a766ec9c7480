"""Row 13 and the last line of the list: an internal failure is reported by an id, never by its details."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.api.routing import RouteDeclaration
from shoal.errors import StoreUnavailable
from tests.attacks.inventory import GUARDED, aimed, title
from tests.support.planes.world import ApiWorld, open_world

LEAK = "/srv/shoal/keys/signing.key at 0x7f3a2b1c postgres://u:p@db"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    """A world of its own: the control plane's loops meet the broken store too, and say so at `/healthz`."""
    with open_world(tmp_path_factory.mktemp("broken")) as opened:
        yield opened


@pytest.mark.parametrize("row", GUARDED, ids=title)
@pytest.mark.parametrize("error,status", [(RuntimeError(LEAK), 500), (StoreUnavailable("disk full"), 503)])
def test_a_broken_store_is_a_problem_document_without_insides(
    world: ApiWorld, row: RouteDeclaration, error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = ("me.read", "schema.read", "lease.renew", "archive.write", "table.read", "table.report")
    if row.permission in without:
        return  # they need not read the store once the caller is known
    if row.path.startswith("/v1/mailbox/"):
        return  # for supervisors and bootstrap tokens only: other callers are refused before anything is read
    role = "job" if row.permission == "job.self" else "admin"
    shot = aimed(world, row)
    world.call("GET", "/v1/me", role="admin")

    async def broken(*_: Any, **__: Any) -> Any:
        raise error

    store = world.plane.core.records.store
    monkeypatch.setattr(store, "read", broken)
    monkeypatch.setattr(store, "write", broken)
    got = world.call(
        shot.method, shot.target, role=role, data=shot.data, body=shot.body, headers=shot.headers
    )
    if row.path == "/v1/events/stream":
        assert got.status in (200, status)
        return
    assert got.status == status, got.body
    assert got.header("content-type") == "application/problem+json"
    assert got.json()["request_id"] == got.header("x-request-id")
    for word in ("Traceback", "0x7f", "/srv", "postgres", "RuntimeError", world.tokens[role]):
        assert word not in got.body.decode()


def test_no_token_reaches_the_log(world: ApiWorld, monkeypatch: pytest.MonkeyPatch, log_file: Path) -> None:
    async def broken(*_: Any) -> Any:
        raise RuntimeError(f"while serving {world.tokens['operator']}")

    world.call("GET", "/v1/me", role="operator")
    monkeypatch.setattr(world.plane.core.records.store, "read", broken)
    failed = world.call("GET", "/v1/nodes", role="operator").json()["request_id"]
    logged = log_file.read_text()
    assert failed in logged
    assert "while serving" in logged
    assert world.tokens["operator"].rsplit("_", 1)[1] not in logged
