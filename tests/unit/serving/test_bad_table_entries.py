"""A bad entry of a table affects only itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shoal.serving.report import metrics
from shoal.serving.table import ReplicaConfig, ServiceConfig, ServingTable, is_address, usable
from tests.support.serving.data_plane_lab import EmbeddedLab, callers, request_bytes, service

WHOLE = ReplicaConfig(replica_id="whole", address="10.0.0.7:8000", release=1)


async def test_bad_entries_are_left_out_and_revocations_still_take_effect(
    lab: EmbeddedLab, caplog: pytest.LogCaptureFixture
) -> None:
    good = await lab.add_replica()
    private: dict[str, Any] = {"is_public": False, "callers": callers("ana")}
    lab.serve(service(good, **private))
    assert (await lab.ask(request_bytes("/p/s/", "authorization: Bearer token-ana"))).status == 200
    bad = ReplicaConfig(replica_id="lost", address="no address", release=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            lab.serve(
                service(good, bad, **{**private, "callers": callers("bo")}),
                service(good, name="odd", affinity="colour"),
            )
    assert (await lab.ask(request_bytes("/p/s/", "authorization: Bearer token-ana"))).status == 401
    assert (await lab.ask(request_bytes("/p/s/", "authorization: Bearer token-bo"))).body == b"one"
    assert (await lab.ask(request_bytes("/p/odd/", "authorization: Bearer token-bo"))).status == 404
    messages = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(messages) == 2  # each is logged once, although both came twice
    assert "`no address`" in messages[0]
    assert "`colour`" in messages[1]
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
def test_invalid_replica_is_left_out_and_named(changes: dict[str, Any], word: str) -> None:
    fields: dict[str, Any] = {"replica_id": "bad", "address": "10.0.0.7:8001", "release": 1}
    config = ServiceConfig(project="p", name="s", replicas=(WHOLE, ReplicaConfig(**{**fields, **changes})))
    left, [fault] = usable(ServingTable(version=3, services=(config,)))
    assert left == ServingTable(
        version=3, services=(ServiceConfig(project="p", name="s", replicas=(WHOLE,)),)
    )
    assert word in fault


def test_service_listed_twice_is_taken_once() -> None:
    first, second = (
        ServiceConfig(project="p", name="s", replicas=(WHOLE,)),
        ServiceConfig(project="p", name="s"),
    )
    left, faults = usable(ServingTable(version=3, services=(first, second)))
    assert (left.services, faults) == ((first,), ["`p/s` is there twice"])


def test_addresses_are_validated_by_their_form() -> None:
    good = ("10.0.0.7:8000", "node-1:1", "[::1]:65535", "unix:/run/a", "broker:/run/a")
    bad = ("", "nonsense", "10.0.0.7", "10.0.0.7:", ":80", "a b:80", "[::1]", "::1:80", "unix:run", "h:65536")
    assert [text for text in (*good, *bad) if is_address(text)] == list(good)
