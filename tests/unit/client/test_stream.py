"""Streams that break resume where they broke."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.client.connection import Connection
from shoal.client.stream import ServerReach, follow
from shoal.errors import NotFound, StoreUnavailable
from tests.support.fakes.api_server import TOKEN, running_fake, sse

PATH = f"/v1/jobs/job_{17:026d}/logs/stream"


def line(text: str) -> dict[str, Any]:
    return {"at": 1.0, "node": "n1", "rank": 0, "stream": "o", "text": text}


def test_cut_stream_resumes_after_the_last_delivered_event() -> None:
    with running_fake() as fake:
        fake.streams[PATH] = [
            [
                sse("line", line("one"), "c1"),
                sse("line", line("two"), "c2"),
                "id: c3\nevent: line\ndata: {\n",
            ],
            [sse("line", line("three"), "c3"), sse("end", {"status": "succeeded", "exit_code": 0}, "c4")],
        ]
        with Connection(fake.url, TOKEN) as shoal:
            events = list(shoal.follow_logs(f"job_{17:026d}"))
        assert [event.data.get("text") for event in events] == ["one", "two", "three", None]
        assert [request.headers.get("last-event-id") for request in fake.requests] == [None, "c2"]


def test_comments_and_unknown_fields_are_passed_over() -> None:
    with running_fake() as fake:
        fake.streams[PATH] = [[": keep-alive\n\n", "retry: 5\n\n", sse("end", {"status": "failed"})]]
        with Connection(fake.url, TOKEN) as shoal:
            assert [event.kind for event in shoal.follow_logs(f"job_{17:026d}")] == ["end"]


def test_following_lines_stops_at_the_end() -> None:
    with running_fake() as fake:
        fake.streams[PATH] = [[sse("line", line("one"), "c1"), sse("end", {"status": "failed"}, "c2")]]
        with Connection(fake.url, TOKEN) as shoal:
            assert [item["text"] for item in shoal.logs(f"job_{17:026d}", follow=True)] == ["one"]


def test_refused_stream_is_not_retried() -> None:
    with running_fake() as fake:
        with Connection(fake.url, TOKEN) as shoal, pytest.raises(NotFound):
            list(shoal.follow_logs("job_missing"))
        assert len(fake.requests) == 1


def test_a_server_that_stays_away_ends_the_stream_with_an_error() -> None:
    with running_fake() as fake:
        fake.streams["/s"] = [[sse("line", line("one"), "c1")]]
        with Connection(fake.url, TOKEN, patience_s=0.3) as shoal:
            events = follow(shoal.transport, "/s")
            assert next(events).data["text"] == "one"
            fake.streams.clear()
            fake.answers["GET", "/s"] = fake.problem(503, "store.unavailable", "away")
            with pytest.raises(StoreUnavailable) as caught:
                next(events)
            assert caught.value.exit_code == 6


def test_server_loss_and_return_are_reported_once_each() -> None:
    changes: list[ServerReach] = []
    with running_fake() as fake:
        away = fake.problem(503, "store.unavailable", "away")
        fake.streams["/s"] = [[sse("line", line("one"), "c1")]]
        with Connection(fake.url, TOKEN, patience_s=30.0) as shoal:
            events = follow(shoal.transport, "/s", None, changes.append)
            assert next(events).data["text"] == "one"
            fake.streams.clear()
            fake.answers["GET", "/s"] = away

            def come_back(reach: ServerReach) -> None:
                fake.streams["/s"] = [[sse("line", line("two"), "c2")]]
                changes.append(reach)

            told_of = follow(shoal.transport, "/s", None, come_back)
            assert next(told_of).data["text"] == "two"
    assert changes == ["gone", "back"]


def test_single_cut_of_a_stream_is_not_reported() -> None:
    changes: list[ServerReach] = []
    with running_fake() as fake:
        fake.streams["/s"] = [[sse("line", line("one"), "c1")], [sse("line", line("two"), "c2")]]
        with Connection(fake.url, TOKEN) as shoal:
            events = follow(shoal.transport, "/s", None, changes.append)
            assert [next(events).data["text"] for _ in range(2)] == ["one", "two"]
    assert changes == []
