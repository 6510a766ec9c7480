"""The server process: `python -m shoal.cli.serve`, started by `shoal up` or by a service manager.

Takes the home, opens the control plane, listens, then tells where in `server.json`. Configured by
`SHOAL_*` variables alone: a database's password has no place in an argument list.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import anyio

from shoal.api.server import open_nodes_socket, open_socket, serve, serve_nodes
from shoal.cli import data_plane
from shoal.cli.home import (
    adopt_first_token,
    hold,
    own_port,
    prepare_home,
    remember_port,
    remove_server_file,
    write_server_file,
)
from shoal.cli.show import note, print_error
from shoal.control import ControlPlane
from shoal.control.authority import load_certificate
from shoal.errors import ShoalError, StateError
from shoal.home import last_port
from shoal.log import configure_log
from shoal.settings import Settings, load_settings

SWITCH_S = 0.0005
"""The event loop and the store's writer hand work to each other: every submit would feel Python's 5 ms."""


BACKEND = {"use_uvloop": True}


def main(*, is_foreground: bool = False) -> int:
    """Serve until SIGTERM or SIGINT. What runs on the nodes runs on afterwards."""
    try:
        _run(is_foreground=is_foreground)
    except ShoalError as error:
        print_error(error)
        return error.exit_code
    except BaseExceptionGroup as group:
        known = next((leaf for leaf in _leaves(group) if isinstance(leaf, ShoalError)), None)
        if known is None:
            raise
        print_error(known)
        return known.exit_code
    return 0


def _run(*, is_foreground: bool) -> None:
    tune()
    settings = load_settings()
    prepare_home(settings.home)
    with hold(settings.home):
        configure_log(None if is_foreground else settings.log_file)
        listener, taken = listen(settings, is_fixed=bool(os.environ.get("SHOAL_LISTEN")))
        # The port is known before the control plane opens: supervisors are told it with their orders.
        settings = replace(settings, port=listener.getsockname()[1])
        nodes = open_nodes_socket(settings) if settings.nodes_host else None
        if nodes is not None:
            settings = replace(settings, nodes_port=nodes.getsockname()[1])
        on_ready = partial(announce, settings, taken=taken, is_foreground=is_foreground)
        try:
            anyio.run(_serve, settings, listener, nodes, on_ready, backend_options=BACKEND)
        finally:
            remove_server_file(settings.home, os.getpid())


def tune() -> None:
    """Make this process a server: called once, when everything is imported and before anything runs."""
    sys.setswitchinterval(SWITCH_S)
    # What is loaded stays. Looked through by each full collection, it would stop every thread for 50 ms.
    gc.collect()
    gc.freeze()


async def _serve(
    settings: Settings,
    listener: socket.socket,
    nodes: socket.socket | None,
    on_ready: Callable[[str], None],
) -> None:
    async with ControlPlane.open(settings) as plane, anyio.create_task_group() as beside:
        beside.start_soon(data_plane.keep, settings, plane)
        is_over = anyio.Event()
        if nodes is not None:
            files = load_certificate(settings, plane.core.clock)
            beside.start_soon(partial(serve_nodes, plane, nodes, *files, until=is_over))
        await serve(settings, plane, listener=listener, on_ready=on_ready)
        is_over.set()
        beside.cancel_scope.cancel()


def listen(settings: Settings, *, is_fixed: bool) -> tuple[socket.socket, int | None]:
    """A listening socket, and the first port tried for it that was taken.

    Where no port was asked for: this home's own, else the last one, else the default, else any.
    """
    if is_fixed and settings.port:
        return open_socket(settings), None
    taken = None
    for port in (own_port(settings.home), last_port(settings.home), settings.port):
        if port:
            with contextlib.suppress(StateError):
                return open_socket(replace(settings, port=port)), taken
            taken = taken or port
    return open_socket(replace(settings, port=0)), taken


def announce(settings: Settings, url: str, *, taken: int | None, is_foreground: bool) -> None:
    """It answers: tell clients and supervisors where."""
    facts: dict[str, str | int | None] = {"url": settings.url, "pid": os.getpid()}
    facts |= {"path": os.environ.get("PATH", os.defpath), "taken_port": taken}
    if is_foreground:
        facts["is_foreground"] = 1  # somebody else starts it again
    if settings.tls_cert:
        facts["tls_cert"] = str(settings.tls_cert)
    write_server_file(settings.home, facts)
    remember_port(settings.home, settings.port)
    if is_foreground:
        token = adopt_first_token(settings.home)
        note(f"listening on {url}")
        if token and sys.stderr.isatty():
            note(f"admin token, shown this once: {token}")


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


if __name__ == "__main__":
    sys.exit(main())
