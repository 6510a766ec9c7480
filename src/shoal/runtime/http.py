"""One question to the control plane. Imported late, by the renewal thread alone: ranks do not wait for it.

The port may belong to somebody else by now. Only an answer that proves who gave it is one; what that one
says about our attempt, refusals included, says nothing. And we give away nothing that could be used again:
each question is signed for itself.
"""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.parse

import msgspec

from shoal.proof import VERSION, is_proven, sign
from shoal.wire import Credentials, Renewal, RenewalAnswer

MAX_ANSWER = 65536
NONCE_BYTES = 16
_ANSWER = msgspec.json.Decoder(RenewalAnswer)  # once: two threads ask, and may be answered at the same time


def ask(
    url: str, credentials: Credentials, renewal: Renewal, timeout_s: float, ca_file: str | None = None
) -> RenewalAnswer | None:
    """The control plane's answer; None when there was none, which says nothing about what happened."""
    nonce = os.urandom(NONCE_BYTES).hex()
    renewal = msgspec.structs.replace(renewal, nonce=nonce, proof_version=VERSION)
    asked = msgspec.json.encode(renewal)
    told = _post(url, sign(credentials.proof_key, renewal, asked), asked, timeout_s, ca_file)
    try:
        answer = _ANSWER.decode(told)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return answer if is_proven(credentials.proof_key, renewal, answer) else None


def _post(url: str, token: str, body: bytes, timeout_s: float, ca_file: str | None) -> bytes:
    """What came back with status 200; empty for everything else."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection: http.client.HTTPConnection
    try:
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            trust = ssl.create_default_context(cafile=ca_file)
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trust)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    except (OSError, ValueError, http.client.HTTPException):
        return b""
    try:
        connection.request("POST", parts.path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.read(MAX_ANSWER) if answer.status == http.client.OK else b""
    except (OSError, ValueError, http.client.HTTPException):
        return b""
    finally:
        connection.close()
