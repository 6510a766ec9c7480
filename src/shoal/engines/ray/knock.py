"""A knock at a Ray's door, before a process is started for it: who is there, and does it take what we show?

Ray itself tells nobody why it does not answer, and tries for one or two minutes. So its head is asked one
small question first, in gRPC's bytes, over TLS where certificates are named: in seconds it is known that
nobody is there, that one of both sides speaks TLS and the other does not, whose certificate is not taken,
whether the token is, and whether one is wanted at all. What is none of these is left to Ray to say.
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

QUESTION = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""About no node: the answer is short, and changes nothing."""
TIMEOUT_S = 10.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, GO_AWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 1, 4
EMPTY = b"\0\0\0\0\0"
"""A message of gRPC's in which everything has its default."""
UNAUTHENTICATED = b"grpc-status\x0216"
"""As gRPC's library writes it: in letters."""


class Reply(StrEnum):
    ANSWERED = "answered"
    REFUSED = "refused"
    """For want of a token, or of the right one."""
    OTHER = "other"


def knock(config: RayConfig) -> None:
    """Blocking, for seconds. `SpecError`: that Ray cannot, or must not, be used as `config` says.
    `EngineUnreachable`: nobody answers there.
    """
    # First without the token: who takes everybody does not get it.
    if _ask(config, None) is Reply.ANSWERED:
        raise SpecError(
            f"the Ray at {config.address} answers who shows no token: whoever reaches it runs what he likes",
            hint="start its head and its nodes with `RAY_AUTH_MODE=token` (Ray 2.52 or later)",
        )
    if _ask(config, Path(config.token_file).read_text(encoding="utf-8").strip()) is Reply.REFUSED:
        raise SpecError(
            f"the Ray at {config.address} does not take the token in {config.token_file}",
            hint="`ray get-auth-token` on its head prints it: write that to the token file",
        )


def _ask(config: RayConfig, token: str | None) -> Reply:
    with _connected(config.address) as plain, _secured(config, plain) as link:
        scheme = "https" if config.tls_cert else "http"
        try:
            link.sendall(question(scheme, config.address, token))
            return _reply(link)
        except (OSError, EOFError) as error:
            # gRPC's library hangs up on who shows the wrong one.
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
                f"who is at {config.address} does not speak as a Ray does: {error}",
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
            f"nobody answers at {address}: {error.strerror or error}",
            hint="is Ray's head up, and is that its address? `ray status` there says so",
        ) from error
    with link:
        yield link


@contextlib.contextmanager
def _secured(config: RayConfig, plain: socket.socket) -> Iterator[socket.socket]:
    """As gRPC does it: both show a certificate, and the head's must be for the name that it was called by."""
    if not config.tls_cert:
        yield plain
        return
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        context.load_cert_chain(config.tls_cert, config.tls_key)
        # From Python 3.13 on it is stricter than gRPC, which takes what home-made authorities have signed.
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
    """Whatever it thinks of us."""
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


def question(scheme: str, address: str, token: str | None) -> bytes:
    """All that is sent: one call of gRPC's in HTTP/2, with an empty message."""
    said = {
        ":method": "POST",
        ":scheme": scheme,
        ":path": QUESTION,
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if token is not None:
        said["authorization"] = f"Bearer {token}"
    # Each by name and value, in letters: a reader's table is left as it is.
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in said.items())
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


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    length, left = b"\x7f", len(data) - 127
    while left >= 128:
        length, left = length + bytes([left % 128 + 128]), left // 128
    return length + bytes([left]) + data


def _reply(link: socket.socket) -> Reply:
    """`EOFError`: it hung up before it said anything of use."""
    while True:
        head = _read(link, 9)
        length, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
        if length > 1 << 14:
            raise EOFError("it speaks no HTTP/2")
        body = _read(link, length)
        if kind == DATA:
            return Reply.ANSWERED
        if kind == HEADERS and flags & END_STREAM:
            return Reply.REFUSED if UNAUTHENTICATED in body else Reply.OTHER
        if kind in (RESET, GO_AWAY):
            return Reply.OTHER


def _read(link: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = link.recv(count - len(found))
        if not more:
            raise EOFError("it hung up")
        found += more
    return found


def _reason(error: BaseException) -> str:
    """OpenSSL's, without where in its source that was."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(getattr(error, "strerror", None) or error)
