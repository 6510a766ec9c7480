"""Whom a data plane lets in, how often, and what it tells the others."""

from __future__ import annotations

import json

import pytest

from shoal.serving.callers import digest_of
from shoal.serving.table import Caller, Limits
from tests.support.serving import (
    AnyLab,
    as_caller,
    callers,
    closed,
    get,
    service,
    silence,
    until,
)


class AdmissionContract:
    """Who is let in, and how much at once."""

    async def test_known_token_is_let_in_and_stays_here(self, lab: AnyLab) -> None:
        replica = await lab.replica()
        lab.serve(closed(replica))
        assert (await lab.ask(as_caller("ana"))).status == 200
        seen = replica.requests[0]
        assert (seen.all("authorization"), seen.get("x-shoal-caller")) == ([], "ana")
        assert b"token-ana" not in seen.raw_head

    async def test_token_of_shoals_making_is_known_by_what_is_stored_of_it(self, lab: AnyLab) -> None:
        token = f"shl_tok_ab12_{'0f' * 32}"
        known = Caller(digest=digest_of(token), name="ana b", project="p")
        replica = await lab.replica()
        lab.serve(closed(replica, callers=(known,)))
        assert (await lab.ask(get("/p/s/", f"Authorization: bearer  {token}"))).status == 200
        assert replica.requests[0].get("x-shoal-caller") == "ana b"
        assert (await lab.ask(get("/p/s/", f"authorization: Bearer {token[:-1]}e"))).status == 401
        assert (await lab.ask(get("/p/s/", f"authorization: Bearer {known.digest}"))).status == 401

    @pytest.mark.parametrize(
        "header",
        ["x: y", "authorization: Bearer wrong", "authorization: Basic dG9rZW4tYW5h", "authorization: Bearer"],
    )
    async def test_without_a_known_token_nobody_gets_in(self, lab: AnyLab, header: str) -> None:
        replica = await lab.replica()
        lab.serve(closed(replica))
        answer = await lab.ask(get("/p/s/", header))
        assert (answer.status, answer.get("www-authenticate")) == (401, 'Bearer realm="shoal"')
        assert (await lab.ask(get("/p/s/?token=token-ana"))).status == 401
        assert replica.requests == []

    async def test_what_is_not_there_looks_like_what_one_may_not_see(self, lab: AnyLab) -> None:
        other = await lab.replica()
        lab.serve(closed(), closed(other, name="theirs", callers=callers("eve")))
        denied = await lab.ask(as_caller("ana", "/p/theirs/"))
        unknown = await lab.ask(as_caller("ana", "/p/nothing/"))
        strangers = await lab.ask(get("/p/theirs/")), await lab.ask(get("/p/nothing/"))
        assert (denied.status, unknown.status) == (404, 404)
        assert json.loads(denied.body)["code"] == json.loads(unknown.body)["code"] == "service.unknown"
        assert strangers[0].body == strangers[1].body

    @pytest.mark.parametrize("caller", ["eve", "temp"], ids=["of another project", "of another service"])
    @pytest.mark.parametrize(
        "raw",
        [
            b"GET /p/s/ HTTP/1.1\r\nhost: a",
            b"GET /p/s HTTP/1.1\r\nhost: a",
            b"GET / HTTP/1.1\r\nhost: chat.example",
            b"GET /q/open/ HTTP/1.1\r\nhost: chat.example",
            b"GET /p/s/ HTTP/1.1\r\nhost: theirs.example\r\nx-forwarded-host: a",
            b"GET http://theirs.example/p/s/ HTTP/1.1\r\nhost: theirs.example",
            b"GET /q/open/../../p/s/ HTTP/1.1\r\nhost: a",
            b"GET /q/open/%2e%2e/%2e%2e/p/s/ HTTP/1.1\r\nhost: a",
            b"GET //p/s/ HTTP/1.1\r\nhost: a",
            b"GET /q%2fopen/p/s/ HTTP/1.1\r\nhost: a",
            b"GET /p/s/ HTTP/1.1\r\nhost: a\r\nauthorization: Bearer token-wrong",
            b"GET /p/s/ HTTP/1.1\r\nhost: a\r\nx-shoal-caller: ana\r\nx-shoal-project: p",
        ],
    )
    async def test_token_of_elsewhere_opens_no_service_by_any_way(
        self, lab: AnyLab, raw: bytes, caller: str
    ) -> None:
        ours, theirs = await lab.replica(), await lab.replica("theirs")
        lab.serve(
            closed(ours, hosts=("chat.example",)),
            closed(theirs, project="q", name="open", hosts=("theirs.example",), callers=callers("eve")),
            closed(project="p", name="other", callers=callers("temp")),
        )
        answer = await lab.ask(raw + f"\r\nauthorization: Bearer token-{caller}\r\n\r\n".encode())
        assert ours.requests == []
        if not theirs.requests:
            assert answer.status in {400, 401, 404}
        assert all(seen.get("x-shoal-caller") == "eve" for seen in theirs.requests)

    async def test_service_scaled_to_none_says_so_at_once_and_holds_nobody(self, lab: AnyLab) -> None:
        lab.serve(closed(is_off=True, queue_s=600.0, start_s=600.0))
        refused = await lab.ask(as_caller("ana"))
        told = json.loads(refused.body)
        assert (refused.status, told["code"]) == (503, "service.off")
        assert "`shoal scale p/s 1`" in told["detail"]
        assert (await lab.ask(get())).status == 401

    async def test_service_scaled_to_none_reads_no_body_and_tells_strangers_no_names(
        self, lab: AnyLab
    ) -> None:
        lab.serve(service(is_off=True, queue_s=600.0, start_s=600.0))
        refused = await lab.ask(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
        told = json.loads(refused.body)
        assert (refused.status, told["code"]) == (503, "service.off")
        assert "p/s" not in refused.body.decode()

    async def test_service_scaled_to_none_serves_with_what_is_still_there(self, lab: AnyLab) -> None:
        replica = await lab.replica()
        lab.serve(closed(replica, is_off=True))
        assert (await lab.ask(as_caller("ana"))).status == 200
        lab.serve(closed(replica.told(is_draining=True), is_off=True))
        assert (await lab.ask(as_caller("ana"))).status == 503

    async def test_refusals_are_problems_and_what_clients_of_language_models_read(self, lab: AnyLab) -> None:
        lab.serve(closed(limits=Limits(rps=0.01), is_off=True))
        answers = [
            await lab.ask(get("/p/s/v1/models")),
            await lab.ask(as_caller("ana", "/p/nothing/v1/models")),
            await lab.ask(as_caller("ana", "/p/s/v1/models")),
            await lab.ask(as_caller("ana", "/p/s/v1/models")),
        ]
        assert [answer.status for answer in answers] == [401, 404, 503, 429]
        kinds = ["authentication_error", "not_found_error", "server_error", "rate_limit_error"]
        for answer, kind in zip(answers, kinds, strict=True):
            told = json.loads(answer.body)
            error = {"message": told["detail"], "type": kind, "param": None, "code": told["code"]}
            assert told["error"] == error

    async def test_public_service_sees_what_its_callers_show_unless_that_is_a_token_of_ours(
        self, lab: AnyLab
    ) -> None:
        replica = await lab.replica()
        lab.serve(service(replica.told(secret="key")))
        for shown in ("Basic abc", "Bearer theirs", "Bearer shl_tok_1_ab", "bearer  shj_att_1_cd"):
            assert (await lab.ask(get("/p/s/", f"authorization: {shown}"))).status == 200
        passed = [seen.get("authorization") for seen in replica.requests]
        assert passed == ["Basic abc", "Bearer theirs", "", ""]
        assert {seen.get("x-shoal-secret") for seen in replica.requests} == {"key"}

    async def test_token_taken_out_of_the_table_stops_working_at_once(self, lab: AnyLab) -> None:
        replica = await lab.replica()
        lab.serve(closed(replica))
        wire = await lab.connect()
        assert (await wire.ask(as_caller("ana"))).status == 200
        lab.serve(closed(replica, callers=callers("bo", "cy")))
        assert (await wire.ask(as_caller("ana"))).status == 401
        assert (await wire.ask(as_caller("cy"))).status == 200

    async def test_caller_of_an_odd_name_is_called_by_it(self, lab: AnyLab) -> None:
        odd = 'bo\'s \\ "own" %[x]; del map # <<'
        replica = await lab.replica()
        for known in (callers("ana"), callers("ana", odd)):
            lab.serve(closed(replica, callers=known))
        token = f"authorization: Bearer token-{odd}"
        assert (await lab.ask(get("/p/s/", token))).status == 200
        assert replica.requests[0].get("x-shoal-caller") == odd

    async def test_who_guesses_tokens_is_turned_away(self, lab: AnyLab) -> None:
        lab.serve(closed(await lab.replica()))
        wire = await lab.connect()
        answers = [await wire.ask(get("/p/s/", f"authorization: Bearer guess-{n}")) for n in range(101)]
        assert [answer.status for answer in answers] == [401] * 100 + [429]
        assert (await wire.ask(as_caller("ana"))).status == 200

    async def test_requests_beyond_a_rate_are_told_when_to_come_back(self, lab: AnyLab) -> None:
        lab.serve(closed(await lab.replica(), limits=Limits(rps=0.01)))
        wire = await lab.connect()
        assert (await wire.ask(as_caller("ana"))).status == 200
        refused = await wire.ask(as_caller("ana"))
        assert (refused.status, refused.get("retry-after")) == (429, "100")
        assert json.loads(refused.body)["code"] == "limit.rps"
        assert (await wire.ask(as_caller("bo"))).status == 200

    async def test_rate_can_be_the_projects(self, lab: AnyLab) -> None:
        lab.serve(closed(await lab.replica(), limits=Limits(rps=0.01, per="project")))
        assert (await lab.ask(as_caller("ana"))).status == 200
        assert (await lab.ask(as_caller("bo"))).status == 429

    async def test_requests_at_once_are_bounded_for_each_caller(self, lab: AnyLab) -> None:
        replica = await lab.replica("one", silence)
        lab.serve(closed(replica, limits=Limits(concurrency=2)))
        first, second = await lab.connect(), await lab.connect()
        for wire in (first, second):
            await wire.send(as_caller("ana"))
        await until(lambda: len(replica.requests) == 2)
        refused = await lab.ask(as_caller("ana"))
        assert (refused.status, json.loads(refused.body)["code"]) == (429, "limit.concurrency")
        first.close()
        await until(lambda: lab.in_flight() == 1)
        third = await lab.connect()
        await third.send(as_caller("ana"))
        await until(lambda: len(replica.requests) == 3)

    async def test_refused_upload_does_not_cost_the_connection(self, lab: AnyLab) -> None:
        lab.serve(closed(await lab.replica(), limits=Limits(rps=0.01)))
        wire = await lab.connect()
        asked = as_caller("ana", method="POST", body=b"x" * 100)
        assert [(await wire.ask(asked)).status for _ in range(3)] == [200, 429, 429]

    async def test_full_queue_takes_nobody_more(self, lab: AnyLab) -> None:
        replica = await lab.replica("one", silence)
        lab.serve(service(replica, cap=1, queue_count=2))
        for _ in range(3):
            await (await lab.connect()).send(get())
        await until(lambda: lab.queued() == 2)
        refused = await lab.ask(get())
        assert (refused.status, refused.get("retry-after")) == (503, "2")
        assert lab.queued() == 2

    async def test_nobody_waits_for_a_slot_forever(self, lab: AnyLab) -> None:
        replica = await lab.replica("one", silence)
        lab.serve(service(replica, cap=1, queue_s=0.2))
        await (await lab.connect()).send(get())
        await until(lambda: replica.requests)
        refused = await lab.ask(get())
        assert (refused.status, refused.get("retry-after")) == (503, "5")
        assert len(replica.requests) == 1
