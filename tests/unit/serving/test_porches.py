"""Replicas behind porches, as the embedded data plane alone treats them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from shoal.serving.table import Table, is_address, usable
from tests.support.porches import Cluster, ThreadPorches
from tests.support.serving import Conversation, Lab, get, reply, running_lab, service, until


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    porches = ThreadPorches(Cluster())
    async with running_lab() as made:
        made.porches = porches
        yield made
    await asyncio.to_thread(porches.end)


async def test_a_request_that_met_no_server_behind_a_porch_goes_to_another_replica(lab: Lab) -> None:
    """Though it is a POST: nothing of it was sent before the porch said that the server is there."""
    gone, other = await lab.replica("gone"), await lab.replica("other")
    await gone.stop()
    lab.serve(service(gone, other))
    for number in range(6):
        answer = await lab.ask(get(method="POST", body=b"%d" % number))
        assert (answer.status, answer.body) == (200, b"other")
    assert gone.connections == 0


async def test_nothing_is_sent_to_a_porch_that_is_certified_for_another_replica(lab: Lab) -> None:
    one, two = await lab.replica("one"), await lab.replica("two")
    stolen = one.told(name=two.certified_as)
    lab.serve(service(stolen, two))
    for _ in range(4):
        assert (await lab.ask(get(method="POST", body=b"x"))).body == b"two"
    assert one.connections == 0


async def test_nothing_is_sent_to_somebody_whom_another_authority_certified(lab: Lab) -> None:
    forged = ThreadPorches(Cluster())
    one, two = await lab.replica("one"), await lab.replica("two")
    one.address, _ = forged.before(one.address)
    lab.serve(service(one, two))
    for _ in range(4):
        assert (await lab.ask(get(method="POST", body=b"x"))).body == b"two"
    assert one.connections == 0
    await asyncio.to_thread(forged.end)


async def test_a_data_plane_without_papers_comes_to_no_porch(lab: Lab) -> None:
    replica = await lab.replica()
    assert lab.plane.swap(Table(version=1, services=(service(replica, queue_s=0.2, start_s=0.2),)))
    assert (await lab.ask(get())).status == 503
    lab.serve(service(replica))
    assert (await lab.ask(get())).status == 200


async def test_new_papers_are_shown_from_then_on(lab: Lab) -> None:
    assert lab.porches is not None
    replica = await lab.replica()
    lab.serve(service(replica))
    before = lab.plane.visitor
    assert (await lab.ask(get())).status == 200
    lab.porches.cluster.porches._shown = None
    lab.serve(service(replica))
    assert lab.plane.visitor not in (None, before)
    replica.requests.clear()
    next(iter(lab.plane.services.values())).replicas["one"].close_idle()
    assert (await lab.ask(get())).status == 200


async def test_a_body_until_the_end_is_whole_only_with_the_end(lab: Lab) -> None:
    """Who cuts the connection in between must not make a shorter answer of it."""

    async def ends(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        if seen.request.path == "/broken":
            seen.writer.transport.abort()
        else:
            seen.writer.close()

    lab.serve(service(await lab.replica("one", ends)))
    assert (await lab.ask(get("/p/s/whole"))).body == b"all of it"
    wire = await lab.connect()
    await wire.send(get("/p/s/broken"))
    with contextlib.suppress(ConnectionError):
        told = await wire.reader.read()
        assert not told.endswith(b"\r\n0\r\n\r\n"), "no end of a whole body"


async def test_a_caller_that_leaves_is_gone_for_the_server_too(lab: Lab) -> None:
    async def think(seen: Conversation) -> None:
        await seen.reader.read()
        await seen.send(reply())

    replica = await lab.replica("one", think)
    lab.serve(service(replica))
    wire = await lab.connect()
    await wire.send(get())
    await until(lambda: replica.requests)
    wire.writer.transport.abort()
    await until(lambda: not replica._writers)


def test_an_address_of_a_porch_has_a_name_to_go_by_and_no_other_has_one() -> None:
    assert is_address("tls:10.0.0.7:19000")
    assert is_address("tls:[fd00::7]:19000")
    assert not is_address("tls:/run/x")
    entries = (("tls:10.0.0.7:19000", ""), ("10.0.0.7:19000", "x"), ("tls:10.0.0.7:19000", "x"))
    made = [
        {"replica_id": str(number), "address": address, "name": name, "release": 1}
        for number, (address, name) in enumerate(entries)
    ]
    told = {"version": 1, "services": [{"project": "p", "name": "s", "replicas": made}]}
    kept, found = usable(msgspec.convert(told, Table))
    assert [one.replica_id for one in kept.services[0].replicas] == ["2"]
    assert len(found) == 2
