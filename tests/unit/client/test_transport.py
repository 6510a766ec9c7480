"""The client's behaviour when replies are lost, servers restart or refuse."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.client import transport as transport_module
from shoal.client.connection import Connection
from shoal.client.credentials import Credentials, Endpoint, find_endpoint
from shoal.client.stream import follow
from shoal.client.transport import Transport, path_of
from shoal.errors import (
    Bug,
    Denied,
    EngineUnreachable,
    NotFound,
    ServerUnreachable,
    SpecError,
    StandingBy,
    StateError,
    Unauthenticated,
)
from tests.support.fakes.api_server import LOST_REPLY, TOKEN, FakeApiServer, job_view, running_fake


@pytest.fixture
def fake() -> Iterator[FakeApiServer]:
    with running_fake() as server:
        yield server


OPENED: list[Transport] = []


@pytest.fixture(autouse=True)
def close_connections() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def transport_to(url: str, patience_s: float = 5.0) -> Transport:
    OPENED.append(Transport(lambda: Endpoint(url, TOKEN), patience_s=patience_s, sleep=lambda _: None))
    return OPENED[-1]


def test_a_mutation_whose_answer_was_lost_is_sent_again_with_the_same_key(fake: FakeApiServer) -> None:
    def lose_the_first_answer(request: Any) -> Any:
        answer = fake.submit(request)
        return answer if answer[1]["was_repeated"] else LOST_REPLY

    fake.answers["POST", "/v1/jobs"] = lose_the_first_answer
    answer = transport_to(fake.url).call("POST", "/v1/jobs", json_body={"spec": {}})
    keys = [request.headers["idempotency-key"] for request in fake.requests]
    assert len(keys) == 2
    assert keys[0] == keys[1]
    assert answer["was_repeated"] is True
    assert len(fake.jobs_by_key) == 1


def test_two_calls_have_two_keys(fake: FakeApiServer) -> None:
    transport = transport_to(fake.url)
    transport.call("POST", "/v1/jobs", json_body={})
    transport.call("POST", "/v1/jobs", json_body={})
    assert len(fake.jobs_by_key) == 2


def test_the_token_travels_in_the_header_and_never_in_the_address(fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/me"] = {"user": "ana"}
    transport_to(fake.url).call("GET", "/v1/me")
    assert fake.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in fake.requests[0].path + str(fake.requests[0].query)
    assert TOKEN not in repr(Endpoint(fake.url, TOKEN))


def test_one_connection_serves_many_calls(fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/me"] = {}
    transport = transport_to(fake.url)
    connections = set()
    for _ in range(3):
        transport.call("GET", "/v1/me")
        assert transport._connection is not None
        connections.add(transport._connection._link.getsockname())
    assert len(connections) == 1


def test_server_never_reached_is_not_waited_for() -> None:
    waited: list[float] = []
    transport = Transport(
        lambda: Endpoint("http://127.0.0.1:1", None, is_local=True), patience_s=60.0, sleep=waited.append
    )
    with pytest.raises(ServerUnreachable) as caught:
        transport.call("GET", "/v1/me")
    assert waited == []
    assert caught.value.exit_code == 6
    assert caught.value.hint == "start it with `shoal up`"


def test_a_server_that_does_not_answer_is_named_with_what_chose_it() -> None:
    transport = Transport(lambda: Endpoint("http://127.0.0.1:1", None, chosen_by="shoal login"))
    with pytest.raises(ServerUnreachable, match=r"http://127.0.0.1:1 \(chosen by shoal login\)") as caught:
        transport.call("GET", "/v1/me")
    assert "`shoal login local`" in str(caught.value.hint)


def test_a_restarted_server_is_found_at_its_new_address() -> None:
    with running_fake() as first, running_fake() as second:
        urls = [first.url]
        first.answers["GET", "/v1/me"] = [{"user": "before"}, LOST_REPLY]
        second.answers["GET", "/v1/me"] = {"user": "after"}

        def locate() -> Endpoint:
            return Endpoint(urls[-1], TOKEN, is_local=True)

        transport = Transport(locate, sleep=lambda _: None)
        OPENED.append(transport)
        assert transport.call("GET", "/v1/me") == {"user": "before"}
        urls.append(second.url)
        assert transport.call("GET", "/v1/me") == {"user": "after"}


def test_retries_end_after_the_patience() -> None:
    with running_fake() as fake:
        fake.answers["GET", "/v1/me"] = {}
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds + 0.001

        url = fake.url
        transport = Transport(
            lambda: Endpoint(url, None), patience_s=3.0, sleep=sleep, monotonic=lambda: now[0]
        )
        transport.call("GET", "/v1/me")
        transport.close()
    with pytest.raises(ServerUnreachable):
        transport.call("GET", "/v1/me")
    assert 1.0 < now[0] <= 3.5


def test_busy_server_is_retried_and_then_its_error_raised(fake: FakeApiServer) -> None:
    busy = fake.problem(503, "store.unavailable", "the disk is full", hint="`df -h`")
    fake.answers["GET", "/v1/me"] = [busy, busy, {"user": "ana"}]
    assert transport_to(fake.url).call("GET", "/v1/me") == {"user": "ana"}
    assert len(fake.requests) == 3


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "unauthenticated", Unauthenticated),
        (403, "denied", Denied),
        (404, "not_found", NotFound),
        (409, "state.conflict", StateError),
        (409, "idempotency.mismatch", StateError),
        (422, "spec.invalid", SpecError),
        (500, "bug", Bug),
    ],
)
def test_a_problem_document_becomes_the_error_it_stands_for(
    fake: FakeApiServer, status: int, code: str, kind: type[Exception]
) -> None:
    fake.answers["GET", "/v1/me"] = fake.problem(status, code, "because", hint="`type this`", request_id="r1")
    with pytest.raises(kind) as caught:
        transport_to(fake.url).call("GET", "/v1/me")
    error: Any = caught.value
    assert (error.code, error.hint, error.message) == (code, "`type this`", "because")
    assert error.facts["request_id"] == "r1"


def test_refused_token_variable_keeps_the_saved_token(
    fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers["GET", "/v1/me"] = fake.problem(401, "unauthenticated", "who", hint="`forget yours`")
    variable_hint = "SHOAL_TOKEN is set and was refused: `unset SHOAL_TOKEN` uses what `shoal login` saved, "
    for variable, hint in (("shl_other", "`forget yours`"), (TOKEN, variable_hint)):
        monkeypatch.setenv("SHOAL_TOKEN", variable)
        with pytest.raises(Unauthenticated) as caught:
            transport_to(fake.url).call("GET", "/v1/me")
        assert (caught.value.hint or "").startswith(hint)


def test_missing_token_does_not_mention_an_unset_variable(
    fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    fake.answers["GET", "/v1/me"] = fake.problem(401, "unauthenticated", "who", hint="`shoal login`")
    OPENED.append(Transport(lambda: Endpoint(fake.url, "")))
    with pytest.raises(Unauthenticated) as caught:
        OPENED[-1].call("GET", "/v1/me")
    assert caught.value.hint == "`shoal login`"


def test_unreachable_engine_is_not_reported_as_an_unreachable_server(fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/me"] = fake.problem(503, "engine.unreachable", "no answer from slurm")
    transport = transport_to(fake.url)
    now = iter(range(0, 1000, 6))
    transport._monotonic = lambda: float(next(now))
    with pytest.raises(EngineUnreachable):
        transport.call("GET", "/v1/me")


def test_every_problem_of_a_spec_arrives(fake: FakeApiServer) -> None:
    fake.answers["POST", "/v1/jobs"] = fake.problem(422, "spec.invalid", "2 mistakes", problems=["a", "b"])
    with pytest.raises(SpecError) as caught:
        transport_to(fake.url).call("POST", "/v1/jobs", json_body={})
    assert caught.value.problems == ("a", "b")


def test_reply_of_another_program_is_reported_as_such(fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/me"] = (502, b"<html>nginx</html>")
    with pytest.raises(ServerUnreachable, match="not as Shoal does"):
        transport_to(fake.url).call("GET", "/v1/me")


def test_a_name_can_never_become_another_path() -> None:
    assert path_of("nodes", "../users", "drain") == "/v1/nodes/..%2Fusers/drain"
    assert path_of("users", "a b?c#d") == "/v1/users/a%20b%3Fc%23d"


def test_untrusted_certificate_error_has_a_hint() -> None:
    error = ssl.SSLCertVerificationError("bad")
    error.verify_message = "self-signed certificate"
    problem = transport_to("https://127.0.0.1:1").unreachable(error)
    assert "SSL_CERT_FILE" in str(problem.hint)


def test_address_without_scheme_is_refused_with_a_sentence() -> None:
    with pytest.raises(SpecError, match="is not http://HOST"):
        transport_to("127.0.0.1:7462").call("GET", "/v1/me")


def test_jobs_are_fetched_page_by_page(fake: FakeApiServer) -> None:
    def page(request: Any) -> Any:
        cursor = int(request.query.get("cursor", ["0"])[0])
        items = [job_view(number=cursor + 1), job_view(number=cursor + 2)]
        return {"items": items, "next_cursor": str(cursor + 2) if cursor < 4 else None}

    fake.answers["GET", "/v1/jobs"] = page
    with Connection(fake.url, TOKEN) as shoal:
        assert [job["number"] for job in shoal.jobs(status=("queued", "running"))] == [1, 2, 3, 4, 5, 6]
    assert fake.requests[0].query["status"] == ["queued", "running"]


@pytest.mark.parametrize("num_jobs", [0, 2])
def test_a_reference_must_name_one_job(fake: FakeApiServer, num_jobs: int) -> None:
    items = [job_view(number=17, ref=f"p{i}/17") for i in range(num_jobs)]
    fake.answers["GET", "/v1/jobs"] = {"items": items, "next_cursor": None}
    with Connection(fake.url, TOKEN) as shoal, pytest.raises((NotFound, SpecError)) as caught:
        shoal.job_id("17")
    assert isinstance(caught.value, SpecError if num_jobs else NotFound)
    assert fake.requests[0].query["ref"] == ["17"]


STANDS_BY = (503, {"code": "control.standing_by", "detail": "http://b leads", "status": 503})


def transport_to_all(*urls: str, patience_s: float = 5.0) -> Transport:
    first, *others = (Endpoint(url, TOKEN) for url in urls)
    located = first._replace(others=tuple(others))
    OPENED.append(Transport(lambda: located, patience_s=patience_s, sleep=lambda _: None))
    return OPENED[-1]


def test_standby_reply_switches_to_the_next_control_plane_for_good(
    fake: FakeApiServer,
) -> None:
    fake.answers["GET", "/v1/me"] = STANDS_BY
    with running_fake() as leader:
        leader.answers["GET", "/v1/me"] = {"user": "ana"}
        transport = transport_to_all(fake.url, leader.url)
        assert [transport.call("GET", "/v1/me") for _ in range(3)] == [{"user": "ana"}] * 3
        assert (len(fake.requests), len(leader.requests)) == (1, 3)
        assert transport.endpoint.url == leader.url


def test_next_control_plane_is_tried_when_the_first_was_never_reached(
    fake: FakeApiServer,
) -> None:
    fake.answers["GET", "/v1/me"] = {"user": "ana"}
    assert transport_to_all("http://127.0.0.1:1", fake.url).call("GET", "/v1/me") == {"user": "ana"}


def test_control_planes_never_reached_are_tried_once_each() -> None:
    waited: list[float] = []
    located = Endpoint("http://127.0.0.1:1", None, others=(Endpoint("http://127.0.0.1:2", None),))
    transport = Transport(lambda: located, patience_s=60.0, sleep=waited.append)
    with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:2"):
        transport.call("GET", "/v1/me")
    assert waited == [0.0]


def test_submit_interrupted_by_a_takeover_has_one_key_at_both_leaders(fake: FakeApiServer) -> None:
    """The old leader gets the request and its reply is lost; then no server leads; then the other does."""
    fake.answers["POST", "/v1/jobs"] = [LOST_REPLY, STANDS_BY]
    with running_fake() as leader:
        leader.answers["POST", "/v1/jobs"] = [STANDS_BY, leader.submit]
        transport_to_all(fake.url, leader.url).call("POST", "/v1/jobs", json_body={"spec": {}})
        keys = {request.headers["idempotency-key"] for request in (*fake.requests, *leader.requests)}
        assert len(keys) == 1
        assert (len(fake.requests), len(leader.requests)) == (2, 2)


def test_frozen_control_plane_is_skipped_sooner_if_there_are_others(
    fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers["GET", "/v1/me"] = {"user": "ana"}
    monkeypatch.setattr(transport_module, "PASS_OVER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        assert transport_to_all(url, fake.url).call("GET", "/v1/me") == {"user": "ana"}


def test_only_known_control_plane_on_standby_is_not_waited_for(fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/me"] = STANDS_BY
    with pytest.raises(StandingBy, match="http://b leads") as caught:
        transport_to(fake.url).call("GET", "/v1/me")
    assert len(fake.requests) == 1
    assert caught.value.exit_code == 6


def test_address_whose_leader_changes_is_retried(fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/me"] = [{"user": "ana"}, STANDS_BY, {"user": "ana"}]
    transport = transport_to(fake.url)
    assert [transport.call("GET", "/v1/me") for _ in range(2)] == [{"user": "ana"}] * 2


def test_stream_continues_at_the_next_control_plane(fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/events/stream"] = STANDS_BY
    with running_fake() as leader:
        leader.answers["GET", "/v1/events/stream"] = (500, {"code": "bug", "detail": "it was asked"})
        with pytest.raises(Bug, match="it was asked"):
            next(follow(transport_to_all(fake.url, leader.url), "/v1/events/stream"))


def test_addresses_with_commas_are_control_planes_of_one_cluster(tmp_path: Path) -> None:
    Credentials(tmp_path).save("https://a:1,https://b:2", TOKEN)
    env = {"SHOAL_HOME": str(tmp_path), "SHOAL_URL": "https://a:1/, https://b:2/"}
    endpoint = find_endpoint(env)
    assert [(address.url, address.token) for address in (endpoint, *endpoint.others)] == [
        ("https://a:1", TOKEN),
        ("https://b:2", TOKEN),
    ]
