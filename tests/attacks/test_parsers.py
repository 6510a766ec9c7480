"""Rows 25, 27, 33, 34 and 36: hostile values, names, numbers, documents and filters."""

from __future__ import annotations

import json
import pickle
import resource
from typing import Any

import pytest

from shoal.api.routing import RouteDeclaration
from tests.attacks.inventory import GUARDED, bare, title
from tests.support.planes import asgi
from tests.support.planes.world import ApiWorld

JSON = [("content-type", "application/json")]
TRAVERSALS = (
    *("..", "../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e%2f%2e%2e%2fetc", "..%252f..%252fetc"),
    *(
        "..\\..\\windows",
        "..%5c..%5cwindows",
        "%00",
        "a%00b",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "file:%2f%2f",
    ),
    *("C:%5cwindows", "%23%2f..%2fetc", "a%3f..%2f", "....%2f%2f", "%c0%ae%c0%ae%2f", "~root", "."),
)
INJECTIONS = (
    *(
        "' OR 1=1 --",
        '" OR ""="',
        "1; DROP TABLE jobs",
        "%' OR '%'='",
        "\\",
        "*",
        "%",
        "_",
        "${7*7}",
        "{{7*7}}",
    ),
    *("' UNION SELECT secret_hash FROM tokens --", "(a+)+$" * 10, "x" * 200, "\u202e", "💥", "-1", "NULL"),
)
NUMBERS = (
    "-1",
    "1e308",
    "NaN",
    "Infinity",
    "9223372036854775808",
    "1" * 400,
    "0x10",
    "1.5",
    "true",
    '"5"',
    "[]",
)
WITH_NAME = [row for row in GUARDED if "{" in row.path]


@pytest.mark.parametrize("row", WITH_NAME, ids=title)
def test_no_name_in_a_path_leads_out_of_it(world: ApiWorld, row: RouteDeclaration) -> None:
    names = [part[1:-1] for part in row.path.split("/") if part.startswith("{")]
    for payload in TRAVERSALS:
        shot = bare(row, dict.fromkeys(names, payload))
        got = world.call(
            shot.method, shot.target, role="admin", data=shot.data, body=shot.body, headers=shot.headers
        )
        assert got.status in (400, 404, 405, 422), (payload, got.status, got.body)
        assert b"root:" not in got.body
    outside = world.plane.settings.home.parent
    assert not list(outside.rglob("*passwd*"))


@pytest.mark.parametrize("payload", TRAVERSALS)
def test_no_project_name_leads_an_upload_out_of_its_directory(world: ApiWorld, payload: str) -> None:
    target = f"/v1/archives/{'0' * 64}?project={payload.replace('#', '%23')}"
    got = world.call("PUT", target, role="admin", body=b"x", headers=[("content-type", "application/x-tar")])
    assert got.status in (400, 404, 422)
    assert world.call("GET", target, role="admin").status in (400, 404, 422)


@pytest.mark.parametrize(
    "field", ["project", "status", "name", "owner", "array", "ref", "cursor", "sort", "order_by"]
)
def test_filters_of_jobs_match_literally_or_not_at_all(world: ApiWorld, field: str) -> None:
    for payload in INJECTIONS:
        got = world.call("GET", f"/v1/jobs?{field}={_quoted(payload)}", role="stranger")
        assert got.status in (200, 404, 422), (payload, got.body)
        if got.status == 200:
            assert got.json()["items"] == []


@pytest.mark.parametrize("field", ["project", "job", "node", "kind", "after", "limit"])
def test_filters_of_events_match_literally_or_not_at_all(world: ApiWorld, field: str) -> None:
    for payload in INJECTIONS:
        got = world.call("GET", f"/v1/events?{field}={_quoted(payload)}", role="stranger")
        assert got.status in (200, 404, 422), (payload, got.body)
        if got.status == 200:
            assert got.json()["items"] == []


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("field", ["gpus", "nodes", "cpus", "memory"])
def test_absurd_amounts_are_refused(world: ApiWorld, field: str, number: str) -> None:
    raw = f'{{"spec": {{"run": "true", "resources": {{"{field}": {number}}}}}, "project": "vision"}}'
    got = world.call("POST", "/v1/jobs", role="member", body=raw.encode(), headers=JSON)
    if (field, number) in {
        ("cpus", "1.5"),
        ("gpus", '"5"'),
        ("nodes", '"5"'),
        ("cpus", '"5"'),
        ("memory", '"5"'),
    }:
        return  # what the spec's own human forms allow
    assert got.status in (400, 422), got.body


