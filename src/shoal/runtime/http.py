"""One POST to the control plane. Imported late, by the renewal thread alone: ranks do not wait for it."""

from __future__ import annotations

import http.client
import urllib.parse

import msgspec

from shoal.wire import Renewal

MAX_ANSWER = 65536


def post(url: str, token: str, renewal: Renewal, timeout_s: float) -> tuple[int | None, bytes]:
    """The answer's status and body; None when there was no answer, which says nothing about what happened."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    except (OSError, ValueError, http.client.HTTPException):
        return None, b""
    try:
        connection.request("POST", parts.path, body=msgspec.json.encode(renewal), headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_ANSWER)
    except (OSError, ValueError, http.client.HTTPException):
        return None, b""
    finally:
        connection.close()
