"""Replicas that fail, fill up, come and go: no request is lost that need not be."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic

import pytest

from shoal.serving.checks import check
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


def outstanding(lab: Lab) -> list[int]:
    return [live.outstanding for live in lab.plane.services["p", "s"].replicas.values()]


async def test_safe_request_is_sent_again_to_another_replica(lab: Lab) -> None:
    lab.serve(service(await lab.replica("bad", hang_up), await lab.replica("good")))
    assert {(await lab.ask(get())).body for _ in range(6)} == {b"good"}
    assert outstanding(lab) == [0, 0]


async def test_request_with_an_effect_is_never_sent_twice(lab: Lab) -> None:
    bad = await lab.replica("bad", hang_up)
    lab.serve(service(bad))
    answer = await lab.ask(get(method="POST", body=b"x"))
    assert (answer.status, len(bad.requests)) == (502, 1)
    assert b"may have had an effect" in answer.body


async def test_request_with_an_idempotency_key_is_sent_again_with_its_body(lab: Lab) -> None:
    async def echo(seen: Conversation) -> None:
        await seen.send(reply(await seen.body()))

    lab.serve(service(await lab.replica("bad", hang_up), await lab.replica("good", echo)))
    for _ in range(4):
        answer = await lab.ask(get("/p/s/", "idempotency-key: 7", method="POST", body=b"hello"))
        assert (answer.status, answer.body) == (200, b"hello")


async def test_replica_that_is_gone_costs_no_request_of_any_kind(lab: Lab) -> None:
    gone, good = await lab.replica("gone"), await lab.replica("good")
    lab.serve(service(gone, good))
    await gone.stop()
    answers = [await lab.ask(get(method="POST", body=b"x")) for _ in range(10)]
    assert {answer.body for answer in answers} == {b"good"}


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


async def test_error_of_the_program_itself_is_no_reason_to_leave_it_alone(lab: Lab) -> None:
    async def broken(seen: Conversation) -> None:
        await seen.send(reply(b"trace", "500 Internal Server Error"))

    bad = await lab.replica("bad", broken)
    lab.serve(service(bad, await lab.replica("good")))
    for _ in range(40):
        await lab.ask(get())
    assert len(bad.requests) == 20
    assert lab.plane.services["p", "s"].tallies[1].errors == 20


async def test_replica_that_fails_its_check_gets_nothing_until_it_passes(lab: Lab) -> None:
    is_well = asyncio.Event()

    async def sick(seen: Conversation) -> None:
        is_check = seen.request.path == "/healthz"
        status = "200 OK" if is_well.is_set() or not is_check else "500 Sick"
        await seen.send(reply(seen.replica.name.encode(), status))

    sick_one = await lab.replica("sick", sick)
    lab.serve(service(sick_one.told(secret="k"), await lab.replica("good"), check="/healthz"))
    live = lab.plane.services["p", "s"]
    await until(lambda: len(live.open) == 1)
    assert {(await lab.ask(get())).body for _ in range(4)} == {b"good"}
    assert {seen.get("x-shoal-secret") for seen in sick_one.requests} == {"k"}
    is_well.set()
    await until(lambda: len(live.open) == 2)


async def test_connection_of_a_check_is_given_to_no_request(lab: Lab) -> None:
    replica = await lab.replica()
    lab.serve(service(replica, check="/health"))
    live = lab.plane.services["p", "s"]
    [seen] = live.replicas.values()
    await check(live, seen)
    assert [request.path for request in replica.requests] == ["/health"]
    assert seen.idle == []


async def test_what_exceeds_the_cap_waits_here_and_is_bound_late(lab: Lab) -> None:
    gates = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def slow(seen: Conversation) -> None:
        await gates[seen.replica.name].wait()
        await seen.send(reply(seen.replica.name.encode()))

    a, b = await lab.replica("a", slow), await lab.replica("b", slow)
    lab.serve(service(a, b, cap=1))
    asked = [asyncio.ensure_future(lab.ask(get())) for _ in range(10)]
    await until(lambda: lab.plane.services["p", "s"].waiting.count == 8)
    assert (len(a.requests), len(b.requests)) == (1, 1)
    gates["b"].set()
    await until(lambda: sum(one.done() for one in asked) == 9)
    assert (len(a.requests), len(b.requests)) == (1, 9)
    gates["a"].set()
    assert Counter([(await one).body for one in asked]) == {b"a": 1, b"b": 9}


async def test_canary_gets_its_share_and_its_own_counts(lab: Lab) -> None:
    old, new = await lab.replica("old"), await lab.replica("new", release=2)
    lab.serve(service(old, new, shares={1: 0.9, 2: 0.1}))
    for _ in range(50):
        await lab.ask(get())
    assert (len(old.requests), len(new.requests)) == (45, 5)
    tallies = lab.plane.services["p", "s"].tallies
    assert (tallies[1].requests, tallies[2].requests) == (45, 5)


async def test_share_of_a_release_without_replicas_goes_to_the_others(lab: Lab) -> None:
    old = await lab.replica("old")
    lab.serve(service(old, shares={1: 0.5, 2: 0.5}))
    assert {(await lab.ask(get())).status for _ in range(10)} == {200}


@pytest.mark.parametrize(
    "told,header", [("header:x-session", "x-session: {}"), ("cookie:sid", "cookie: a=b; sid={}")]
)
async def test_session_stays_at_its_replica(lab: Lab, told: str, header: str) -> None:
    replicas = [await lab.replica(name) for name in "abcd"]
    lab.serve(service(*replicas, affinity=told))
    homes = {n: (await lab.ask(get("/p/s/", header.format(n)))).body for n in range(12)}
    assert len(set(homes.values())) > 1
    assert {n: (await lab.ask(get("/p/s/", header.format(n)))).body for n in homes} == homes


async def test_replica_that_drains_finishes_what_it_has_and_gets_nothing_new(lab: Lab) -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(reply(b"old"))

    old, new = await lab.replica("old", slow), await lab.replica("new")
    lab.serve(service(old))
    asked = asyncio.ensure_future(lab.ask(get()))
    await until(lambda: old.requests)
    lab.serve(service(old.told(is_draining=True), new))
    assert {(await lab.ask(get())).body for _ in range(5)} == {b"new"}
    gate.set()
    assert (await asked).body == b"old"


async def test_caller_who_leaves_cancels_the_work_it_asked_for(lab: Lab) -> None:
    replica = await lab.replica("one", silence)
    lab.serve(service(replica, cap=1))
    wire = await lab.connect()
    await wire.send(get())
    await until(lambda: replica.requests)
    waiting = await lab.connect()
    await waiting.send(get())
    await until(lambda: lab.plane.services["p", "s"].waiting.count)
    waiting.close()
    await until(lambda: not lab.plane.services["p", "s"].waiting.count)
    wire.close()
    await until(lambda: outstanding(lab) == [0])
    assert lab.plane.services["p", "s"].accounts["127.0.0.1"].admitted == 0


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
