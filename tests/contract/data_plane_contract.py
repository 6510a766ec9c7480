"""What callers and replicas see of a data plane, whichever it is. Each adds a fixture."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from shoal.serving.callers import digest_of
from shoal.serving.table import Caller, Limits
from tests.support.serving import (
    AnyLab,
    Conversation,
    as_caller,
    callers,
    closed,
    get,
    reply,
    service,
    until,
)


async def hang_up(seen: Conversation) -> None:
    seen.writer.transport.abort()


async def silence(seen: Conversation) -> None:
    await seen.reader.read()


class PathContract:
    """Requests find their way to replicas and answers back, whatever their shape."""

    async def test_path_loses_its_prefix_and_keeps_its_query(self, lab: AnyLab) -> None:
        replica = await lab.replica()
        lab.serve(service(replica))
        answer = await lab.ask(get("/p/s/a/b?x=1&y=%20"))
        assert (answer.status, answer.body) == (200, b"one")
        assert replica.requests[0].first == "GET /a/b?x=1&y=%20 HTTP/1.1"

    @pytest.mark.parametrize(
        "path,seen",
        [("/p/s", "/"), ("/p/s?x", "/?x"), ("/p/s//a", "//a"), ("/p/s/", "/"), ("/p/s/p/s/", "/p/s/")],
    )
    async def test_service_itself_is_the_replicas_root(self, lab: AnyLab, path: str, seen: str) -> None:
        replica = await lab.replica()
        lab.serve(service(replica))
        assert (await lab.ask(get(path))).status == 200
        assert replica.requests[0].path == seen

    async def test_host_alone_names_a_service_whatever_its_port_and_case(self, lab: AnyLab) -> None:
        replica = await lab.replica()
        lab.serve(service(replica, hosts=("chat.example",)))
        wire = await lab.connect()
        answer = await wire.ask(b"GET /v1/x HTTP/1.1\r\nHost: Chat.Example:8443\r\n\r\n")
        assert answer.status == 200
        assert replica.requests[0].path == "/v1/x"

    @pytest.mark.parametrize("path", ["/p/s/../t", "/p/s/%2e%2E/t", "/p/s/./a", "/p/s/.."])
    async def test_path_that_could_mean_another_is_refused(self, lab: AnyLab, path: str) -> None:
        replica = await lab.replica()
        lab.serve(service(replica))
        assert (await lab.ask(get(path))).status == 400
        assert replica.requests == []

    @pytest.mark.parametrize(
        "raw",
        [
            b"GET /p/s/ HTTP/1.1\r\n\r\n",
            b"GET /p/s/ HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
            b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
            b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\nx",
            b"GET /p/s/ HTTP/1.1\r\nhost: a\r\nno colon\r\n\r\n",
            b"GET /p/s/ HTTP/1.1\r\nhost : a\r\n\r\n",
        ],
    )
    async def test_request_of_more_than_one_meaning_is_refused(self, lab: AnyLab, raw: bytes) -> None:
        replica = await lab.replica()
        lab.serve(service(replica))
        assert (await lab.ask(raw)).status == 400
        assert replica.requests == []

    async def test_many_requests_take_one_connection_on_each_side(self, lab: AnyLab) -> None:
        async def peer(seen: Conversation) -> None:
            await seen.send(reply(str(seen.writer.get_extra_info("peername")[1]).encode()))

        lab.serve(service(await lab.replica("one", peer)))
        wire = await lab.connect()
        assert len({(await wire.ask(get())).body for _ in range(20)}) == 1

    async def test_requests_sent_ahead_are_answered_in_their_order(self, lab: AnyLab) -> None:
        async def echo(seen: Conversation) -> None:
            body = await seen.body()
            await seen.send(reply(seen.request.path.encode() + body))

        lab.serve(service(await lab.replica("one", echo)))
        wire = await lab.connect()
        await wire.send(b"".join(get(f"/p/s/{n}", method="POST", body=b"x" * n) for n in range(10)))
        answers = [(await wire.receive()).body for _ in range(10)]
        assert answers == [f"/{n}".encode() + b"x" * n for n in range(10)]

    async def test_headers_between_neighbours_end_here_and_ours_cannot_be_forged(self, lab: AnyLab) -> None:
        async def rude(seen: Conversation) -> None:
            theirs = ("connection: x-inner", "keep-alive: 5", "x-shoal-secret: 1", "x-kept: 1")
            await seen.send(reply(b"", "200 OK", *theirs))

        replica = await lab.replica("one", rude)
        lab.serve(service(replica.told(secret="real")))
        answer = await lab.ask(
            get(
                "/p/s/",
                "Connection: x-shoal-secret, x-forwarded-for, keep-alive",
                "X-Shoal-Secret: forged",
                "x_shoal_secret: forged",
                "X-Shoal-Caller: forged",
                "X-Forwarded-For: 6.6.6.6",
                "X-Forwarded-Proto: https",
                "Forwarded: for=6.6.6.6",
                "Proxy-Authorization: Basic eDp5",
                "TE: trailers",
                "X-Kept: yes",
            )
        )
        seen = replica.requests[0]
        assert seen.all("x-shoal-secret") == ["real"]
        assert seen.all("x-forwarded-for") == ["127.0.0.1"]
        assert (seen.all("x-forwarded-proto"), seen.all("x-forwarded-host")) == (["http"], ["shoal.test"])
        assert seen.get("x-kept") == "yes"
        ends_here = {
            "connection",
            "te",
            "forwarded",
            "x_shoal_secret",
            "x-shoal-caller",
            "proxy-authorization",
        }
        assert not ends_here & {name for name, _ in seen.headers}
        assert answer.get("x-kept") == "1"
        assert not {"connection", "x-shoal-secret", "keep-alive"} & {name for name, _ in answer.headers}

    async def test_request_has_an_id_its_senders_or_a_new_one(self, lab: AnyLab) -> None:
        replica = await lab.replica()
        lab.serve(service(replica))
        given = await lab.ask(get("/p/s/", "x-request-id: trace-7"))
        made = await lab.ask(get("/p/s/", "x-request-id: <script>"))
        assert given.all("x-request-id") == replica.requests[0].all("x-request-id") == ["trace-7"]
        assert made.get("x-request-id") == replica.requests[1].get("x-request-id") != "<script>"

    @pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
    async def test_answer_without_a_body_ends_with_its_head(self, lab: AnyLab, status: str) -> None:
        async def bare(seen: Conversation) -> None:
            await seen.send(f"HTTP/1.1 {status}\r\netag: x\r\n\r\n".encode())

        lab.serve(service(await lab.replica("one", bare)))
        wire = await lab.connect()
        assert (await wire.ask(get())).get("etag") == "x"
        assert (await wire.ask(get())).get("etag") == "x"

    async def test_answer_to_head_tells_a_length_and_has_no_body(self, lab: AnyLab) -> None:
        async def bare(seen: Conversation) -> None:
            await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 12345\r\n\r\n")

        lab.serve(service(await lab.replica("one", bare)))
        wire = await lab.connect()
        for _ in range(2):
            answer = await wire.ask(get(method="HEAD"), is_head=True)
            assert (answer.status, answer.get("content-length")) == (200, "12345")

    async def test_event_goes_on_as_soon_as_it_comes(self, lab: AnyLab) -> None:
        gate = asyncio.Event()

        async def stream(seen: Conversation) -> None:
            await seen.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            await seen.send(b"9\r\ndata: 1\n\n\r\n")
            await gate.wait()
            await seen.send(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

        lab.serve(service(await lab.replica("one", stream)))
        wire = await lab.connect()
        await wire.send(get())
        assert b"data: 1" in await asyncio.wait_for(wire.reader.readuntil(b"\n\n\r\n"), 30)
        gate.set()
        assert b"data: 2" in await asyncio.wait_for(wire.reader.readuntil(b"\r\n0\r\n\r\n"), 30)
        assert (await wire.ask(get())).status == 200

    async def test_answer_that_ends_with_its_connection_is_whole(self, lab: AnyLab) -> None:
        async def old(seen: Conversation) -> None:
            await seen.send(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
            seen.writer.close()

        lab.serve(service(await lab.replica("one", old)))
        assert (await lab.ask(get())).body == b"until the end"

    async def test_caller_of_http_1_0_gets_plain_bytes_and_a_closed_connection(self, lab: AnyLab) -> None:
        async def stream(seen: Conversation) -> None:
            if seen.request.first.endswith("HTTP/1.0"):
                await seen.send(b"HTTP/1.0 200 OK\r\n\r\nabcde")
                seen.writer.close()
                return
            await seen.send(
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            )

        lab.serve(service(await lab.replica("one", stream)))
        wire = await lab.connect()
        answer = await wire.ask(b"GET /p/s/ HTTP/1.0\r\n\r\n")
        assert (answer.body, answer.get("transfer-encoding")) == (b"abcde", "")

    async def test_who_expects_to_be_told_to_continue_is_told(self, lab: AnyLab) -> None:
        replica = await lab.replica()
        lab.serve(service(replica))
        wire = await lab.connect()
        head = b"POST /p/s/ HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
        await wire.send(head)
        assert (await wire.receive()).status == 100
        assert (await wire.ask(b"body")).status == 200
        assert (replica.requests[0].body, replica.requests[0].get("expect")) == (b"body", "")

    async def test_chunked_upload_reaches_the_replica_while_it_comes(self, lab: AnyLab) -> None:
        pieces: list[bytes] = []

        async def collect(seen: Conversation) -> None:
            pieces.append(await seen.reader.readexactly(8))
            pieces.append(await seen.reader.readuntil(b"0\r\n"))
            await seen.reader.readuntil(b"\r\n")
            await seen.send(reply())

        lab.serve(service(await lab.replica("one", collect)))
        wire = await lab.connect()
        await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await until(lambda: pieces)
        assert (await wire.ask(b"2\r\nde\r\n0\r\n\r\n")).status == 200
        assert pieces == [b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n"]

    async def test_large_bodies_go_through_both_ways(self, lab: AnyLab) -> None:
        async def echo(seen: Conversation) -> None:
            await seen.send(reply(await seen.body()))

        lab.serve(service(await lab.replica("one", echo)))
        body = bytes(range(256)) * 8192
        assert (await lab.ask(get(method="POST", body=body))).body == body

    async def test_websocket_is_passed_through_both_ways(self, lab: AnyLab) -> None:
        async def echo(seen: Conversation) -> None:
            assert seen.request.get("upgrade") == "websocket"
            assert seen.request.get("sec-websocket-key") == "dGhlIHNhbXBsZSBub25jZQ=="
            head = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            await seen.send(head + b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\nhi")
            while data := await seen.reader.read(100):
                await seen.send(data.upper())

        lab.serve(service(await lab.replica("one", echo)))
        wire = await lab.connect()
        key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
        switched = await wire.ask(get("/p/s/ws", "connection: Upgrade", "upgrade: websocket", key))
        assert (switched.status, switched.get("upgrade")) == (101, "websocket")
        assert await wire.reader.readexactly(2) == b"hi"
        await wire.send(b"hello")
        assert await wire.reader.readexactly(5) == b"HELLO"
        wire.close()
        await until(lambda: lab.in_flight() == 0)

    async def test_replica_that_changes_the_protocol_unasked_is_not_believed(self, lab: AnyLab) -> None:
        async def rude(seen: Conversation) -> None:
            await seen.send(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")

        lab.serve(service(await lab.replica("one", rude), retries=0))
        assert (await lab.ask(get())).status == 502

    async def test_request_under_way_outlives_the_table_that_named_its_replica(self, lab: AnyLab) -> None:
        gate = asyncio.Event()

        async def slow(seen: Conversation) -> None:
            await gate.wait()
            await seen.send(reply(seen.replica.name.encode()))

        old, new = await lab.replica("old", slow), await lab.replica("new")
        lab.serve(service(old))
        wire = await lab.connect()
        await wire.send(get())
        await until(lambda: old.requests)
        lab.serve(service(new))
        assert (await lab.ask(get())).body == b"new"
        lab.serve(service(new), service(new, name="other"))
        assert (await lab.ask(get("/p/other/"))).body == b"new"
        gate.set()
        assert (await wire.receive()).body == b"old"

    async def test_drain_finishes_what_is_under_way_and_takes_nothing_new(self, lab: AnyLab) -> None:
        gate = asyncio.Event()

        async def slow(seen: Conversation) -> None:
            await gate.wait()
            await seen.send(reply())

        replica = await lab.replica("one", slow)
        lab.serve(service(replica))
        busy = await lab.connect()
        await busy.send(get())
        await until(lambda: replica.requests)
        draining = asyncio.ensure_future(lab.drain(30.0))
        await asyncio.sleep(0)
        gate.set()
        answer = await busy.receive()
        assert (answer.status, answer.get("connection")) == (200, "close")
        await draining


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


class ReplicasContract:
    """Replicas that fail, fill up, come and go."""

    async def test_safe_request_is_sent_again_to_another_replica(self, lab: AnyLab) -> None:
        lab.serve(service(await lab.replica("bad", hang_up), await lab.replica("good")))
        assert {(await lab.ask(get())).body for _ in range(6)} == {b"good"}
        await until(lambda: lab.in_flight() == 0)

    async def test_request_with_an_effect_is_never_sent_twice(self, lab: AnyLab) -> None:
        bad = await lab.replica("bad", hang_up)
        lab.serve(service(bad))
        answer = await lab.ask(get(method="POST", body=b"x"))
        assert (answer.status, len(bad.requests)) == (502, 1)
        assert b"may have had an effect" in answer.body
        await until(lambda: [(c.requests, c.errors) for c in lab.report().counts if c.release] == [(1, 1)])

    async def test_request_with_an_idempotency_key_is_sent_again_with_its_body(self, lab: AnyLab) -> None:
        async def echo(seen: Conversation) -> None:
            await seen.send(reply(await seen.body()))

        lab.serve(service(await lab.replica("bad", hang_up), await lab.replica("good", echo)))
        for _ in range(4):
            answer = await lab.ask(get("/p/s/", "idempotency-key: 7", method="POST", body=b"hello"))
            assert (answer.status, answer.body) == (200, b"hello")

    async def test_request_to_a_repeatable_service_is_sent_again_whatever_it_is(self, lab: AnyLab) -> None:
        bad, good = await lab.replica("bad", hang_up), await lab.replica("good")
        lab.serve(service(bad, good, is_repeatable=True))
        answers = [await lab.ask(get(method="POST", body=b"x")) for _ in range(4)]
        assert {answer.body for answer in answers} == {b"good"}
        assert bad.requests

    async def test_replica_that_is_gone_costs_no_request_of_any_kind(self, lab: AnyLab) -> None:
        gone, good = await lab.replica("gone"), await lab.replica("good")
        lab.serve(service(gone, good))
        await gone.stop()
        answers = [await lab.ask(get(method="POST", body=b"x")) for _ in range(10)]
        assert {answer.body for answer in answers} == {b"good"}

    async def test_retries_are_bounded_by_number(self, lab: AnyLab) -> None:
        bad = await lab.replica("bad", hang_up)
        lab.serve(service(bad, retries=2))
        assert (await lab.ask(get())).status == 502
        assert len(bad.requests) == 3

    async def test_without_retries_nothing_is_sent_again(self, lab: AnyLab) -> None:
        bad = await lab.replica("bad", hang_up)
        lab.serve(service(bad, retries=0))
        assert (await lab.ask(get())).status == 502
        assert len(bad.requests) == 1

    async def test_error_of_the_program_itself_is_no_reason_to_leave_it_alone(self, lab: AnyLab) -> None:
        async def broken(seen: Conversation) -> None:
            await seen.send(reply(b"trace", "500 Internal Server Error"))

        bad = await lab.replica("bad", broken)
        lab.serve(service(bad, await lab.replica("good")))
        for _ in range(40):
            await lab.ask(get())
        assert len(bad.requests) == 20
        await until(lambda: sum(count.errors for count in lab.report().counts) == 20)

    async def test_replica_that_fails_its_check_gets_nothing_until_it_passes(self, lab: AnyLab) -> None:
        is_well = asyncio.Event()

        async def sick(seen: Conversation) -> None:
            is_check = seen.request.path == "/healthz"
            status = "200 OK" if is_well.is_set() or not is_check else "500 Sick"
            await seen.send(reply(seen.replica.name.encode(), status))

        sick_one, good = await lab.replica("sick", sick), await lab.replica("good")
        lab.serve(service(sick_one.told(secret="k"), good.told(secret="l"), check="/healthz"))

        def ejected() -> set[str]:
            return {one.replica_id for one in lab.report().health if one.is_ejected}

        await until(lambda: ejected() == {"sick"})
        assert {(await lab.ask(get())).body for _ in range(4)} == {b"good"}
        assert {seen.get("x-shoal-secret") for seen in sick_one.requests} == {"k"}
        is_well.set()
        await until(lambda: not ejected())

    async def test_what_exceeds_the_cap_waits_here_and_is_bound_late(self, lab: AnyLab) -> None:
        gates = {"a": asyncio.Event(), "b": asyncio.Event()}

        async def slow(seen: Conversation) -> None:
            await gates[seen.replica.name].wait()
            await seen.send(reply(seen.replica.name.encode()))

        a, b = await lab.replica("a", slow), await lab.replica("b", slow)
        lab.serve(service(a, b, cap=1))
        asked = [asyncio.ensure_future(lab.ask(get())) for _ in range(10)]
        await until(lambda: (lab.queued(), len(a.requests), len(b.requests)) == (8, 1, 1))
        gates["b"].set()
        await until(lambda: sum(one.done() for one in asked) == 9)
        assert (len(a.requests), len(b.requests)) == (1, 9)
        gates["a"].set()
        assert Counter([(await one).body for one in asked]) == {b"a": 1, b"b": 9}

    async def test_canary_gets_its_share_and_its_own_counts(self, lab: AnyLab) -> None:
        old, new = await lab.replica("old"), await lab.replica("new", release=2)
        lab.serve(service(old, new, shares={1: 0.9, 2: 0.1}))
        for _ in range(50):
            await lab.ask(get())
        assert (len(old.requests), len(new.requests)) == (45, 5)

        def counts() -> dict[int, int]:
            return {count.release: count.requests for count in lab.report().counts if count.release}

        await until(lambda: counts() == {1: 45, 2: 5})

    async def test_share_of_a_release_without_replicas_goes_to_the_others(self, lab: AnyLab) -> None:
        old = await lab.replica("old")
        lab.serve(service(old, shares={1: 0.5, 2: 0.5}))
        assert {(await lab.ask(get())).status for _ in range(10)} == {200}

    @pytest.mark.parametrize(
        "told,header", [("header:x-session", "x-session: {}"), ("cookie:sid", "cookie: a=b; sid={}")]
    )
    async def test_session_stays_at_its_replica(self, lab: AnyLab, told: str, header: str) -> None:
        replicas = [await lab.replica(name) for name in "abcd"]
        lab.serve(service(*replicas, affinity=told))
        homes = {n: (await lab.ask(get("/p/s/", header.format(n)))).body for n in range(12)}
        assert len(set(homes.values())) > 1
        assert {n: (await lab.ask(get("/p/s/", header.format(n)))).body for n in homes} == homes

    async def test_who_waits_for_its_own_replica_is_counted(self, lab: AnyLab) -> None:
        replica = await lab.replica("one", silence)
        lab.serve(service(replica, cap=1, affinity="header:x-session"))
        for _ in range(3):
            await (await lab.connect()).send(get("/p/s/", "x-session: 1"))
        await until(lambda: (lab.in_flight(), lab.queued()) == (1, 2))

    async def test_replica_that_comes_is_used_and_one_that_went_is_not(self, lab: AnyLab) -> None:
        first = await lab.replica("first")
        lab.serve(service(first))
        assert (await lab.ask(get())).body == b"first"
        second = await lab.replica("second")
        lab.serve(service(first, second))
        assert {(await lab.ask(get())).body for _ in range(4)} == {b"first", b"second"}
        lab.serve(service(second))
        assert {(await lab.ask(get())).body for _ in range(4)} == {b"second"}
        lab.serve(service(first, second))
        assert {(await lab.ask(get())).body for _ in range(4)} == {b"first", b"second"}

    async def test_replica_that_drains_finishes_what_it_has_and_gets_nothing_new(self, lab: AnyLab) -> None:
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

        def in_flight() -> dict[str, int]:
            return {one.replica_id: one.in_flight for one in lab.report().health}

        await until(lambda: in_flight() == {"old": 1, "new": 0})
        gate.set()
        assert (await asked).body == b"old"
        await until(lambda: lab.in_flight() == 0)

    async def test_caller_who_leaves_cancels_the_work_it_asked_for(self, lab: AnyLab) -> None:
        replica = await lab.replica("one", silence)
        lab.serve(service(replica, cap=1))
        wire = await lab.connect()
        await wire.send(get())
        await until(lambda: replica.requests)
        waiting = await lab.connect()
        await waiting.send(get())
        await until(lambda: lab.queued() == 1)
        waiting.close()
        await until(lambda: lab.queued() == 0)
        wire.close()
        await until(lambda: lab.in_flight() == 0)
        assert len(replica.requests) == 1

    async def test_silence_of_a_replica_ends_with_a_504(self, lab: AnyLab) -> None:
        lab.serve(service(await lab.replica("one", silence), timeout_s=0.5))
        answer = await lab.ask(get())
        assert (answer.status, json.loads(answer.body)["code"]) == (504, "replica.late")


class DataPlaneContract(PathContract, AdmissionContract, ReplicasContract):
    """All of it."""
