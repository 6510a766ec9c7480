"""Try a listener with requests from standard input: `python -m tests.support.faults.listener_probe HOST PORT
[S] < TRIES`.

A program of its own, so that it can be run in another network. A try is a name, whether to speak TLS (to
whoever is there, whatever its certificate), the bytes to send, and papers to show, or nothing. Prints what
became of each by its name: a status, `closed` without a word, `no TLS`, `silent` for S seconds, or the
first bytes of what is none of these.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys

from shoal.sidecar_tls import client_context
from shoal.wire import TlsIdentity

TIMEOUT_S = 30.0
REST_S = 0.3
CLOSED, NO_TLS, SILENT = "closed", "no TLS", "silent"


def probe(
    host: str,
    port: int,
    raw: bytes,
    *,
    is_tls: bool,
    identity: TlsIdentity | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    try:
        plain = socket.create_connection((host, port), timeout=timeout_s)
    except TimeoutError:
        return SILENT
    with plain:
        link = plain
        if is_tls:
            trust = ssl.create_default_context() if identity is None else client_context(identity)
            trust.set_alpn_protocols([])
            trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
            try:
                link = trust.wrap_socket(plain)
            except (ssl.SSLError, ConnectionError):
                return NO_TLS
            except TimeoutError:
                return SILENT
        try:
            link.sendall(raw)
            told = link.recv(4096)
        except (ssl.SSLError, ConnectionError):
            return CLOSED
        except TimeoutError:
            return SILENT
        told += _rest(link) if told else b""
    if not told:
        return CLOSED
    words = told.split(None, 2)
    if words[0].startswith(b"HTTP/1.") and len(words) > 1:
        return words[1].decode("ascii", "replace")
    return repr(told[:80])


def _rest(link: socket.socket) -> bytes:
    """What follows a first piece at once: an answer may come in several."""
    link.settimeout(REST_S)
    rest = b""
    try:
        while len(rest) < 4096 and (piece := link.recv(4096)):
            rest += piece
    except OSError:
        pass  # that was all, or it hung up on us
    return rest


def request(method: str, path: str, host: str, token: str | None, body: bytes, kind: str) -> bytes:
    """One HTTP request, after whose answer the connection is closed."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"Authorization: Bearer {token}"] if token is not None else []
    lines += [f"Content-Type: {kind}", f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def main(host: str, port: str, timeout_s: str = str(TIMEOUT_S)) -> int:
    tries = json.load(sys.stdin)
    told = {}
    for name, is_tls, raw, *shown in tries:
        identity = TlsIdentity(**shown[0]) if shown else None
        told[name] = probe(
            host,
            int(port),
            raw.encode("latin-1"),
            is_tls=is_tls,
            identity=identity,
            timeout_s=float(timeout_s),
        )
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
