"""What is wrong with one entry of a table is the matter of that entry alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shoal.serving.report import metrics
from shoal.serving.table import Replica, Service, Table, is_address, usable
from tests.support.serving import Lab, callers, get, service

WHOLE = Replica(replica_id="whole", address="10.0.0.7:8000", release=1)


async def test_bad_entries_are_left_out_and_the_rest_is_taken_with_its_revocations(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    good = await lab.replica()
    private: dict[str, Any] = {"is_public": False, "callers": callers("ana")}
    lab.serve(service(good, **private))
    assert (await lab.ask(get("/p/s/", "authorization: Bearer token-ana"))).status == 200
    bad = Replica(replica_id="lost", address="no address", release=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            lab.serve(
                service(good, bad, **{**private, "callers": callers("bo")}),
                service(good, name="odd", affinity="colour"),
            )
    assert (await lab.ask(get("/p/s/", "authorization: Bearer token-ana"))).status == 401
    assert (await lab.ask(get("/p/s/", "authorization: Bearer token-bo"))).body == b"one"
    assert (await lab.ask(get("/p/odd/", "authorization: Bearer token-bo"))).status == 404
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 2  # once, though they came twice
    assert "`no address`" in told[0]
    assert "`colour`" in told[1]
    assert "shoal_serving_table_left_out 2" in metrics(lab.plane)
    lab.serve(service(good, **private))
    assert "shoal_serving_table_left_out 0" in metrics(lab.plane)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"address": "10.0.0.7:99999"}, "99999"),
        ({"address": "10.0.0.7:0"}, "10.0.0.7:0"),
        ({"secret": "two\r\nlines"}, "secret"),
        ({"weight": float("nan")}, "nan"),
        ({"replica_id": "whole", "address": "10.0.0.8:1"}, "twice"),
    ],
)
def test_replica_that_cannot_be_is_left_out_and_named(changes: dict[str, Any], word: str) -> None:
    known: dict[str, Any] = {"replica_id": "bad", "address": "10.0.0.7:8001", "release": 1}
    told = Service(project="p", name="s", replicas=(WHOLE, Replica(**{**known, **changes})))
    left, [fault] = usable(Table(version=3, services=(told,)))
    assert left == Table(version=3, services=(Service(project="p", name="s", replicas=(WHOLE,)),))
    assert word in fault


def test_service_that_is_there_twice_is_taken_once() -> None:
    first, second = Service(project="p", name="s", replicas=(WHOLE,)), Service(project="p", name="s")
    left, faults = usable(Table(version=3, services=(first, second)))
    assert (left.services, faults) == ((first,), ["`p/s` is there twice"])


def test_addresses_are_known_by_their_looks() -> None:
    good = ("10.0.0.7:8000", "node-1:1", "[::1]:65535", "unix:/run/a", "door:/run/a")
    bad = ("", "nonsense", "10.0.0.7", "10.0.0.7:", ":80", "a b:80", "[::1]", "::1:80", "unix:run", "h:65536")
    assert [text for text in (*good, *bad) if is_address(text)] == list(good)
