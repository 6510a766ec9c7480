"""Replicas that fail, fill up, come and go: no request is lost that need not be."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic

from shoal.serving.sweep import sweep
from shoal.serving.table import Balance
from tests.support.serving import Conversation, FakeReplica, Lab, get, reply, service, until


async def hang_up(seen: Conversation) -> None:
    seen.writer.transport.abort()


async def silence(seen: Conversation) -> None:
    await seen.reader.read()


async def busy(seen: Conversation) -> None:
    await seen.body()
    await seen.send(reply(b"no", "503 Service Unavailable"))


async def test_requests_wait_for_the_only_replica_to_come_back(lab: Lab) -> None:
    gone = await lab.replica("gone")
    lab.serve(service(gone))
    await gone.stop()
    asked = asyncio.ensure_future(lab.ask(get(method="POST", body=b"x")))
    await until(lambda: lab.plane.services["p", "s"].waiting.count)
    back = await FakeReplica("back").start(port=gone.port)
    lab.replicas.append(back)
    assert (await asked).body == b"back"


async def test_retries_are_bounded_by_number_and_by_budget(lab: Lab) -> None:
    bad = await lab.replica("bad", hang_up)
    lab.serve(service(bad, retries=2))
    assert (await lab.ask(get())).status == 502
    assert len(bad.requests) == 3
    lab.plane.services["p", "s"]._retries = 0.0
    assert (await lab.ask(get())).status == 502
    assert len(bad.requests) == 4


async def test_replica_that_answers_busy_again_and_again_is_left_alone_for_a_while(lab: Lab) -> None:
    bad, good = await lab.replica("bad", busy), await lab.replica("good")
    lab.serve(service(bad, good))
    statuses = Counter([(await lab.ask(get())).status for _ in range(40)])
    assert statuses == {503: 5, 200: 35}
    sweep(lab.plane, monotonic() + 10.0)
    assert len(lab.plane.services["p", "s"].open) == 2


async def test_when_most_seem_bad_all_are_used(lab: Lab) -> None:
    lab.serve(
        service(await lab.replica("a", busy), await lab.replica("b", busy), await lab.replica("c", busy))
    )
    for _ in range(40):
        assert (await lab.ask(get())).status == 503
    assert len(lab.plane.services["p", "s"].open) >= 2


async def test_silence_of_a_replica_ends_with_a_504(lab: Lab) -> None:
    replica = await lab.replica("one", silence)
    lab.serve(service(replica, timeout_s=50.0))
    asked = asyncio.ensure_future(lab.ask(get()))
    await until(lambda: replica.requests)
    sweep(lab.plane, monotonic() + 49.0)
    assert not asked.done()
    sweep(lab.plane, monotonic() + 51.0)
    assert (await asked).status == 504


async def test_language_model_gets_conversations_back(lab: Lab) -> None:
    replicas = [await lab.replica(name) for name in "abcd"]
    lab.serve(service(*replicas, balance=Balance.TOKENS))
    system = b"you are a helpful assistant " * 200

    def turn(text: bytes) -> bytes:
        body = b'{"messages": [{"role": "system", "content": "%b"}]}' % (system + text)
        return get("/p/s/v1/chat/completions", method="POST", body=body)

    home = (await lab.ask(turn(b""))).body
    assert {(await lab.ask(turn(b"%d" % n))).body for n in range(10)} == {home}
    assert all(live.prefill_tokens == 0 for live in lab.plane.services["p", "s"].replicas.values())


async def test_turns_go_on_where_they_were_when_a_new_table_comes(lab: Lab) -> None:
    replicas = [await lab.replica(name) for name in "abcd"]
    lab.serve(service(*replicas))
    for _ in range(100):
        await lab.ask(get())
    lab.serve(service(*replicas, cap=7))
    for _ in range(100):
        await lab.ask(get())
    assert [len(replica.requests) for replica in replicas] == [50, 50, 50, 50]
