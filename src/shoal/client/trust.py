"""To whom on this machine a token may go over plain HTTP.

A job can take the port of a server that is down. Asked after connecting, before anything is sent.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from shoal.client.credentials import Endpoint
from shoal.home import LOCK, holder
from shoal.loopback import FIRST_PROJECT_UID, Serving, Stranger, is_loopback, serving, sockets_of


def refuse_strangers(link: socket.socket, endpoint: Endpoint) -> int | None:
    """`Stranger` unless whoever reads `link` may be the server. Returns that user where it is known.

    The server of a home is the process that holds the home; without root, jobs have the same user. What
    other users run on this machine is known by the user: the one of the login, else nobody's project.
    """
    if endpoint.home is None and not is_loopback(link):
        return None
    found = serving(link)
    if found is None:
        return None
    port = link.getpeername()[1]
    is_own = endpoint.is_local or any(one.uid == os.geteuid() for one in found)
    if endpoint.home is not None and is_own:
        _refuse_other_processes(found, endpoint.home, port)
    else:
        _refuse_other_users(found, endpoint, port)
    return found[0].uid


def _refuse_other_processes(found: tuple[Serving, ...], home: Path, port: int) -> None:
    pid = holder(home)
    own = sockets_of(pid, with_open=home / LOCK) if pid else frozenset()
    for one in found:
        # What root runs can only be looked into by root; no job is root.
        if one.inode not in own and (one.uid != 0 or os.geteuid() == 0 or pid is None):
            runs = f"process {pid} is the control plane" if pid else "no control plane runs"
            raise Stranger(f"{runs} in {home}, and port {port} is held by {one}", "start it with `shoal up`")


def _refuse_other_users(found: tuple[Serving, ...], endpoint: Endpoint, port: int) -> None:
    known = endpoint.listener_uid
    for one in found:
        if known is not None and one.uid != known:
            raise Stranger(
                f"port {port} is held by {one}; when you logged in it was user {known}",
                f"start the server again (`shoal up`), or if it moved: `shoal login {endpoint.url}`",
            )
        if one.uid >= FIRST_PROJECT_UID:
            raise Stranger(
                f"port {port} is held by {one}, and users from {FIRST_PROJECT_UID} on are projects' jobs",
                "start the server again: `shoal up`",
            )