@pytest.mark.timeout(60)
@pytest.mark.parametrize("array", [10**9, "0..999999999", [1] * 20_000, -1, "0-9%0", {"indices": "x"}])
def test_absurd_arrays_are_refused_quickly(world: ApiWorld, array: Any) -> None:
    body = {"spec": {"run": "true", "array": array}, "project": "vision"}
    assert world.call("POST", "/v1/jobs", role="member", data=body).status == 422


def bombs() -> dict[str, bytes]:
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    return {
        "nesting": deep,
        "lists": b"[" * 100_000,
        "twice": b'{"spec": {"run": "true"}, "spec": {"run": "false"}}',
        "twice deep": b'{"spec": {"run": "true", "env": {"A": "1", "A": "2"}}}',
        "huge integer": b'{"spec": {"run": "true", "priority": ' + b"9" * 100_000 + b"}}",
        "nan": b'{"spec": {"run": "true", "priority": NaN}}',
        "surrogate": b'{"spec": {"run": "\\ud800"}}',
        "not utf-8": b'{"spec": {"run": "\xff"}}',
        "project not utf-8": b'{"project": "\xff\xff", "spec": {"run": "true"}}',
        "project in the spec not utf-8": b'{"spec": {"run": "true", "project": "\xff\xff"}}',
        "key not utf-8": b'{"\xff": 1}',
        "nul": b'{"spec": {"run": "a\\u0000b"}}',
        "many keys": json.dumps({f"k{number}": 1 for number in range(50_000)}).encode(),
        "empty": b" ",
        "text": b'"spec"',
        "list": b"[]",
        "null": b"null",
        "trailing": b'{"spec": {"run": "true"}} x',
    }


@pytest.mark.timeout(60)  # a pattern that blows up takes minutes
@pytest.mark.parametrize("name,body", bombs().items(), ids=bombs().keys())
def test_a_hostile_document_is_refused_in_bounded_time_and_memory(
    world: ApiWorld, name: str, body: bytes
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = world.call("POST", "/v1/jobs", role="member", body=body, headers=JSON)
    assert got.status in (400, 422), got.body[:300]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert len(got.body) < 70_000


def test_a_body_over_the_limit_is_refused_whether_or_not_it_says_so(world: ApiWorld) -> None:
    limit = world.plane.settings.limits.max_body_bytes
    assert world.call("POST", "/v1/jobs", role="member", body=b"x" * (limit + 1), headers=JSON).status == 413
    lied = [*JSON, ("transfer-encoding", "chunked")]
    body = b'{"spec": "' + b"x" * limit
    got = world.portal.call(lambda: _chunked(world, body, lied))
    assert got == 413


async def _chunked(world: ApiWorld, body: bytes, headers: list[tuple[str, str]]) -> int:
    sent = [("host", "localhost"), ("authorization", f"Bearer {world.tokens['member']}"), *headers]
    return (await asgi.request(world.app, "POST", "/v1/jobs", headers=sent, body=body)).status


@pytest.mark.parametrize(
    "kind", ["application/x-python-pickle", "application/octet-stream", "text/yaml", "application/x-yaml", ""]
)
def test_only_json_is_read_where_json_is_expected(world: ApiWorld, kind: str) -> None:
    body = pickle.dumps({"spec": {"run": "true"}})
    headers = [("content-type", kind)] if kind else []
    assert world.call("POST", "/v1/jobs", role="member", body=body, headers=headers).status == 415


def test_the_server_unpickles_nothing(world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    yaml = "!!python/object/apply:os.system ['true']"
    body = {"spec": {"run": yaml, "env": {"A": yaml}}, "project": "vision"}
    job = world.call("POST", "/v1/jobs", role="member", data=body).json()["jobs"][0]
    shown = world.call("GET", f"/v1/jobs/{job['job_id']}", role="member").json()
    assert shown["spec"]["run"] == yaml


def _quoted(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode())
