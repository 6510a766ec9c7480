"""The server process: `python -m shoal.cli.control_plane.server`, started by `shoal up` or a service manager.

It locks the home, opens the control plane, listens, and then writes its address to `server.json`. While
another control plane leads it stands by, and again after it was deposed. Only `SHOAL_*` variables configure
it, because a database's password does not belong in an argument list.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NoReturn, Protocol

import anyio
import structlog

from shoal.api.http.server import (
    MAX_CONNECTIONS,
    listen_for_nodes,
    open_nodes_socket,
    open_socket,
    serve,
    serve_nodes,
)
from shoal.cli.backup import database_copy
from shoal.cli.control_plane import data_plane, standby
from shoal.cli.control_plane.home import (
    SQLITE,
    adopt_first_token,
    certificates_in,
    hold,
    own_port,
    prepare_home,
    refuse_unsafe_files,
    remember_port,
    remove_server_file,
    write_leader_file,
    write_server_file,
)
from shoal.cli.output import note, print_error
from shoal.control import Core
from shoal.control.bootstrap import load_certificate
from shoal.control.capabilities import Leadership
from shoal.control.loops.runner import run_loops
from shoal.control.opening import open_core
from shoal.errors import AlreadyLed, HomeMissing, ShoalError, StateError, StoreUnavailable
from shoal.home import last_port
from shoal.log import configure_log
from shoal.serving.processes import raise_limit
from shoal.settings import Settings, load_settings
from shoal.store.threaded import ThreadedStore

SWITCH_S = 0.0005
"""The event loop and the store's writer hand work to each other, so every submit would feel Python's 5 ms."""


BACKEND = {"use_uvloop": True}
END_S = 10.0
"""Time to release everything at the end. If a database hangs, the process is killed, which is safe."""
FOREGROUND, DEPOSED = "--foreground", "--deposed"

log = structlog.get_logger()


class Announce(Protocol):
    def __call__(self, url: str, *, role: str = ..., leader: str | None = ...) -> None: ...


def main(*, is_foreground: bool = False, is_deposed: bool = False) -> int:
    """Serve until SIGTERM or SIGINT. Jobs on the nodes keep running afterwards.

    `is_deposed`: this process led before, and another control plane leads now.
    """
    os.umask(0o077)
    try:
        _run(is_foreground=is_foreground, is_deposed=is_deposed)
    except ShoalError as error:
        print_error(error)
        return error.exit_code
    except BaseExceptionGroup as group:
        refusal = next((leaf for leaf in _leaves(group) if isinstance(leaf, ShoalError)), None)
        if refusal is None:
            raise
        print_error(refusal)
        return refusal.exit_code
    return 0


def _run(*, is_foreground: bool, is_deposed: bool) -> None:
    tune()
    settings = load_settings()
    prepare_home(settings.home)
    refuse_unsafe_files(settings)
    if settings.shared is not None and not is_deposed:
        prepare_home(settings.shared)  # a deposed leader stands by even if the directory is away now
    with hold(settings.home):
        configure_log(None if is_foreground else settings.log_file)
        listener, taken = listen(settings, is_fixed=bool(os.environ.get("SHOAL_LISTEN")))
        is_named = bool(os.environ.get("SHOAL_SERVE_ON"))
        # A deposed leader has a data plane, or will start one: a taken port must not end it.
        moved = None if is_deposed else data_plane.taken_port(settings, is_fixed=is_named)
        data_plane.hold_ports(settings, listener.getsockname()[1])
        # The port is known before the control plane opens, because supervisors get it with their task specs.
        settings = replace(settings, port=listener.getsockname()[1])
        on_ready = partial(announce, settings, taken=taken, moved=moved, is_foreground=is_foreground)
        step_down = partial(_restart_process, is_foreground=is_foreground)
        living = partial(_live, settings, listener, on_ready, step_down, is_deposed=is_deposed)
        try:
            anyio.run(living, backend_options=BACKEND)
        finally:
            remove_server_file(settings.home, os.getpid())


def tune() -> None:
    """Tune this process as a server: called once, when everything is imported and before anything runs."""
    # No more descriptors than it can use: jobs inherit the limit, and some programs close every possible one.
    raise_limit(2 * MAX_CONNECTIONS)
    sys.setswitchinterval(SWITCH_S)
    # Loaded objects stay. A full collection over them would stop every thread for 50 ms, so freeze them.
    gc.collect()
    gc.freeze()


async def _live(
    settings: Settings,
    listener: socket.socket,
    on_ready: Announce,
    step_down: Callable[[], NoReturn],
    *,
    is_deposed: bool,
) -> None:
    """Lead, after standing by as long as another control plane leads, until told to end.

    A first start that finds its database or shared directory missing ends with an error. A process that stood
    by or led before waits for them instead, because otherwise no process would be left to lead.
    """
    is_patient = is_deposed
    while True:
        if settings.shared is not None and (is_patient or not await standby.may_lead(settings)):
            is_patient = True
            announce_standby = partial(on_ready, role=standby.STANDBY)
            if not await standby.stand_by(settings, listener.dup(), announce_standby):
                return
        try:
            with listener.dup() as accepting:
                await _lead(settings, accepting, on_ready, step_down)
            return
        except (AlreadyLed, StoreUnavailable, HomeMissing) as error:
            # Another process took the lead, or the database or directory went away at that moment.
            is_away = not isinstance(error, AlreadyLed)
            if settings.shared is None or (is_away and not is_patient):
                raise
            log.warning("control.does_not_lead", error=error.message)
            await anyio.sleep(standby.AGAIN_S if is_away else 0.0)
        is_patient = True


async def _lead(
    settings: Settings, listener: socket.socket, on_ready: Announce, step_down: Callable[[], NoReturn]
) -> None:
    # Bound first, because supervisors get the port with their task specs. It listens only once this process
    # leads, so that clients pass over a standby at once.
    nodes = open_nodes_socket(settings) if settings.nodes_host else None
    with contextlib.ExitStack() as stack:
        if nodes is not None:
            stack.enter_context(nodes)
            settings = replace(settings, nodes_port=nodes.getsockname()[1])
        async with _opened(settings) as core, anyio.create_task_group() as beside:
            beside.start_soon(data_plane.supervise, settings, core.services, core.sealing.key)
            beside.start_soon(_watch_lead, core.leadership, step_down)
            if isinstance(core.records.store, ThreadedStore) and settings.store_url.startswith(SQLITE):
                beside.start_soon(database_copy.serve_requests, settings.home, core.records.store)
            is_over = anyio.Event()
            if nodes is not None:
                listen_for_nodes(nodes)
                certify = partial(load_certificate, settings, core.records.clock)
                beside.start_soon(partial(serve_nodes, core, nodes, certify, until=is_over))
            await serve(settings, core, listener=listener, on_ready=on_ready)
            exit_within(END_S)
            is_over.set()
            beside.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Core]:
    """Open the control plane. Raise `StoreUnavailable` also if the shared directory cannot be used (as with a
    stale network file handle), because half of the state is there.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            core = await stack.enter_async_context(open_core(settings))
            await stack.enter_async_context(run_loops(core))
        except OSError as error:
            if settings.shared is None:
                raise
            raise StoreUnavailable(
                f"{error.filename or settings.shared} cannot be used: {error.strerror or error}",
                hint=f"ls -la {settings.shared}",
            ) from error
        yield core


