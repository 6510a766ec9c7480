"""Probes a Ray head before a process is started for it: does it reply, and does it accept our credentials?

Ray itself does not say why it fails to connect, and tries for one or two minutes. So the probe first sends
one small question in gRPC's bytes, over TLS if certificates are configured. Within seconds it is known that
no process listens, that only one side uses TLS, whose certificate is rejected, whether the token is
accepted, and whether a token is required at all. Ray reports all other problems.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from shoal.engines.ray.config import RayConfig
from shoal.errors import EngineUnreachable, SpecError

METHOD_PATH = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""Asks about no node: the reply is short, and nothing changes."""
TIMEOUT_S = 10.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, GO_AWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 1, 4
EMPTY = b"\0\0\0\0\0"
"""A gRPC message with only default values."""
UNAUTHENTICATED = b"grpc-status\x0216"
"""As gRPC's library writes it: in letters."""


class RayProbeReply(StrEnum):
    ANSWERED = "answered"
    REFUSED = "refused"
    """Because the token is missing or wrong."""
    OTHER = "other"


def probe(config: RayConfig) -> None:
    """Probe the head. Blocks for seconds.

    `SpecError`: that Ray cannot, or must not, be used as `config` says. `EngineUnreachable`: no process
    replies.
    """
    # First without the token: a Ray that accepts every client must not get it.
    if _ask(config, None) is RayProbeReply.ANSWERED:
        raise SpecError(
            f"the Ray at {config.address} answers without a token: any client can run anything",
            hint="start its head and its nodes with `RAY_AUTH_MODE=token` (Ray 2.52 or later)",
        )
    if _ask(config, Path(config.token_file).read_text(encoding="utf-8").strip()) is RayProbeReply.REFUSED:
        raise SpecError(
            f"the Ray at {config.address} does not take the token in {config.token_file}",
            hint="`ray get-auth-token` on its head prints it: write that to the token file",
        )


def _ask(config: RayConfig, token: str | None) -> RayProbeReply:
    with _connected(config.address) as plain, _secured(config, plain) as link:
        scheme = "https" if config.tls_cert else "http"
        try:
            link.sendall(render_request(scheme, config.address, token))
            return _read_reply(link)
        except (OSError, EOFError) as error:
            # gRPC's library hangs up on a client with the wrong certificate.
            if config.tls_cert and not isinstance(error, TimeoutError):
                raise SpecError(
                    f"the Ray at {config.address} does not take {config.tls_cert}: {_reason(error)}",
                    hint="name one by its own authority: `--tls-cert FILE --tls-key FILE --tls-ca FILE`",
                ) from error
            if not config.tls_cert and _speaks_tls(config.address):
                raise SpecError(
                    f"the Ray at {config.address} speaks TLS, and no certificate of this machine's is named",
                    hint="`--tls-cert FILE --tls-key FILE --tls-ca FILE`",
                ) from error
            raise EngineUnreachable(
                f"the server at {config.address} does not speak Ray's protocol: {error}",
                hint="name the head's own port, 6379 unless `ray start --port` said another",
            ) from error


@contextlib.contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise SpecError(f"`{address}` is no HOST:PORT", hint="as in `--address 10.0.0.1:6379`")
    try:
        link = socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S)
    except OSError as error:
        raise EngineUnreachable(
            f"no process answers at {address}: {error.strerror or error}",
            hint="is Ray's head up, and is that its address? `ray status` there says so",
        ) from error
    with link:
        yield link


@contextlib.contextmanager
def _secured(config: RayConfig, plain: socket.socket) -> Iterator[socket.socket]:
    """Wrap the link as gRPC does: both sides show a certificate, and the head's must be for the name we
    called.
    """
    if not config.tls_cert:
        yield plain
        return
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        context.load_cert_chain(config.tls_cert, config.tls_key)
        # From Python 3.13 on, the default is stricter than gRPC, which accepts certificates of home-made
        # authorities.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    except ssl.SSLError as error:
        raise SpecError(
            f"{config.tls_cert}, {config.tls_key} and {config.tls_ca} are not a certificate, its key and an "
            f"authority: {_reason(error)}",
            hint="all three in PEM: `--tls-cert FILE --tls-key FILE --tls-ca FILE`",
        ) from error
    context.set_alpn_protocols(["h2"])
    host = config.address.rpartition(":")[0].strip("[]")
    try:
        link = context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise SpecError(
            f"the certificate of the Ray at {config.address} is none that {config.tls_ca} stands for: "
            f"{error.verify_message}",
            hint="name the authority of its certificates: `--tls-ca FILE`",
        ) from error
    except (OSError, EOFError) as error:
        raise SpecError(
            f"the Ray at {config.address} does not speak TLS with this machine: {_reason(error)}",
            hint="leave out `--tls-cert`, `--tls-key` and `--tls-ca`, or start Ray with `RAY_USE_TLS=1`",
        ) from error
    with link:
        yield link


def _speaks_tls(address: str) -> bool:
    """Return whether the server speaks TLS, even if it rejects us."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with _connected(address) as plain:
        try:
            with context.wrap_socket(plain):
                return True
        except ssl.SSLError as error:
            return "alert" in _reason(error)
        except (OSError, EOFError):
            return False


def render_request(scheme: str, address: str, token: str | None) -> bytes:
    """Return all bytes that are sent: one gRPC call in HTTP/2, with an empty message."""
    headers = {
        ":method": "POST",
        ":scheme": scheme,
        ":path": METHOD_PATH,
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    # Each header by name and value, in letters, so that the reader's table does not change.
    block = b"".join(b"\0" + _encode_string(name) + _encode_string(value) for name, value in headers.items())
    return b"".join(
        (
            PREFACE,
            frame(SETTINGS, 0, 0, b""),
            frame(HEADERS, END_HEADERS, 1, block),
            frame(DATA, END_STREAM, 1, EMPTY),
        )
    )


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack("!I", len(body))[1:] + struct.pack("!BBI", kind, flags, stream) + body


def _encode_string(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    length, left = b"\x7f", len(data) - 127
    while left >= 128:
        length, left = length + bytes([left % 128 + 128]), left // 128
    return length + bytes([left]) + data


def _read_reply(link: socket.socket) -> RayProbeReply:
    """Read the reply. `EOFError`: the server hung up before it said anything useful."""
    while True:
        head = _read_exactly(link, 9)
        length, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
        if length > 1 << 14:
            raise EOFError("it speaks no HTTP/2")
        body = _read_exactly(link, length)
        if kind == DATA:
            return RayProbeReply.ANSWERED
        if kind == HEADERS and flags & END_STREAM:
            return RayProbeReply.REFUSED if UNAUTHENTICATED in body else RayProbeReply.OTHER
        if kind in (RESET, GO_AWAY):
            return RayProbeReply.OTHER


def _read_exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more:
            raise EOFError("it hung up")
        data += more
    return data


def _reason(error: BaseException) -> str:
    """Return OpenSSL's reason, without its source location."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(getattr(error, "strerror", None) or error)
