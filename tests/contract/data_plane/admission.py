"""Contract: which callers a data plane admits, how often, and what it replies to the others."""

from __future__ import annotations

import json

import pytest

from shoal.serving.admission.accounts import digest_of
from shoal.serving.table import AllowedCaller, CallerLimits
from tests.support.serving.data_plane_lab import (
    DataPlaneLab,
    callers,
    private_service,
    request_as,
    request_bytes,
    service,
    stay_silent,
    until,
)


class AdmissionContract:
    """Which callers are admitted, and how much at once."""

    async def test_known_token_is_admitted_and_not_passed_on(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica()
        lab.serve(private_service(replica))
        assert (await lab.ask(request_as("ana"))).status == 200
        seen = replica.requests[0]
        assert (seen.values("authorization"), seen.get("x-shoal-caller")) == ([], "ana")
        assert b"token-ana" not in seen.raw_head

    async def test_shoal_token_is_known_by_its_stored_digest(self, lab: DataPlaneLab) -> None:
        token = f"shl_tok_ab12_{'0f' * 32}"
        caller = AllowedCaller(digest=digest_of(token), name="ana b", project="p")
        replica = await lab.add_replica()
        lab.serve(private_service(replica, callers=(caller,)))
        assert (await lab.ask(request_bytes("/p/s/", f"Authorization: bearer  {token}"))).status == 200
        assert replica.requests[0].get("x-shoal-caller") == "ana b"
        assert (await lab.ask(request_bytes("/p/s/", f"authorization: Bearer {token[:-1]}e"))).status == 401
        assert (await lab.ask(request_bytes("/p/s/", f"authorization: Bearer {caller.digest}"))).status == 401

    @pytest.mark.parametrize(
        "header",
        ["x: y", "authorization: Bearer wrong", "authorization: Basic dG9rZW4tYW5h", "authorization: Bearer"],
    )
    async def test_request_without_a_known_token_is_refused(self, lab: DataPlaneLab, header: str) -> None:
        replica = await lab.add_replica()
        lab.serve(private_service(replica))
        answer = await lab.ask(request_bytes("/p/s/", header))
        assert (answer.status, answer.get("www-authenticate")) == (401, 'Bearer realm="shoal"')
        assert (await lab.ask(request_bytes("/p/s/?token=token-ana"))).status == 401
        assert replica.requests == []

    async def test_missing_service_looks_like_a_hidden_one(self, lab: DataPlaneLab) -> None:
        other = await lab.add_replica()
        lab.serve(private_service(), private_service(other, name="theirs", callers=callers("eve")))
        denied = await lab.ask(request_as("ana", "/p/theirs/"))
        unknown = await lab.ask(request_as("ana", "/p/nothing/"))
        strangers = await lab.ask(request_bytes("/p/theirs/")), await lab.ask(request_bytes("/p/nothing/"))
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
    async def test_token_of_another_service_opens_no_service(
        self, lab: DataPlaneLab, raw: bytes, caller: str
    ) -> None:
        ours, theirs = await lab.add_replica(), await lab.add_replica("theirs")
        lab.serve(
            private_service(ours, hosts=("chat.example",)),
            private_service(
                theirs, project="q", name="open", hosts=("theirs.example",), callers=callers("eve")
            ),
            private_service(project="p", name="other", callers=callers("temp")),
        )
        answer = await lab.ask(raw + f"\r\nauthorization: Bearer token-{caller}\r\n\r\n".encode())
        assert ours.requests == []
        if not theirs.requests:
            assert answer.status in {400, 401, 404}
        assert all(seen.get("x-shoal-caller") == "eve" for seen in theirs.requests)

    async def test_service_scaled_to_zero_refuses_at_once(self, lab: DataPlaneLab) -> None:
        lab.serve(private_service(is_off=True, queue_s=600.0, start_s=600.0))
        refused = await lab.ask(request_as("ana"))
        document = json.loads(refused.body)
        assert (refused.status, document["code"]) == (503, "service.off")
        assert "`shoal scale p/s 1`" in document["detail"]
        assert (await lab.ask(request_bytes())).status == 401

    async def test_service_scaled_to_zero_reads_no_body_and_hides_its_name_from_strangers(
        self, lab: DataPlaneLab
    ) -> None:
        lab.serve(service(is_off=True, queue_s=600.0, start_s=600.0))
        refused = await lab.ask(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
        document = json.loads(refused.body)
        assert (refused.status, document["code"]) == (503, "service.off")
        assert "p/s" not in refused.body.decode()

    async def test_service_scaled_to_zero_serves_with_its_remaining_replicas(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica()
        lab.serve(private_service(replica, is_off=True))
        assert (await lab.ask(request_as("ana"))).status == 200
        lab.serve(private_service(replica.table_entry(is_draining=True), is_off=True))
        assert (await lab.ask(request_as("ana"))).status == 503

    async def test_refusals_are_problem_documents_and_openai_errors(self, lab: DataPlaneLab) -> None:
        lab.serve(private_service(limits=CallerLimits(rps=0.01), is_off=True))
        answers = [
            await lab.ask(request_bytes("/p/s/v1/models")),
            await lab.ask(request_as("ana", "/p/nothing/v1/models")),
            await lab.ask(request_as("ana", "/p/s/v1/models")),
            await lab.ask(request_as("ana", "/p/s/v1/models")),
        ]
        assert [answer.status for answer in answers] == [401, 404, 503, 429]
        kinds = ["authentication_error", "not_found_error", "server_error", "rate_limit_error"]
        for answer, kind in zip(answers, kinds, strict=True):
            document = json.loads(answer.body)
            error = {"message": document["detail"], "type": kind, "param": None, "code": document["code"]}
            assert document["error"] == error

    async def test_public_service_gets_its_callers_authorization_unless_it_is_a_shoal_token(
        self, lab: DataPlaneLab
    ) -> None:
        replica = await lab.add_replica()
        lab.serve(service(replica.table_entry(secret="key")))
        for shown in ("Basic abc", "Bearer theirs", "Bearer shl_tok_1_ab", "bearer  shj_att_1_cd"):
            assert (await lab.ask(request_bytes("/p/s/", f"authorization: {shown}"))).status == 200
        passed = [seen.get("authorization") for seen in replica.requests]
        assert passed == ["Basic abc", "Bearer theirs", "", ""]
        assert {seen.get("x-shoal-secret") for seen in replica.requests} == {"key"}

    async def test_token_removed_from_the_table_stops_working_at_once(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica()
        lab.serve(private_service(replica))
        wire = await lab.connect()
        assert (await wire.ask(request_as("ana"))).status == 200
        lab.serve(private_service(replica, callers=callers("bo", "cy")))
        assert (await wire.ask(request_as("ana"))).status == 401
        assert (await wire.ask(request_as("cy"))).status == 200

    async def test_caller_with_an_odd_name_is_named_to_the_replica(self, lab: DataPlaneLab) -> None:
        odd = 'bo\'s \\ "own" %[x]; del map # <<'
        replica = await lab.add_replica()
        for allowed in (callers("ana"), callers("ana", odd)):
            lab.serve(private_service(replica, callers=allowed))
        token = f"authorization: Bearer token-{odd}"
        assert (await lab.ask(request_bytes("/p/s/", token))).status == 200
        assert replica.requests[0].get("x-shoal-caller") == odd

    async def test_address_that_guesses_tokens_is_refused(self, lab: DataPlaneLab) -> None:
        lab.serve(private_service(await lab.add_replica()))
        wire = await lab.connect()
        answers = [
            await wire.ask(request_bytes("/p/s/", f"authorization: Bearer guess-{n}")) for n in range(101)
        ]
        assert [answer.status for answer in answers] == [401] * 100 + [429]
        assert (await wire.ask(request_as("ana"))).status == 200

    async def test_requests_above_the_rate_get_retry_after(self, lab: DataPlaneLab) -> None:
        lab.serve(private_service(await lab.add_replica(), limits=CallerLimits(rps=0.01)))
        wire = await lab.connect()
        assert (await wire.ask(request_as("ana"))).status == 200
        refused = await wire.ask(request_as("ana"))
        assert (refused.status, refused.get("retry-after")) == (429, "100")
        assert json.loads(refused.body)["code"] == "limit.rps"
        assert (await wire.ask(request_as("bo"))).status == 200

    async def test_rate_limit_can_apply_to_a_whole_project(self, lab: DataPlaneLab) -> None:
        lab.serve(private_service(await lab.add_replica(), limits=CallerLimits(rps=0.01, per="project")))
        assert (await lab.ask(request_as("ana"))).status == 200
        assert (await lab.ask(request_as("bo"))).status == 429

    async def test_concurrent_requests_of_each_caller_are_bounded(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica("one", stay_silent)
        lab.serve(private_service(replica, limits=CallerLimits(concurrency=2)))
        first, second = await lab.connect(), await lab.connect()
        for wire in (first, second):
            await wire.send(request_as("ana"))
        await until(lambda: len(replica.requests) == 2)
        refused = await lab.ask(request_as("ana"))
        assert (refused.status, json.loads(refused.body)["code"]) == (429, "limit.concurrency")
        first.close()
        await until(lambda: lab.in_flight() == 1)
        third = await lab.connect()
        await third.send(request_as("ana"))
        await until(lambda: len(replica.requests) == 3)

    async def test_refused_upload_keeps_its_connection(self, lab: DataPlaneLab) -> None:
        lab.serve(private_service(await lab.add_replica(), limits=CallerLimits(rps=0.01)))
        wire = await lab.connect()
        request = request_as("ana", method="POST", body=b"x" * 100)
        assert [(await wire.ask(request)).status for _ in range(3)] == [200, 429, 429]

    async def test_full_queue_refuses_further_requests(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica("one", stay_silent)
        lab.serve(service(replica, cap=1, queue_count=2))
        for _ in range(3):
            await (await lab.connect()).send(request_bytes())
        await until(lambda: lab.queued() == 2)
        refused = await lab.ask(request_bytes())
        assert (refused.status, refused.get("retry-after")) == (503, "2")
        assert lab.queued() == 2

    async def test_wait_for_a_slot_is_limited(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica("one", stay_silent)
        lab.serve(service(replica, cap=1, queue_s=0.2))
        await (await lab.connect()).send(request_bytes())
        await until(lambda: replica.requests)
        refused = await lab.ask(request_bytes())
        assert (refused.status, refused.get("retry-after")) == (503, "5")
        assert len(replica.requests) == 1
