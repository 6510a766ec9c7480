"""One POST to the control plane. Imported late, by the renewal thread alone: ranks do not wait for it."""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.parse

import msgspec

from shoal.loopback import refuse_stranger
from shoal.wire import Renewal

MAX_ANSWER = 65536


def post(
    url: str, token: str, renewal: Renewal, timeout_s: float, ca_file: str | None = None
) -> tuple[int | None, bytes]:
    """The answer's status and body; None when there was no answer, which says nothing about what happened.

    A job that took the port of a control plane that is down gets nothing, and counts as no answer.
    """
    parts = urllib.parse.urlsplit(url)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    host, port = parts.hostname or "", parts.port
    connection: http.client.HTTPConnection
    try:
        if parts.scheme == "https":
            trust = ssl.create_default_context(cafile=ca_file)
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trust)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    except (OSError, ValueError, http.client.HTTPException):
        return None, b""
    try:
        connection.connect()
        if parts.scheme != "https":
            # Nobody else's answer may stop the ranks, and nobody else may have the token.
            refuse_stranger(host, port or http.client.HTTP_PORT, {0, os.geteuid()})
        connection.request("POST", parts.path, body=msgspec.json.encode(renewal), headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_ANSWER)
    except (OSError, ValueError, http.client.HTTPException):
        return None, b""
    finally:
        connection.close()
