"""One question to the control plane. Imported late, by the renewal thread alone: ranks do not wait for it.

The port may belong to somebody else by now. Only an answer that proves who gave it is one; what that one
says about our attempt, refusals included, says nothing. And we give away nothing that could be used again:
each question is signed for itself. Nor does a stranger take our time: whatever is said there, and however
slowly, is a silence of `timeout_s` at most.
"""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.parse

import msgspec

from shoal.proof import VERSION, is_proven, sign
from shoal.runtime.line import MAX_HEAD, Line
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
    token = sign(credentials.proof_key, renewal, asked)
    try:
        answer = _ANSWER.decode(_post(url, token, asked, timeout_s, ca_file))
        return answer if is_proven(credentials.proof_key, renewal, answer) else None
    except Exception:  # noqa: BLE001 - nobody knows all that a stranger's words do to a parser
        return None


def _post(url: str, token: str, body: bytes, timeout_s: float, ca_file: str | None) -> bytes:
    """What came back with status 200; empty for everything else."""
    trust = ssl.create_default_context(cafile=ca_file) if url.startswith("https:") else None
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with Line(url, trust, timeout_s, MAX_HEAD + MAX_ANSWER) as line:
        answer = line.post(urllib.parse.urlsplit(url).path, headers, body)
        return answer.read(MAX_ANSWER) if answer.status == http.client.OK else b""
