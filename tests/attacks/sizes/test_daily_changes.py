"""What a person may have recorded for ever is limited by the day, whatever changes.

Made from the route table: a route whose repetition is never refused fails here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.api.routing import RouteDeclaration
from shoal.control import record
from tests.attacks.inventory import GUARDED, aimed, fire, title
from tests.support.planes.world import ROOT, ApiWorld, open_world

MACHINES = ("/v1/supervisor/", "/v1/mailbox/", "/v1/serving/")
COUNTED_OTHERWISE = frozenset(
    {
        *(
            "POST /v1/jobs",
            "POST /v1/jobs/{job_id}/stop",
            "POST /v1/jobs/{job_id}/retry",
        ),  # jobs of a project
        "PUT /v1/archives/{digest}",  # bytes of a project
        *("POST /v1/nodes/{name}/cordon", "POST /v1/nodes/{name}/drain", "POST /v1/nodes/{name}/resume"),
        # by operators, who must be able to
        *("POST /v1/nodes/{name}/declare-dead", "DELETE /v1/nodes/{name}"),
        *("DELETE /v1/tokens/{token_id}", "DELETE /v1/projects/{name}/members/{user}"),
        *("POST /v1/services/{service_id}/stop", "DELETE /v1/windows/{window_id}", "PATCH /v1/users/{name}"),
    }
)
"""Changes that take rights away or end something, and changes with another limit."""
WRITES = [row for row in GUARDED if row.method not in ("GET", "HEAD") and not row.path.startswith(MACHINES)]
REFUSED = {"POST /v1/jobs/{job_id}/drills", "POST /v1/services/{service_id}/rollout"}
"""Refused here because of the present state."""


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("busy")) as world:
        world.portal.call(world.plane.update_project, ROOT, "vision", {"max_open_jobs": 100_000})
        yield world


@pytest.mark.parametrize("row", WRITES, ids=title)
def test_user_at_the_daily_limit_may_only_end_things(
    busy: ApiWorld, monkeypatch: pytest.MonkeyPatch, row: RouteDeclaration
) -> None:
    shot = aimed(busy, row)
    monkeypatch.setattr(record, "MAX_CHANGES_PER_DAY", 0)
    status = fire(busy, shot, "admin")
    assert (status == 429) is (title(row) not in COUNTED_OTHERWISE | REFUSED)
