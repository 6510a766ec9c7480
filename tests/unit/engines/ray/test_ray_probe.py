"""A knock at the transports that a Ray may have: of transports on paper, which say what gRPC's library
says."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from shoal.engines.ray.config import RayConfig
from shoal.engines.ray.probe import (
    DATA,
    EMPTY,
    END_HEADERS,
    END_STREAM,
    GO_AWAY,
    HEADERS,
    SETTINGS,
    frame,
    probe,
    render_request,
)
from shoal.errors import EngineUnreachable, SpecError
from tests.support.ray.tls import RayTls

HELLO = frame(SETTINGS, 0, 0, b"\0\x03\0\0\0\x64")
ANSWER = frame(HEADERS, END_HEADERS, 1, b"\x88") + frame(DATA, 0, 1, EMPTY)
NO = frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x88\0\x0bgrpc-status\x0216")
UNKNOWN = frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x88\0\x0bgrpc-status\x0212")
LONG = "t" * 300
"""A token whose length takes two bytes more."""


def wants(token: str) -> Callable[[bytes], bytes]:
    return lambda requested: ANSWER if f"Bearer {token}".encode() in requested else NO


@contextmanager
def door(says: Callable[[bytes], bytes], secured: ssl.SSLContext | None = None) -> Iterator[str]:
    """Its address. It hears a question out and says what `says` makes of it, after a greeting."""

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), plain:
                link = secured.wrap_socket(plain, server_side=True) if secured is not None else plain
                with link:
                    requested = b""
                    while not requested.endswith(EMPTY):
                        more = link.recv(4096)
                        if not more:
                            break
                        requested += more
                    link.sendall(HELLO + says(requested))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    serving.join()


@pytest.fixture
def config(tmp_path: Path) -> RayConfig:
    token = tmp_path / "token"
    token.write_text(f"{LONG}\n")
    return RayConfig(address="127.0.0.1:1", token_file=str(token))


@pytest.fixture
def tls(tmp_path: Path) -> RayTls:
    created = RayTls(tmp_path / "tls")
    created.make({"127.0.0.1"})
    return created


def secured(tls: RayTls) -> ssl.SSLContext:
    """As Ray's head: who shows no certificate by its authority is sent away."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    context.load_verify_locations(tls.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


def at(config: RayConfig, address: str, tls: RayTls | None = None) -> RayConfig:
    shown = {"tls_cert": str(tls.cert), "tls_key": str(tls.key), "tls_ca": str(tls.ca)} if tls else {}
    return msgspec.structs.replace(config, address=address, **shown)


def refused(config: RayConfig, address: str, tls: RayTls | None = None) -> SpecError:
    with pytest.raises(SpecError) as raised:
        probe(at(config, address, tls))
    assert raised.value.hint
    return raised.value


def test_a_question_is_read_as_http_2() -> None:
    request = render_request("http", "h:1", LONG)
    assert request.startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert b"\0\x0dauthorization\x7f\xb4\x01Bearer ttt" in request  # 127 and 52 and 1 x 128 letters
    assert b"authorization" not in render_request("http", "h:1", None)


def test_ray_that_requires_our_token_is_accepted(config: RayConfig) -> None:
    with door(wants(LONG)) as address:
        probe(at(config, address))


def test_a_wrong_token_is_said_to_be_one(config: RayConfig) -> None:
    with door(wants("another")) as address:
        error = refused(config, address)
    assert f"does not take the token in {config.token_file}" in error.message
    assert "ray get-auth-token" in (error.hint or "")


def test_a_ray_that_wants_no_token_is_refused_and_is_not_shown_it(config: RayConfig) -> None:
    received: list[bytes] = []

    def answers(requested: bytes) -> bytes:
        received.append(requested)
        return ANSWER

    with door(answers) as address:
        error = refused(config, address)
    assert "answers without a token" in error.message
    assert "RAY_AUTH_MODE=token" in (error.hint or "")
    assert not any(b"Bearer" in requested for requested in received)


@pytest.mark.parametrize("reply", [UNKNOWN, frame(GO_AWAY, 0, 0, b"\0" * 8)])
def test_unclear_probe_reply_is_left_to_ray(config: RayConfig, reply: bytes) -> None:
    with door(lambda _: reply) as address:
        probe(at(config, address))


def test_closed_port_is_reported_at_once(config: RayConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(EngineUnreachable, match=f"no process answers at {address}: Connection refused"):
        probe(at(config, address))


def test_server_with_another_protocol_is_no_ray(config: RayConfig) -> None:
    with (
        door(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as address,
        pytest.raises(EngineUnreachable, match="does not speak Ray's protocol"),
    ):
        probe(at(config, address))


@pytest.mark.parametrize("address", ["auto", "10.0.0.1", ":6379", "h:port"])
def test_an_address_without_a_port_is_refused(config: RayConfig, address: str) -> None:
    assert "is no HOST:PORT" in refused(config, address).message


def test_over_tls_it_is_asked_the_same(config: RayConfig, tls: RayTls) -> None:
    with door(wants(LONG), secured(tls)) as address:
        probe(at(config, address, tls))
    with door(wants("another"), secured(tls)) as address:
        assert "does not take the token" in refused(config, address, tls).message


def test_a_ray_with_tls_wants_certificates(config: RayConfig, tls: RayTls) -> None:
    with door(wants(LONG), secured(tls)) as address:
        error = refused(config, address)
    assert "speaks TLS, and no certificate of this machine's is named" in error.message
    assert "--tls-cert" in (error.hint or "")


def test_certificates_are_for_a_ray_with_tls(config: RayConfig, tls: RayTls) -> None:
    with door(wants(LONG)) as address:
        assert "does not speak TLS" in refused(config, address, tls).message


def test_a_head_by_another_authority_is_not_trusted(config: RayConfig, tls: RayTls, tmp_path: Path) -> None:
    strange = RayTls(tmp_path / "strange")
    strange.make({"127.0.0.1"})
    with door(wants(LONG), secured(tls)) as address:
        error = refused(config, address, strange)
    assert f"is none that {strange.ca} stands for" in error.message


def test_a_certificate_that_the_head_does_not_take_is_said_to_be_one(
    config: RayConfig, tls: RayTls, tmp_path: Path
) -> None:
    strange = RayTls(tmp_path / "strange")
    strange.make({"127.0.0.1"})
    strange.ca = tls.ca
    with door(wants(LONG), secured(tls)) as address:
        error = refused(config, address, strange)
    assert f"does not take {strange.cert}" in error.message


def test_a_key_of_another_certificate_is_said_to_be_one(
    config: RayConfig, tls: RayTls, tmp_path: Path
) -> None:
    strange = RayTls(tmp_path / "strange")
    strange.make({"127.0.0.1"})
    tls.key = strange.key
    with door(wants(LONG)) as address:
        assert "are not a certificate, its key" in refused(config, address, tls).message
