"""Row 53 for the embedded data plane: it ends every connection that a caller leaves half done, by itself.

The states are those of the control plane's listener.
"""

from __future__ import annotations

import asyncio

import pytest

from shoal.serving import housekeeping
from shoal.serving.proxy import body_reader, caller_flow, downstream, half_closed
from tests.support.faults.connection_states import ConnectionState, run_state, states_of
from tests.support.planes.world import connect_client
from tests.support.serving.data_plane_lab import Conversation, private_service, reply, running_lab, service

KERNEL_BYTES = 12 << 20
"""The most that the kernel's buffers hold for one connection over loopback, whatever the server reads."""
HASTY = (
    (downstream, "HEAD_S", 0.2),
    (downstream, "IDLE_S", 0.3),
    (downstream, "LINGER_S", 0.2),
    (downstream, "BODY_S", 0.3),
    (body_reader, "BODY_S", 0.3),
    (downstream, "STALL_S", 0.3),
    (caller_flow, "STALL_S", 0.3),
    (half_closed, "QUIET_S", 0.2),
)
OPEN = "/p/open/"
"""A public service: its replica gets the request."""
ROUTES = [("GET", "/-/health"), ("GET", "/p/closed/"), ("POST", "/p/closed/"), ("POST", OPEN)]
"""Without a token."""
CASES = [
    (f"{method} {path}", state)
    for method, path in ROUTES
    for state in states_of(method, path)
    if state.reads or path != OPEN
]
"""Requests behind requests occupy a replica as long as its replies take: `test_read_ahead.py` has
those unread.
"""


async def answer_at_once(seen: Conversation) -> None:
    """A body may go on for as long as its replica reads it, so this replica does not read it."""
    await seen.send(reply(b"ok", "200 OK", "connection: close"))
    await seen.reader.read()


def ask_another(port: int) -> None:
    with connect_client(port, 5) as link:
        link.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % OPEN.encode())
        answer = b""
        while piece := link.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "title,state", CASES, ids=[f"{title}: {state.name}".replace(" ", "-") for title, state in CASES]
)
async def test_a_connection_in_any_state_is_closed_while_others_are_answered(
    title: str, state: ConnectionState, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, seconds in HASTY:
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(housekeeping, "SWEEP_INTERVAL_S", 0.05)
    async with running_lab() as lab:
        replica = await lab.add_replica("one", answer_at_once)
        lab.serve(private_service(replica, name="closed"), service(replica, name="open"))
        with connect_client(lab.port, 5, receive_bytes=None if state.reads else 4096) as link:
            ended = await asyncio.to_thread(run_state, link, state, lambda: ask_another(lab.port))
    assert ended.is_closed, f"{title} is held: {ended.num_sent} bytes were taken"
    assert ended.num_sent < KERNEL_BYTES
