"""Row 54: no part of a body is parsed for a caller who will be refused. Made from the route table.

Parsing is counted, not timed: JSON decoded, models validated, specs read, patterns compiled.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from starlette.requests import Request

import shoal
from shoal.api.http import bodies
from shoal.api.http.limits import SCOPE_KEY
from shoal.api.routes import internal, services
from shoal.api.routing import RouteDeclaration
from shoal.errors import Bug
from tests.attacks.inventory import GUARDED, bare, title
from tests.attacks.matrix import CALLERS, expected
from tests.support.planes.world import ApiWorld

JSON = [("content-type", "application/json")]
WRITES = [row for row in GUARDED if row.method in ("POST", "PUT", "PATCH", "DELETE")]
RULE = r"(?i)[\x00-\U0010ffff][\x01-\U0010fffe]" + r"[!-\377]" * 110
COSTLY = {
    "project": "vision",
    "spec": {
        "name": "hello",
        "run": "true",
        "env": {f"A{number}": "x" for number in range(2000)},
        "log_rules": {f"{RULE}{number}": "exclude_node" for number in range(64)},
    },
}
PARSERS = {
    bodies: ("decode_strictly", "validate", "_spec_of"),
    services: ("decode_strictly", "validate", "parse_service"),
    internal: ("decode_strictly",),
}
REFUSED = [
    (row, caller)
    for row in WRITES
    for caller in CALLERS
    if expected()[title(row)][caller] in ("401", "403", "404") and caller not in ("supervisor", "bootstrap")
]
"""A supervisor and a node agent are refused because of what their own signed body says."""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how often each parser ran."""
    counts: Counter[str] = Counter()

    def counted(name: str, parser: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return parser(*args, **kwargs)

        return count

    for module, names in PARSERS.items():
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


def test_every_parser_of_a_body_is_counted() -> None:
    """A file of the API that parses bodies is in the table above."""
    folder = Path(shoal.__file__).parent / "api"
    for path in folder.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        parsers = names & {"decode_strictly", "parse_service", "parse_job"}
        module = next((parser for parser in PARSERS if parser.__file__ == str(path)), None)
        assert not parsers or module is not None, path


@pytest.mark.parametrize("row,caller", REFUSED, ids=[f"{title(row)}-{caller}" for row, caller in REFUSED])
def test_nothing_is_parsed_for_a_caller_who_is_refused(
    world: ApiWorld, parsed: Counter[str], row: RouteDeclaration, caller: str
) -> None:
    values = {"job_id": world.jobs["vision"], "name": "vision", "user": "cy"}
    shot = bare(row, values)
    role = None if caller == "nobody" else caller
    body = None if shot.body else COSTLY
    got = world.call(row.method, shot.target, role=role, data=body, body=shot.body, headers=shot.headers)
    assert got.status in (401, 403, 404)
    assert not parsed


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/services"])
def test_a_body_without_end_is_not_read_for_a_caller_who_may_submit_nowhere(
    world: ApiWorld, path: str
) -> None:
    assert world.call("POST", path, role="viewer", body=b"[" * 3_000_000, headers=JSON).status == 403


@pytest.mark.parametrize(
    "body",
    [
        b'{"project": "vision", "spec": {}, "project": "speech"}',
        b'{"spec": {"run": "x", "project": "vision"}}',
    ],
    ids=["said twice", "said in the spec"],
)
def test_the_project_that_is_asked_about_is_the_one_that_is_used(world: ApiWorld, body: bytes) -> None:
    """dora may submit to `speech` alone."""
    assert world.call("POST", "/v1/jobs", role="stranger", body=body, headers=JSON).status in (404, 422)


def test_a_body_that_says_for_whom_it_is_must_be_small(world: ApiWorld) -> None:
    got = world.call("POST", "/v1/tokens", role="viewer", data={"label": "x" * bodies.MAX_SMALL})
    assert got.status == 413


def test_a_route_that_reads_its_body_before_it_asked_is_a_bug() -> None:
    async def read() -> None:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        call = SimpleNamespace(is_authorized=False)
        await bodies.read_raw_json(Request({**scope, SCOPE_KEY: call}))

    with pytest.raises(Bug, match="before it asked for permission"):
        anyio.run(read)
