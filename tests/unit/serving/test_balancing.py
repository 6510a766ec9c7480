"""Replicas that fail, fill up, come and go: no request is lost that need not be."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic

import pytest

from shoal.serving.checks import check
from shoal.serving.prompt import ask_of
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


async def test_many_replicas_gone_at_once_cost_no_request(lab: Lab) -> None:
    replicas = [await lab.replica(f"r{number}") for number in range(12)]
    lab.serve(service(*replicas))
    for gone in replicas[1:]:
        await gone.stop()
    assert (await lab.ask(get(method="POST", body=b"x"))).body == b"r0"


async def test_every_safe_request_in_a_replica_that_dies_is_sent_again(lab: Lab) -> None:
    async def hold(seen: Conversation) -> None:
        await seen.reader.read()  # until the connection ends

    dying = await lab.replica("dying", hold)
    lab.serve(service(dying, cap=200))
    asked = [asyncio.ensure_future(lab.ask(get())) for _ in range(150)]
    await until(lambda: len(dying.requests) == 150)
    lab.serve(service(dying, await lab.replica("good"), cap=200))
    await dying.stop()
    assert {answer.body for answer in await asyncio.gather(*asked)} == {b"good"}


async def test_requests_wait_for_the_only_replica_to_come_back(lab: Lab) -> None:
    gone = await lab.replica("gone")
    lab.serve(service(gone))
    await gone.stop()
    asked = asyncio.ensure_future(lab.ask(get(method="POST", body=b"x")))
    await until(lambda: lab.plane.services["p", "s"].waiting.count)
    back = await FakeReplica("back").start(port=gone.port)
    lab.replicas.append(back)
    assert (await asked).body == b"back"


async def test_get_of_the_only_replica_waits_for_it_though_idle_connections_to_it_died_too(lab: Lab) -> None:
    gone = await lab.replica("gone")
    lab.serve(service(gone))
    await asyncio.gather(*(lab.ask(get()) for _ in range(4)))
    live = lab.plane.services["p", "s"].replicas["gone"]
    await until(lambda: len(live.idle) >= 2)
    assert gone._server is not None
    gone._server.close()
    gone.behaviour = hang_up  # each of its connections ends when it is used
    asked = asyncio.ensure_future(lab.ask(get()))
    await until(lambda: lab.plane.services["p", "s"].waiting.count)
    lab.replicas.append(await FakeReplica("back").start(port=gone.port))
    assert (await asked).body == b"back"


async def test_lost_get_is_not_said_to_have_had_an_effect(lab: Lab) -> None:
    lab.serve(service(await lab.replica("bad", hang_up)))
    told = await lab.ask(get())
    assert (told.status, b"tried 2 times" in told.body, b"an effect" in told.body) == (502, True, False)
    posted = await lab.ask(get(method="POST", body=b"x"))
    assert (posted.status, b"an effect" in posted.body) == (502, True)


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


async def test_connection_of_a_check_is_given_to_no_request(lab: Lab) -> None:
    replica = await lab.replica()
    lab.serve(service(replica, check="/health"))
    live = lab.plane.services["p", "s"]
    [seen] = live.replicas.values()
    await check(live, seen)
    assert [request.path for request in replica.requests] == ["/health"]
    assert seen.idle == []


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


@pytest.mark.parametrize("body", [b'{"other": ' + b"[" * 100_000, b'{"model": "\xff", "\xff": 1}', b"\xff"])
def test_body_that_is_no_prompt_is_the_replicas_to_refuse(body: bytes) -> None:
    assert ask_of(b"session", body).affinity == b"session"
