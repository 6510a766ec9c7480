"""Replicas behind sidecars, in ways that only the embedded data plane supports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from shoal.serving.table import ServingTable, is_address, usable
from tests.support.serving.data_plane_lab import (
    Conversation,
    EmbeddedLab,
    reply,
    request_bytes,
    running_lab,
    service,
    until,
)
from tests.support.serving.sidecars import SidecarAuthority, ThreadSidecars


@pytest.fixture
async def lab() -> AsyncIterator[EmbeddedLab]:
    sidecars = ThreadSidecars(SidecarAuthority())
    async with running_lab() as running:
        running.sidecars = sidecars
        yield running
    await asyncio.to_thread(sidecars.end)


async def test_request_that_met_no_server_behind_a_sidecar_goes_to_another_replica(lab: EmbeddedLab) -> None:
    """The POST is safe to send again, because nothing was sent before the sidecar's ready byte."""
    gone, other = await lab.add_replica("gone"), await lab.add_replica("other")
    await gone.stop()
    lab.serve(service(gone, other))
    for number in range(6):
        answer = await lab.ask(request_bytes(method="POST", body=b"%d" % number))
        assert (answer.status, answer.body) == (200, b"other")
    assert gone.num_connections == 0


async def test_nothing_is_sent_to_a_sidecar_with_another_replicas_certificate(lab: EmbeddedLab) -> None:
    first, second = await lab.add_replica("one"), await lab.add_replica("two")
    stolen = first.table_entry(name=second.certified_as)
    lab.serve(service(stolen, second))
    for _ in range(4):
        assert (await lab.ask(request_bytes(method="POST", body=b"x"))).body == b"two"
    assert first.num_connections == 0


async def test_nothing_is_sent_to_a_sidecar_certified_by_another_authority(lab: EmbeddedLab) -> None:
    forged = ThreadSidecars(SidecarAuthority())
    first, second = await lab.add_replica("one"), await lab.add_replica("two")
    first.address, _ = forged.start_before(first.address)
    lab.serve(service(first, second))
    for _ in range(4):
        assert (await lab.ask(request_bytes(method="POST", body=b"x"))).body == b"two"
    assert first.num_connections == 0
    await asyncio.to_thread(forged.end)


async def test_data_plane_without_tls_identity_reaches_no_sidecar(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica()
    assert lab.plane.swap(ServingTable(version=1, services=(service(replica, queue_s=0.2, start_s=0.2),)))
    assert (await lab.ask(request_bytes())).status == 503
    lab.serve(service(replica))
    assert (await lab.ask(request_bytes())).status == 200


async def test_new_tls_identity_is_used_at_once(lab: EmbeddedLab) -> None:
    assert lab.sidecars is not None
    replica = await lab.add_replica()
    lab.serve(service(replica))
    before = lab.plane.client_tls
    assert (await lab.ask(request_bytes())).status == 200
    lab.sidecars.authority.identities._data_plane_identity = None
    lab.serve(service(replica))
    assert lab.plane.client_tls not in (None, before)
    replica.requests.clear()
    next(iter(lab.plane.services.values())).replicas["one"].close_idle()
    assert (await lab.ask(request_bytes())).status == 200


async def test_reply_that_ends_with_its_connection_is_whole_only_after_a_clean_close(
    lab: EmbeddedLab,
) -> None:
    """A connection cut on the way must not turn a long reply into a shorter whole one."""

    async def ends(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        if seen.request.path == "/broken":
            seen.writer.transport.abort()
        else:
            seen.writer.close()

    lab.serve(service(await lab.add_replica("one", ends)))
    assert (await lab.ask(request_bytes("/p/s/whole"))).body == b"all of it"
    wire = await lab.connect()
    await wire.send(request_bytes("/p/s/broken"))
    with contextlib.suppress(ConnectionError):
        received = await wire.reader.read()
        assert not received.endswith(b"\r\n0\r\n\r\n"), "no end of a whole body"


async def test_caller_that_leaves_is_gone_for_the_server_behind_a_sidecar(lab: EmbeddedLab) -> None:
    async def think(seen: Conversation) -> None:
        await seen.reader.read()
        await seen.send(reply())

    replica = await lab.add_replica("one", think)
    lab.serve(service(replica))
    wire = await lab.connect()
    await wire.send(request_bytes())
    await until(lambda: replica.requests)
    wire.writer.transport.abort()
    await until(lambda: not replica._writers)


def test_only_sidecar_addresses_have_a_certificate_name() -> None:
    assert is_address("tls:10.0.0.7:19000")
    assert is_address("tls:[fd00::7]:19000")
    assert not is_address("tls:/run/x")
    entries = (("tls:10.0.0.7:19000", ""), ("10.0.0.7:19000", "x"), ("tls:10.0.0.7:19000", "x"))
    replicas = [
        {"replica_id": str(number), "address": address, "name": name, "release": 1}
        for number, (address, name) in enumerate(entries)
    ]
    table = {"version": 1, "services": [{"project": "p", "name": "s", "replicas": replicas}]}
    kept, problems = usable(msgspec.convert(table, ServingTable))
    assert [replica.replica_id for replica in kept.services[0].replicas] == ["2"]
    assert len(problems) == 2
