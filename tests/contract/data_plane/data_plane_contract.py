"""Contract: which replica a data plane picks for a request, and what it does when a replica fails or is
silent.

The contract is what callers and replicas see of any data plane. Each data plane adds a fixture.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from tests.contract.data_plane.admission import AdmissionContract
from tests.contract.data_plane.path import PathContract
from tests.support.serving.data_plane_lab import (
    Conversation,
    DataPlaneLab,
    hang_up,
    reply,
    request_bytes,
    service,
    stay_silent,
    until,
)


class ReplicasContract:
    """Replicas that fail, fill up, come and go."""

    async def test_safe_request_is_sent_again_to_another_replica(self, lab: DataPlaneLab) -> None:
        lab.serve(service(await lab.add_replica("bad", hang_up), await lab.add_replica("good")))
        assert {(await lab.ask(request_bytes())).body for _ in range(6)} == {b"good"}
        await until(lambda: lab.in_flight() == 0)

    async def test_request_with_an_effect_is_never_sent_twice(self, lab: DataPlaneLab) -> None:
        bad = await lab.add_replica("bad", hang_up)
        lab.serve(service(bad))
        answer = await lab.ask(request_bytes(method="POST", body=b"x"))
        assert (answer.status, len(bad.requests)) == (502, 1)
        assert b"may have had an effect" in answer.body
        await until(lambda: [(c.requests, c.errors) for c in lab.report().counts if c.release] == [(1, 1)])

    async def test_request_with_an_idempotency_key_is_sent_again_with_its_body(
        self, lab: DataPlaneLab
    ) -> None:
        async def echo(seen: Conversation) -> None:
            await seen.send(reply(await seen.body()))

        lab.serve(service(await lab.add_replica("bad", hang_up), await lab.add_replica("good", echo)))
        for _ in range(4):
            answer = await lab.ask(request_bytes("/p/s/", "idempotency-key: 7", method="POST", body=b"hello"))
            assert (answer.status, answer.body) == (200, b"hello")

    async def test_request_to_a_repeatable_service_is_sent_again_whatever_it_is(
        self, lab: DataPlaneLab
    ) -> None:
        bad, good = await lab.add_replica("bad", hang_up), await lab.add_replica("good")
        lab.serve(service(bad, good, is_repeatable=True))
        answers = [await lab.ask(request_bytes(method="POST", body=b"x")) for _ in range(4)]
        assert {answer.body for answer in answers} == {b"good"}
        assert bad.requests

    async def test_replica_that_is_gone_costs_no_request_of_any_kind(self, lab: DataPlaneLab) -> None:
        gone, good = await lab.add_replica("gone"), await lab.add_replica("good")
        lab.serve(service(gone, good))
        await gone.stop()
        answers = [await lab.ask(request_bytes(method="POST", body=b"x")) for _ in range(10)]
        assert {answer.body for answer in answers} == {b"good"}

    async def test_retries_are_bounded_by_number(self, lab: DataPlaneLab) -> None:
        bad = await lab.add_replica("bad", hang_up)
        lab.serve(service(bad, retries=2))
        assert (await lab.ask(request_bytes())).status == 502
        assert len(bad.requests) == 3

    async def test_without_retries_nothing_is_sent_again(self, lab: DataPlaneLab) -> None:
        bad = await lab.add_replica("bad", hang_up)
        lab.serve(service(bad, retries=0))
        assert (await lab.ask(request_bytes())).status == 502
        assert len(bad.requests) == 1

    async def test_error_500_of_the_program_does_not_eject_its_replica(self, lab: DataPlaneLab) -> None:
        async def broken(seen: Conversation) -> None:
            await seen.send(reply(b"trace", "500 Internal Server Error"))

        bad = await lab.add_replica("bad", broken)
        lab.serve(service(bad, await lab.add_replica("good")))
        for _ in range(40):
            await lab.ask(request_bytes())
        # About half of them: on a busy machine a check may be late.
        assert abs(len(bad.requests) - 20) <= 2
        await until(lambda: sum(count.errors for count in lab.report().counts) == len(bad.requests))

    async def test_replica_that_fails_its_check_gets_nothing_until_it_passes(self, lab: DataPlaneLab) -> None:
        is_well = asyncio.Event()

        async def sick(seen: Conversation) -> None:
            is_check = seen.request.path == "/healthz"
            status = "200 OK" if is_well.is_set() or not is_check else "500 Sick"
            await seen.send(reply(seen.replica.name.encode(), status))

        sick_one, good = await lab.add_replica("sick", sick), await lab.add_replica("good")
        lab.serve(service(sick_one.table_entry(secret="k"), good.table_entry(secret="l"), check="/healthz"))

        def ejected() -> set[str]:
            return {health.replica_id for health in lab.report().health if health.is_ejected}

        await until(lambda: ejected() == {"sick"})
        assert {(await lab.ask(request_bytes())).body for _ in range(4)} == {b"good"}
        assert {seen.get("x-shoal-secret") for seen in sick_one.requests} == {"k"}
        is_well.set()
        await until(lambda: not ejected())

    async def test_requests_above_the_cap_wait_and_are_bound_late(self, lab: DataPlaneLab) -> None:
        gates = {"a": asyncio.Event(), "b": asyncio.Event()}

        async def slow(seen: Conversation) -> None:
            await gates[seen.replica.name].wait()
            await seen.send(reply(seen.replica.name.encode()))

        a, b = await lab.add_replica("a", slow), await lab.add_replica("b", slow)
        lab.serve(service(a, b, cap=1))
        requests = [asyncio.ensure_future(lab.ask(request_bytes())) for _ in range(10)]
        await until(lambda: (lab.queued(), len(a.requests), len(b.requests)) == (8, 1, 1))
        gates["b"].set()
        await until(lambda: sum(request.done() for request in requests) == 9)
        assert (len(a.requests), len(b.requests)) == (1, 9)
        gates["a"].set()
        assert Counter([(await request).body for request in requests]) == {b"a": 1, b"b": 9}

    async def test_canary_gets_its_share_and_its_own_counts(self, lab: DataPlaneLab) -> None:
        old, new = await lab.add_replica("old"), await lab.add_replica("new", release=2)
        lab.serve(service(old, new, shares={1: 0.9, 2: 0.1}))
        for _ in range(50):
            await lab.ask(request_bytes())
        assert (len(old.requests), len(new.requests)) == (45, 5)

        def counts() -> dict[int, int]:
            return {count.release: count.requests for count in lab.report().counts if count.release}

        await until(lambda: counts() == {1: 45, 2: 5})

    async def test_share_of_a_release_without_replicas_goes_to_the_others(self, lab: DataPlaneLab) -> None:
        old = await lab.add_replica("old")
        lab.serve(service(old, shares={1: 0.5, 2: 0.5}))
        assert {(await lab.ask(request_bytes())).status for _ in range(10)} == {200}

    @pytest.mark.parametrize(
        "affinity,header", [("header:x-session", "x-session: {}"), ("cookie:sid", "cookie: a=b; sid={}")]
    )
    async def test_session_stays_at_its_replica(self, lab: DataPlaneLab, affinity: str, header: str) -> None:
        replicas = [await lab.add_replica(name) for name in "abcd"]
        lab.serve(service(*replicas, affinity=affinity))
        homes = {n: (await lab.ask(request_bytes("/p/s/", header.format(n)))).body for n in range(12)}
        assert len(set(homes.values())) > 1
        assert {n: (await lab.ask(request_bytes("/p/s/", header.format(n)))).body for n in homes} == homes

    async def test_request_that_waits_for_its_own_replica_is_counted(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica("one", stay_silent)
        lab.serve(service(replica, cap=1, affinity="header:x-session"))
        for _ in range(3):
            await (await lab.connect()).send(request_bytes("/p/s/", "x-session: 1"))
        await until(lambda: (lab.in_flight(), lab.queued()) == (1, 2))

    async def test_new_replica_is_used_and_a_removed_one_is_not(self, lab: DataPlaneLab) -> None:
        first = await lab.add_replica("first")
        lab.serve(service(first))
        assert (await lab.ask(request_bytes())).body == b"first"
        second = await lab.add_replica("second")
        lab.serve(service(first, second))
        assert {(await lab.ask(request_bytes())).body for _ in range(4)} == {b"first", b"second"}
        lab.serve(service(second))
        assert {(await lab.ask(request_bytes())).body for _ in range(4)} == {b"second"}
        lab.serve(service(first, second))
        assert {(await lab.ask(request_bytes())).body for _ in range(4)} == {b"first", b"second"}

    async def test_draining_replica_finishes_its_requests_and_gets_no_new_ones(
        self, lab: DataPlaneLab
    ) -> None:
        gate = asyncio.Event()

        async def slow(seen: Conversation) -> None:
            await gate.wait()
            await seen.send(reply(b"old"))

        old, new = await lab.add_replica("old", slow), await lab.add_replica("new")
        lab.serve(service(old))
        pending = asyncio.ensure_future(lab.ask(request_bytes()))
        await until(lambda: old.requests)
        lab.serve(service(old.table_entry(is_draining=True), new))
        assert {(await lab.ask(request_bytes())).body for _ in range(5)} == {b"new"}

        def in_flight() -> dict[str, int]:
            return {health.replica_id: health.in_flight for health in lab.report().health}

        await until(lambda: in_flight() == {"old": 1, "new": 0})
        gate.set()
        assert (await pending).body == b"old"
        await until(lambda: lab.in_flight() == 0)

    async def test_caller_that_leaves_cancels_its_request_in_the_replica(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica("one", stay_silent)
        lab.serve(service(replica, cap=1))
        wire = await lab.connect()
        await wire.send(request_bytes())
        await until(lambda: replica.requests)
        waiting = await lab.connect()
        await waiting.send(request_bytes())
        await until(lambda: lab.queued() == 1)
        waiting.close()
        await until(lambda: lab.queued() == 0)
        wire.close()
        await until(lambda: lab.in_flight() == 0)
        assert len(replica.requests) == 1

    async def test_silence_of_a_replica_ends_with_a_504(self, lab: DataPlaneLab) -> None:
        lab.serve(service(await lab.add_replica("one", stay_silent), timeout_s=0.5))
        answer = await lab.ask(request_bytes())
        assert (answer.status, json.loads(answer.body)["code"]) == (504, "replica.late")


class DataPlaneContract(PathContract, AdmissionContract, ReplicasContract):
    """The whole contract of a data plane."""
