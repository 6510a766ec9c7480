"""A node agent's requests to the control planes over TLS: fetch the task spec, send the log and the outcome.

The client talks only to servers that show a certificate of the cluster's own authority. It tries the
addresses in turn, and skips a control plane that is away or is a standby.
"""

from __future__ import annotations

import http.client
import os
import ssl
from typing import TypeVar

import msgspec

from shoal.proof import sign_for
from shoal.runtime.lease.addresses import MAX_ADDRESSES
from shoal.runtime.lease.http_exchange import MAX_HEAD, BoundedConnection
from shoal.wire import (
    AGENT_CONTACT_S,
    AGENT_REPLY_S,
    StatusReply,
    StatusReport,
    TaskAssignment,
    TaskSpecRequest,
)

SHORT_TIMEOUT_S, LONG_TIMEOUT_S = AGENT_CONTACT_S, AGENT_REPLY_S
"""The short timeout is for the TLS handshake and for a reply to a request without a log chunk. The long one
is for everything else.
"""
CHUNK_BYTES = 1 << 20
MAX_REPLY = 8 << 20
REFUSALS = (http.client.FORBIDDEN, http.client.CONFLICT, http.client.UNAUTHORIZED)
"""Statuses by which a control plane that leads refuses for good. Every other status (404 from a control plane
with another home, 5xx) counts as no answer.
"""


T = TypeVar("T")


class ControlPlaneRefused(Exception):
    """A control plane refused, and will refuse again. `is_stale`: another process has the task now."""

    def __init__(self, message: str, *, is_stale: bool = False) -> None:
        super().__init__(message)
        self.is_stale = is_stale


class ControlPlaneUnreachable(Exception):
    """No control plane gave an answer. This says nothing about what happened to the request."""


class ControlPlaneClient:
    """Client for one task. Blocking; for one thread."""

    def __init__(self, urls: tuple[str, ...], ca: str) -> None:
        self._urls = list(urls)
        self._tls_context = ssl.create_default_context(cadata=ca)
        self._tls_context.minimum_version = ssl.TLSVersion.TLSv1_2

    def fetch_task(self, bootstrap_token: str, request: TaskSpecRequest) -> TaskAssignment:
        """Return the task spec, for this process only. `ControlPlaneRefused`: it will never get it."""
        body = msgspec.json.encode(request)
        reply = self._post("/v1/mailbox/fetch", bootstrap_token, body, "application/json")
        return _decode(reply, TaskAssignment)

    def fetch_archive(self, bootstrap_token: str, request: TaskSpecRequest, path: str) -> None:
        """Save the workdir snapshot at `path`. The supervisor checks its digest."""
        self._post(
            "/v1/mailbox/archive", bootstrap_token, msgspec.json.encode(request), "application/json", path
        )

    def send_report(self, key: str, report: StatusReport, chunk: bytes) -> StatusReply:
        """Send a status report with a chunk of the log, which may be empty."""
        body = msgspec.json.encode(report) + b"\n" + chunk
        token = sign_for(key, report.attempt_id, report.node, body)
        timeout_s = LONG_TIMEOUT_S if chunk else SHORT_TIMEOUT_S
        reply = self._post(
            "/v1/mailbox/dispatch", token, body, "application/octet-stream", reply_timeout_s=timeout_s
        )
        status = _decode(reply, StatusReply)
        self.add_urls(status.control_urls)
        return status

    def add_urls(self, urls: tuple[str, ...]) -> None:
        """Add the control planes of the cluster, as the last reply named them.

        The client tries the one that replied first, then these, then older ones. It forgets the oldest.
        """
        self._urls = list(dict.fromkeys((*self._urls[:1], *urls, *self._urls)))[:MAX_ADDRESSES]

    def _post(
        self,
        path: str,
        token: str,
        body: bytes,
        kind: str,
        save_as: str | None = None,
        reply_timeout_s: float = LONG_TIMEOUT_S,
    ) -> bytes:
        """Return the reply of the first control plane that gives one. The next request tries it first."""
        reasons = []
        for url in tuple(self._urls):
            try:
                reply = self._post_to(url, path, token, body, kind, save_as, reply_timeout_s)
            except (OSError, ValueError, http.client.HTTPException, ControlPlaneUnreachable) as error:
                reasons.append(f"{url}: {type(error).__name__}: {error}")
                continue
            self._urls.remove(url)
            self._urls.insert(0, url)
            return reply
        raise ControlPlaneUnreachable("; ".join(reasons) or "no address of a control plane is known")

    def _post_to(
        self,
        url: str,
        path: str,
        token: str,
        body: bytes,
        kind: str,
        save_as: str | None,
        reply_timeout_s: float,
    ) -> bytes:
        # The kernel of a frozen process still accepts connections, but no certificate comes.
        with BoundedConnection(url, self._tls_context, SHORT_TIMEOUT_S, 0) as line:
            line.set_limits(reply_timeout_s, MAX_HEAD + MAX_REPLY)
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            reply = line.post(path, headers, body)
            if reply.status == http.client.OK and save_as is not None:
                _save(line, reply, save_as)
                return b""
            data = reply.read(MAX_REPLY)
        if reply.status == http.client.OK:
            return data
        excerpt = data[:500].decode("utf-8", "replace")
        if reply.status in REFUSALS:
            raise ControlPlaneRefused(
                f"{url} answered {reply.status}: {excerpt}", is_stale=reply.status == http.client.CONFLICT
            )
        raise ControlPlaneUnreachable(f"answered {reply.status}: {excerpt}")


def _decode(data: bytes, kind: type[T]) -> T:
    """Decode a reply. `ControlPlaneUnreachable`: the reply is malformed."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise ControlPlaneUnreachable(f"a malformed reply: {type(error).__name__}: {error}") from error


def _save(connection: BoundedConnection, reply: http.client.HTTPResponse, path: str) -> None:
    """Save the body at `path`. Each chunk gets the whole timeout, because a snapshot may take any time."""
    size, wanted = 0, reply.length
    if wanted is None:
        raise ControlPlaneUnreachable("the snapshot came without its size")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        # `http.client` reports no error for a body that ends too soon, so the size is compared below.
        while piece := reply.read(min(CHUNK_BYTES, wanted - size)):
            size += file.write(piece)
            connection.set_limits(LONG_TIMEOUT_S, MAX_HEAD + CHUNK_BYTES)  # `http.client` reads ahead
    if size != wanted:
        raise ControlPlaneUnreachable(f"only {size} of {wanted} bytes of the snapshot came")
