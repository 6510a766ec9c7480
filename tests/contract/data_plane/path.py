"""Contract: how requests go through a data plane to replicas, and replies back."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.serving.data_plane_lab import (
    Conversation,
    DataPlaneLab,
    private_service,
    reply,
    request_bytes,
    service,
    until,
)


class PathContract:
    """Requests of any shape reach replicas, and their replies come back."""

    async def test_path_loses_its_prefix_and_keeps_its_query(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica()
        lab.serve(service(replica))
        answer = await lab.ask(request_bytes("/p/s/a/b?x=1&y=%20"))
        assert (answer.status, answer.body) == (200, b"one")
        assert replica.requests[0].start_line == "GET /a/b?x=1&y=%20 HTTP/1.1"

    @pytest.mark.parametrize(
        "path,seen",
        [("/p/s", "/"), ("/p/s?x", "/?x"), ("/p/s//a", "//a"), ("/p/s/", "/"), ("/p/s/p/s/", "/p/s/")],
    )
    async def test_path_of_the_service_is_the_replicas_root(
        self, lab: DataPlaneLab, path: str, seen: str
    ) -> None:
        replica = await lab.add_replica()
        lab.serve(service(replica))
        assert (await lab.ask(request_bytes(path))).status == 200
        assert replica.requests[0].path == seen

    async def test_health_needs_no_token_and_fails_while_no_control_plane_confirms_the_table(
        self, lab: DataPlaneLab
    ) -> None:
        ask = b"GET /-/health HTTP/1.1\r\nHost: a\r\n\r\n"
        lab.refresh_health()
        wire = await lab.connect()
        well = await wire.ask(ask)
        assert (well.status, b'"status":"ok"' in well.body) == (200, True)
        lab.plane.freshness.limit_s = 8.0
        lab.refresh_health()
        stale = await wire.ask(ask)
        assert (stale.status, b"plane.stale" in stale.body) == (503, True)
        lab.plane.freshness.confirm()
        lab.refresh_health()
        head = await wire.ask(ask.replace(b"GET", b"HEAD"), is_head=True)
        assert (head.status, head.body) == (200, b"")
        assert (await wire.ask(ask)).status == 200

    async def test_page_of_an_admitted_origin_gets_its_preflight_and_may_read_every_reply(
        self, lab: DataPlaneLab
    ) -> None:
        replica = await lab.add_replica()
        page = "https://app.example"
        lab.serve(private_service(replica, origins=(page,)))
        first = request_bytes(
            "/p/s/x",
            f"origin: {page}",
            "access-control-request-method: POST",
            "access-control-request-headers: authorization,x-a",
            method="OPTIONS",
        )
        allowed = await lab.ask(first)
        assert (allowed.status, allowed.get("access-control-allow-origin")) == (204, page)
        assert allowed.get("access-control-allow-headers") == "authorization,x-a"
        assert replica.requests == []
        answer = await lab.ask(request_bytes("/p/s/x", f"origin: {page}", "authorization: Bearer token-ana"))
        assert (answer.status, answer.get("access-control-allow-origin")) == (200, page)
        assert "x-request-id" in answer.get("access-control-expose-headers")
        refused = await lab.ask(request_bytes("/p/s/x", f"origin: {page}"))
        assert (refused.status, refused.get("access-control-allow-origin")) == (401, page)

    async def test_page_of_another_origin_gets_no_cors_headers(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica()
        lab.serve(private_service(replica, origins=("https://app.example",)))
        other = ("origin: https://evil.example", "access-control-request-method: GET")
        refused = await lab.ask(request_bytes("/p/s/x", *other, method="OPTIONS"))
        assert (refused.status, refused.get("access-control-allow-origin")) == (401, "")
        answer = await lab.ask(request_bytes("/p/s/", other[0], "authorization: Bearer token-ana"))
        assert (answer.status, answer.get("access-control-allow-origin")) == (200, "")

    async def test_program_that_writes_cors_headers_keeps_its_own(self, lab: DataPlaneLab) -> None:
        async def answer_with_cors(seen: Conversation) -> None:
            await seen.send(reply(b"", "200 OK", "access-control-allow-origin: https://own.example"))

        lab.serve(service(await lab.add_replica("own", answer_with_cors), origins=("*",)))
        answer = await lab.ask(request_bytes("/p/s/", "origin: https://app.example"))
        assert answer.values("access-control-allow-origin") == ["https://own.example"]

    async def test_program_gets_its_path_prefix_in_a_header(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica()
        lab.serve(service(replica, hosts=("chat.example",)))
        await lab.ask(request_bytes("/p/s/docs?x=/p/s", "x-forwarded-prefix: /spoofed"))
        await lab.ask(b"GET /docs HTTP/1.1\r\nHost: chat.example\r\n\r\n")
        assert [seen.values("x-forwarded-prefix") for seen in replica.requests] == [["/p/s"], []]

    async def test_host_alone_names_a_service_whatever_its_port_and_case(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica()
        lab.serve(service(replica, hosts=("chat.example",)))
        wire = await lab.connect()
        answer = await wire.ask(b"GET /v1/x HTTP/1.1\r\nHost: Chat.Example:8443\r\n\r\n")
        assert answer.status == 200
        assert replica.requests[0].path == "/v1/x"

    @pytest.mark.parametrize("path", ["/p/s/../t", "/p/s/%2e%2E/t", "/p/s/./a", "/p/s/.."])
    async def test_ambiguous_path_is_refused(self, lab: DataPlaneLab, path: str) -> None:
        replica = await lab.add_replica()
        lab.serve(service(replica))
        assert (await lab.ask(request_bytes(path))).status == 400
        assert replica.requests == []

    @pytest.mark.parametrize(
        "raw",
        [
            b"GET /p/s/ HTTP/1.1\r\n\r\n",
            b"GET /p/s/ HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
            b"GET /p/s/ HTTP/1.1\r\nhost: a\r\nauthorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n",
            b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
            b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\nx",
            b"GET /p/s/ HTTP/1.1\r\nhost: a\r\nno colon\r\n\r\n",
            b"GET /p/s/ HTTP/1.1\r\nhost : a\r\n\r\n",
        ],
    )
    async def test_ambiguous_request_is_refused(self, lab: DataPlaneLab, raw: bytes) -> None:
        replica = await lab.add_replica()
        lab.serve(service(replica))
        assert (await lab.ask(raw)).status == 400
        assert replica.requests == []

    async def test_many_requests_use_one_connection_on_each_side(self, lab: DataPlaneLab) -> None:
        async def peer(seen: Conversation) -> None:
            await seen.send(reply(str(seen.writer.get_extra_info("peername")[1]).encode()))

        lab.serve(service(await lab.add_replica("one", peer)))
        wire = await lab.connect()
        assert len({(await wire.ask(request_bytes())).body for _ in range(20)}) == 1

    async def test_requests_sent_ahead_are_answered_in_their_order(self, lab: DataPlaneLab) -> None:
        async def echo(seen: Conversation) -> None:
            body = await seen.body()
            await seen.send(reply(seen.request.path.encode() + body))

        lab.serve(service(await lab.add_replica("one", echo)))
        wire = await lab.connect()
        await wire.send(b"".join(request_bytes(f"/p/s/{n}", method="POST", body=b"x" * n) for n in range(10)))
        answers = [(await wire.receive()).body for _ in range(10)]
        assert answers == [f"/{n}".encode() + b"x" * n for n in range(10)]

    async def test_connection_headers_are_dropped_and_shoal_headers_cannot_be_forged(
        self, lab: DataPlaneLab
    ) -> None:
        async def rude(seen: Conversation) -> None:
            theirs = ("connection: x-inner", "keep-alive: 5", "x-shoal-secret: 1", "x-kept: 1")
            await seen.send(reply(b"", "200 OK", *theirs))

        replica = await lab.add_replica("one", rude)
        lab.serve(service(replica.table_entry(secret="real")))
        answer = await lab.ask(
            request_bytes(
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
        assert seen.values("x-shoal-secret") == ["real"]
        assert seen.values("x-forwarded-for") == ["127.0.0.1"]
        assert (seen.values("x-forwarded-proto"), seen.values("x-forwarded-host")) == (
            ["http"],
            ["shoal.test"],
        )
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

    async def test_request_keeps_its_senders_id_or_gets_a_new_one(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica()
        lab.serve(service(replica))
        with_sent_id = await lab.ask(request_bytes("/p/s/", "x-request-id: trace-7"))
        with_new_id = await lab.ask(request_bytes("/p/s/", "x-request-id: <script>"))
        assert (
            with_sent_id.values("x-request-id") == replica.requests[0].values("x-request-id") == ["trace-7"]
        )
        assert with_new_id.get("x-request-id") == replica.requests[1].get("x-request-id") != "<script>"

    @pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
    async def test_answer_without_a_body_ends_with_its_head(self, lab: DataPlaneLab, status: str) -> None:
        async def bare(seen: Conversation) -> None:
            await seen.send(f"HTTP/1.1 {status}\r\netag: x\r\n\r\n".encode())

        lab.serve(service(await lab.add_replica("one", bare)))
        wire = await lab.connect()
        assert (await wire.ask(request_bytes())).get("etag") == "x"
        assert (await wire.ask(request_bytes())).get("etag") == "x"

    async def test_reply_to_head_has_a_length_and_no_body(self, lab: DataPlaneLab) -> None:
        async def bare(seen: Conversation) -> None:
            await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 12345\r\n\r\n")

        lab.serve(service(await lab.add_replica("one", bare)))
        wire = await lab.connect()
        for _ in range(2):
            answer = await wire.ask(request_bytes(method="HEAD"), is_head=True)
            assert (answer.status, answer.get("content-length")) == (200, "12345")

    async def test_event_is_passed_on_as_soon_as_it_comes(self, lab: DataPlaneLab) -> None:
        gate = asyncio.Event()

        async def stream(seen: Conversation) -> None:
            await seen.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            await seen.send(b"9\r\ndata: 1\n\n\r\n")
            await gate.wait()
            await seen.send(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

        lab.serve(service(await lab.add_replica("one", stream)))
        wire = await lab.connect()
        await wire.send(request_bytes())
        assert b"data: 1" in await asyncio.wait_for(wire.reader.readuntil(b"\n\n\r\n"), 30)
        gate.set()
        assert b"data: 2" in await asyncio.wait_for(wire.reader.readuntil(b"\r\n0\r\n\r\n"), 30)
        assert (await wire.ask(request_bytes())).status == 200

    async def test_answer_that_ends_with_its_connection_is_whole(self, lab: DataPlaneLab) -> None:
        async def old(seen: Conversation) -> None:
            await seen.send(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
            seen.writer.close()

        lab.serve(service(await lab.add_replica("one", old)))
        assert (await lab.ask(request_bytes())).body == b"until the end"

    async def test_caller_of_http_1_0_gets_plain_bytes_and_a_closed_connection(
        self, lab: DataPlaneLab
    ) -> None:
        async def stream(seen: Conversation) -> None:
            if seen.request.start_line.endswith("HTTP/1.0"):
                await seen.send(b"HTTP/1.0 200 OK\r\n\r\nabcde")
                seen.writer.close()
                return
            await seen.send(
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            )

        lab.serve(service(await lab.add_replica("one", stream)))
        wire = await lab.connect()
        answer = await wire.ask(b"GET /p/s/ HTTP/1.0\r\n\r\n")
        assert (answer.body, answer.get("transfer-encoding")) == (b"abcde", "")

    async def test_expect_continue_gets_100_continue(self, lab: DataPlaneLab) -> None:
        replica = await lab.add_replica()
        lab.serve(service(replica))
        wire = await lab.connect()
        head = b"POST /p/s/ HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
        await wire.send(head)
        assert (await wire.receive()).status == 100
        assert (await wire.ask(b"body")).status == 200
        assert (replica.requests[0].body, replica.requests[0].get("expect")) == (b"body", "")

    async def test_chunked_upload_reaches_the_replica_while_it_comes(self, lab: DataPlaneLab) -> None:
        pieces: list[bytes] = []

        async def collect(seen: Conversation) -> None:
            pieces.append(await seen.reader.readexactly(8))
            pieces.append(await seen.reader.readuntil(b"0\r\n"))
            await seen.reader.readuntil(b"\r\n")
            await seen.send(reply())

        lab.serve(service(await lab.add_replica("one", collect)))
        wire = await lab.connect()
        await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await until(lambda: pieces)
        assert (await wire.ask(b"2\r\nde\r\n0\r\n\r\n")).status == 200
        assert pieces == [b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n"]

    async def test_large_bodies_go_through_both_ways(self, lab: DataPlaneLab) -> None:
        async def echo(seen: Conversation) -> None:
            await seen.send(reply(await seen.body()))

        lab.serve(service(await lab.add_replica("one", echo)))
        body = bytes(range(256)) * 8192
        assert (await lab.ask(request_bytes(method="POST", body=body))).body == body

    async def test_websocket_is_passed_through_both_ways(self, lab: DataPlaneLab) -> None:
        async def echo(seen: Conversation) -> None:
            assert seen.request.get("upgrade") == "websocket"
            assert seen.request.get("sec-websocket-key") == "dGhlIHNhbXBsZSBub25jZQ=="
            head = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            await seen.send(head + b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\nhi")
            while data := await seen.reader.read(100):
                await seen.send(data.upper())

        lab.serve(service(await lab.add_replica("one", echo)))
        wire = await lab.connect()
        key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
        switched = await wire.ask(request_bytes("/p/s/ws", "connection: Upgrade", "upgrade: websocket", key))
        assert (switched.status, switched.get("upgrade")) == (101, "websocket")
        assert await wire.reader.readexactly(2) == b"hi"
        await wire.send(b"hello")
        assert await wire.reader.readexactly(5) == b"HELLO"
        wire.close()
        await until(lambda: lab.in_flight() == 0)

    async def test_unrequested_protocol_switch_of_a_replica_is_refused(self, lab: DataPlaneLab) -> None:
        async def rude(seen: Conversation) -> None:
            await seen.send(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")

        lab.serve(service(await lab.add_replica("one", rude), retries=0))
        assert (await lab.ask(request_bytes())).status == 502

    async def test_request_under_way_outlives_the_table_that_named_its_replica(
        self, lab: DataPlaneLab
    ) -> None:
        gate = asyncio.Event()

        async def slow(seen: Conversation) -> None:
            await gate.wait()
            await seen.send(reply(seen.replica.name.encode()))

        old, new = await lab.add_replica("old", slow), await lab.add_replica("new")
        lab.serve(service(old))
        wire = await lab.connect()
        await wire.send(request_bytes())
        await until(lambda: old.requests)
        lab.serve(service(new))
        assert (await lab.ask(request_bytes())).body == b"new"
        lab.serve(service(new), service(new, name="other"))
        assert (await lab.ask(request_bytes("/p/other/"))).body == b"new"
        gate.set()
        assert (await wire.receive()).body == b"old"

    async def test_drain_finishes_open_requests_and_accepts_no_new_ones(self, lab: DataPlaneLab) -> None:
        gate = asyncio.Event()

        async def slow(seen: Conversation) -> None:
            await gate.wait()
            await seen.send(reply())

        replica = await lab.add_replica("one", slow)
        lab.serve(service(replica))
        busy = await lab.connect()
        await busy.send(request_bytes())
        await until(lambda: replica.requests)
        draining = asyncio.ensure_future(lab.drain(30.0))
        await asyncio.sleep(0)
        gate.set()
        answer = await busy.receive()
        assert (answer.status, answer.get("connection")) == (200, "close")
        await draining
