"""Every route that reads, with every filter that matches nothing, over a log much longer than one look.

The cost of one read is counted in steps of the database, not timed. A new route, or a new filter, is asked
without an edit here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from shoal.api.app import describe_api
from shoal.api.routing import RouteDeclaration
from shoal.store import Tx
from shoal.store.tables.events import MAX_SCANNED
from tests.attacks.inventory import GUARDED, STREAMS, aimed, title
from tests.support.planes.world import ApiWorld, eventually, open_world
from tests.support.store_costs import counted_reads

ENTRIES = 15 * MAX_SCANNED
MAX_STEPS = 75 * MAX_SCANNED
"""Of one read: some 10 ms. The whole log takes several times as many."""
WHOLE = frozenset({"GET /v1/audit/verify"})
"""Reads the whole log, for admins."""
MATCHES = {"project": "vision", "after": "0", "limit": "1", "tail": "3", "points": "5", "wait_s": "0"}
"""For parameters that are no filters, or must name something that exists. Others match nothing."""
READS = [row for row in GUARDED if row.method == "GET" and row not in STREAMS and title(row) not in WHOLE]
PATHS = describe_api()["paths"]
ROLES = {"/v1/self": "job", "/v1/serving/table": "data_plane"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    def fill(tx: Tx) -> None:
        for number in range(ENTRIES):
            kind = "drill.finished" if number % 2 else "job.noted"
            place = {"project": "vision", "node": "node-1", "job_id": "job_x"}
            tx.events.append(
                kind, at=1.0, actor="user:ben", data={"drill_id": str(number), "result": None}, **place
            )

    with open_world(tmp_path_factory.mktemp("large"), is_durable=True) as world:
        world.portal.call(world.plane.core.records.store.write, fill)
        yield world


def questions(row: RouteDeclaration) -> list[dict[str, str]]:
    """Return requests with no parameter, with each parameter by itself, and with all of them."""
    parameters = PATHS[row.path][row.method.lower()].get("parameters", [])
    values = {
        parameter["name"]: _value(parameter["name"], parameter["schema"])
        for parameter in parameters
        if parameter["in"] == "query"
    }
    values.pop("cursor", None)
    each = [{name: value} for name, value in values.items()]
    both = [{"project": "vision", **parameter} for parameter in each if "project" in values]
    without_tail = {name: value for name, value in values.items() if name != "tail"}
    return [{}, *each, *both, without_tail]


def _value(name: str, schema: dict[str, Any]) -> str:
    """Return an accepted value of the parameter that matches nothing."""
    if name in MATCHES:
        return MATCHES[name]
    choices = schema.get("items", schema).get("enum")
    if choices:
        return str(choices[-1])
    kinds = {option.get("type") for option in schema.get("anyOf", [schema])}
    return "1" if kinds & {"integer", "number"} else "true" if "boolean" in kinds else "nosuch"


@pytest.mark.parametrize("row", READS, ids=title)
def test_no_read_of_a_filter_that_matches_nothing_is_long(large: ApiWorld, row: RouteDeclaration) -> None:
    target = aimed(large, row).target
    role = ROLES.get(row.path, "admin")
    for question in questions(row):
        with counted_reads() as reads:
            got = large.call("GET", f"{target}?{urlencode(question)}" if question else target, role=role)
        assert got.status in (200, 404, 422), (question, got.body)
        longest = max(reads, key=lambda read: read.num_steps, default=None)
        assert longest is None or longest.num_steps <= MAX_STEPS, f"{longest.name} for {question}"


@pytest.mark.parametrize("role", ["viewer", "reader"])
@pytest.mark.parametrize("name", ["service", "node", "job", "kind"])
def test_a_stream_that_finds_nothing_looks_at_each_entry_once(large: ApiWorld, name: str, role: str) -> None:
    """Its second turn looks at what was committed since."""
    with (
        counted_reads() as reads,
        large.stream(f"/v1/events/stream?after=0&{name}=nosuch", role=role) as stream,
    ):
        eventually(lambda: stream.status == 200)
        eventually(lambda: bool(reads) and _turns(reads) > 0 and _is_still(reads))
        reads.clear()
        large.submit("stranger", "speech")
        eventually(lambda: _turns(reads) > 0)
        assert max(read.num_steps for read in reads if read.name == "_after") < MAX_SCANNED


def _turns(reads: list[Any]) -> int:
    return sum(read.name == "_after" for read in reads)


def _is_still(reads: list[Any]) -> bool:
    """Whether the newest turn of the stream found the end of the log."""
    newest = [read for read in reads if read.name == "_after"][-1]
    return bool(newest.num_steps < MAX_SCANNED)


def test_a_page_that_looked_at_much_says_where_to_go_on(
    large: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.api.routes.events.MAX_SCANS", 2)
    page = large.call("GET", "/v1/events?after=0&kind=nosuch", role="viewer").json()
    assert page == {"items": [], "next_cursor": str(page["next_cursor"])}
    assert int(page["next_cursor"]) >= 2 * MAX_SCANNED
    pages = 1
    while page["next_cursor"] is not None:
        target = f"/v1/events?after={page['next_cursor']}&kind=nosuch"
        page = large.call("GET", target, role="viewer").json()
        pages += 1
    assert pages in range(ENTRIES // (2 * MAX_SCANNED), ENTRIES // (2 * MAX_SCANNED) + 3)


def test_the_newest_entries_are_found_however_long_ago_they_were_written(large: ApiWorld) -> None:
    entries = large.call("GET", "/v1/events?tail=2&kind=cluster.", role="admin").json()["items"]
    older = large.call("GET", "/v1/events?tail=1000&kind=member.", role="admin").json()["items"]
    assert not entries
    assert [entry["seq"] for entry in older] == sorted(entry["seq"] for entry in older)
    assert older