async def _watch_lead(leadership: Leadership, step_down: Callable[[], NoReturn]) -> None:
    await leadership.deposed.wait()
    log.warning("control.deposed", term=leadership.term)
    step_down()


def _restart_process(*, is_foreground: bool) -> NoReturn:
    """Replace this process by a new program, so that no state of the deposed leader is left."""
    removed = [DEPOSED, FOREGROUND] if is_foreground else [DEPOSED]
    os.execv(sys.executable, [sys.executable, "-m", "shoal.cli.control_plane.server", *removed])  # noqa: S606 - no shell is meant


def exit_within(seconds: float) -> None:
    """End this process after `seconds`, whatever it still waits for."""
    late = threading.Timer(seconds, os._exit, (1,))
    late.daemon = True
    late.start()


def listen(settings: Settings, *, is_fixed: bool) -> tuple[socket.socket, int | None]:
    """Return a listening socket, and the first port that was taken, if any.

    If no port was set: this home's own port, else the last one, else the default, else any.
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


def announce(
    settings: Settings,
    url: str,
    *,
    taken: int | None,
    is_foreground: bool,
    moved: int | None = None,
    role: str = standby.LEADER,
    leader: str | None = None,
) -> None:
    """Tell clients and supervisors where this process answers.

    `leader`: the leader that a standby waits for. `taken`, `moved`: the usual ports of the server and of
    services, if they were taken.
    """
    facts: dict[str, str | int | None] = {"url": settings.url, "pid": os.getpid(), "role": role}
    facts["home"] = str(settings.home)
    facts |= {"path": os.environ.get("PATH", os.defpath), "taken_port": taken, "leader": leader}
    facts["taken_serve_port"] = moved
    if is_foreground:
        facts["is_foreground"] = 1  # a service manager starts it again
    if settings.tls_cert:
        facts["tls_cert"] = str(settings.tls_cert)
        facts["tls_pem"] = certificates_in(settings.tls_cert.read_text())  # for nodes on other machines
    if role == standby.LEADER and settings.shared is not None:
        write_leader_file(settings.leader_file, facts)  # before clients, because supervisors wait for it
    write_server_file(settings.home, facts)
    remember_port(settings.home, settings.port)
    if is_foreground:
        token = adopt_first_token(settings) if role == standby.LEADER else None
        note(f"listening on {url}" if role == standby.LEADER else f"standing by on {url}")
        if token and sys.stderr.isatty():
            note(f"admin token, shown this once: {token}")


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


if __name__ == "__main__":
    sys.exit(main(is_foreground=FOREGROUND in sys.argv, is_deposed=DEPOSED in sys.argv))
