"""Every route that takes a body from people, with as many mistakes in it as fit: no other caller waits for
that.

A body of more than `MAX_MODEL` bytes is parsed on a thread, and only if it holds few values; a few mistakes
are described. Counted, not timed. The fields are those of the declared bodies and specs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from threading import current_thread
from typing import Any

import pytest
from pydantic import BaseModel

from shoal.api.app import describe_api
from shoal.api.http import bodies
from shoal.api.http.problems import describe_problem
from shoal.api.routes import services
from shoal.settings import ServerLimits
from shoal.spec import JobSpec
from shoal.spec.service import ServiceSpec
from tests.attacks.inventory import BODIES, GUARDED, aimed, title
from tests.support.planes.world import ApiWorld

JSON = [("content-type", "application/json")]
MACHINES = ("/v1/supervisor/", "/v1/mailbox/", "/v1/serving/")
"""Their bodies are signed by a part of Shoal."""
ROWS = {title(row): row for row in GUARDED if title(row) in BODIES and not row.path.startswith(MACHINES)}
SPECS: dict[str, type[BaseModel]] = {"POST /v1/jobs": JobSpec, "POST /v1/services": ServiceSpec}
MOST = ServerLimits().max_body_bytes - 4096
MANY = bodies.MAX_VALUES - 500
SCHEMAS = describe_api()["components"]["schemas"]
ROLES = {"POST /v1/jobs": "member", "POST /v1/services": "member"}


def fields_of(name: str) -> list[tuple[str, ...]]:
    """Return paths of the fields that the body may have; for a spec, its own fields too."""
    row = ROWS[name]
    operation = describe_api()["paths"][row.path][row.method.lower()]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    while "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    paths = [(field,) for field in schema.get("properties", {})]
    inner = [("spec", field) for field in SPECS[name].model_fields] if name in SPECS else []
    return [*paths, *inner]


def mistakes(name: str, count: int | None) -> Iterator[tuple[str, bytes]]:
    """Yield what is wrong and the body: with `count` mistakes, or as many as fit."""
    base = BODIES[name]
    yield "unknown fields", _filled(json.dumps(base).encode()[:-1] + b",", _field, b"}", count)
    if name in SPECS:
        spec = _filled(b'{"run":"true",', _field, b"}", count)
        yield "unknown keys", b'{"project":"vision","spec":%b}' % spec
    # A value too large for any field is found before fields are looked at: one field shows it.
    for path in fields_of(name) if count is not None else fields_of(name)[:1]:
        whole = {**base, "spec": {**base.get("spec", {})}} if len(path) == 2 else {**base}
        (whole["spec"] if len(path) == 2 else whole)[path[-1]] = "HERE"
        text = json.dumps(whole).encode()
        for kind, filled in values(count).items():
            yield f"{kind} in {'.'.join(path)}", text.replace(b'"HERE"', filled)


@cache
def values(count: int | None) -> dict[str, bytes]:
    """Return values for a field, by what they have too much of."""
    return {
        "elements": _filled(b"[", lambda _: b'"!a"', b"]", count),
        "objects": _filled(b"[", lambda _: b"{}", b"]", count),
        "keys": _filled(b"{", lambda number: b'"!%06d":"x"' % number, b"}", count),
    }


def _field(number: int) -> bytes:
    return b'"a%06d":1' % number


def _filled(begin: bytes, item: Callable[[int], bytes], end: bytes, count: int | None) -> bytes:
    count = count or (MOST - len(begin)) // (len(item(0)) + 1)
    return begin + b",".join(map(item, range(count))) + end


class Watch:
    """Stands before the parsers and notes their input."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wrong: list[str] = []
        self.num_described = 0
        for module in (bodies, bodies, services):
            patch.setattr(module, "decode_strictly", self._watched(module.decode_strictly))
        patch.setattr(bodies, "describe_problem", self._counted(describe_problem))

    def _watched(self, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def watch(raw: bytes) -> Any:
            if len(raw) > bodies.MAX_MODEL and not current_thread().name.startswith("shoal-api-parser"):
                self.wrong.append("a large body is parsed on the event loop")
            data = parse(raw)
            if _values(data) > 2 * bodies.MAX_VALUES:
                self.wrong.append(f"{_values(data)} values are parsed")
            return data

        return watch

    def _counted(self, describe: Callable[..., str]) -> Callable[..., str]:
        def count(*args: Any) -> str:
            self.num_described += 1
            return describe(*args)

        return count


def _values(data: Any) -> int:
    if not isinstance(data, dict | list):
        return 0
    return len(data) + sum(map(_values, data.values() if isinstance(data, dict) else data))


@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize("count", [MANY, None], ids=["many", "most"])
def test_no_body_of_mistakes_is_long(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch, name: str, count: int | None
) -> None:
    row = ROWS[name]
    target = aimed(world, row).target
    watch = Watch(monkeypatch)
    for mistake, body in mistakes(name, count):
        watch.num_described = 0
        got = world.call(row.method, target, role=ROLES.get(name, "admin"), body=body, headers=JSON)
        assert got.status in (404, 413, 422), (mistake, got.status)
        assert len(got.json().get("problems", [])) <= bodies.MAX_PROBLEMS + 1, mistake
        assert watch.num_described <= bodies.MAX_PROBLEMS, mistake
        assert not watch.wrong, (mistake, watch.wrong)
