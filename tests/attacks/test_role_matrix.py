"""Rows 20 and 21: what each caller gets from each route, cell by cell. No caller learns what it
may not see.
"""

from __future__ import annotations

import pytest

from shoal.api.routing import RouteDeclaration
from tests.attacks.inventory import GUARDED, TABLE, UNKNOWN_ID, Shot, aimed, bare, fire, title
from tests.attacks.matrix import CALLERS, LIKE_NOBODY, expected
from tests.support.planes.world import ApiWorld

MATRIX = expected()
WITH_ID = [row for row in GUARDED if "{" in row.path and not row.path.startswith("/v1/nodes/")]


def test_every_route_has_a_row_in_the_matrix_and_every_row_a_route() -> None:
    assert {title(row) for row in TABLE} == set(MATRIX)


@pytest.mark.parametrize("row", TABLE, ids=title)
def test_every_caller_gets_what_the_matrix_says(world: ApiWorld, row: RouteDeclaration) -> None:
    seen = {}
    for caller in (*CALLERS, *LIKE_NOBODY):
        status = fire(world, aimed(world, row), None if caller == "nobody" else caller)
        seen[caller] = "y" if status < 300 or status == 409 else str(status)
    if "/nodes/node-" in aimed(world, row).target:
        world.call("POST", "/v1/nodes/node-2/resume", role="admin", data={})
    assert seen == MATRIX[title(row)]


@pytest.mark.parametrize("row", WITH_ID, ids=title)
def test_caller_without_rights_cannot_tell_what_exists(world: ApiWorld, row: RouteDeclaration) -> None:
    def answer(shot: Shot) -> tuple[int, dict[str, object]]:
        got = world.call(
            shot.method, shot.target, role="stranger", data=shot.data, body=shot.body, headers=shot.headers
        )
        body = got.json()
        return got.status, {key: value for key, value in body.items() if key != "request_id"}

    real = aimed(world, row)
    random = bare(row, {"name": "no-such-thing", "user": "nobody", "job_id": UNKNOWN_ID})
    if row.path.startswith("/v1/archives/"):
        random = Shot(
            random.method, random.target.replace("vision", "no-such"), None, random.body, random.headers
        )
    assert answer(real) == answer(random)
    assert answer(real)[0] in (403, 404)
