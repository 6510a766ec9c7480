"""Listen on loopback, or elsewhere with TLS or behind a declared proxy, and never otherwise."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import anyio
import structlog
import uvicorn
from starlette.types import ASGIApp

from shoal.api.app import create_app
from shoal.api.http.connections import ConnectionSlots
from shoal.api.http.protocol import BoundedProtocol, ConnectionLimits
from shoal.control import Core
from shoal.errors import SpecError, StateError
from shoal.settings import Settings
from shoal.tls_listener import TlsListener

KEEP_ALIVE_S = 75
SHUTDOWN_S = 2
BACKLOG = 1024
UNSENT_BYTES = 128 << 10
"""Bytes of unread answers in the kernel, for each connection. The kernel's own bound is 4 MiB."""
MAX_CONNECTIONS = 4096
RENEW_EVERY_S = 86400.0
STOPPING = (signal.SIGINT, signal.SIGTERM)

log = structlog.get_logger()


def check_listen(settings: Settings) -> None:
    """Raise `SpecError` unless it is safe to listen on the address in the settings."""
    if settings.is_loopback or settings.tls_cert is not None or settings.is_behind_proxy:
        return
    raise SpecError(
        f"refusing to listen on {settings.host} without TLS: every token would cross the network in clear",
        hint="give `--tls-cert FILE --tls-key FILE`, or `--behind-proxy` if a proxy on the way does TLS",
    )


Certify = Callable[[], tuple[Path, Path]]
NODES_HINT = "give an address of this machine that the nodes reach: `export SHOAL_NODES_ON=ADDRESS:PORT`"


def open_socket(settings: Settings) -> socket.socket:
    """A listening socket, so that the port is known before it is announced."""
    check_listen(settings)
    hint = "look with `shoal status`, or let it choose a port: `shoal up --listen 127.0.0.1:0`"
    return _open(settings.host, settings.port, hint)


def open_nodes_socket(settings: Settings) -> socket.socket:
    """A socket for supervisors on other machines. Until it listens (`listen_for_nodes`) they are turned
    away, and ask another control plane.
    """
    return _open(settings.nodes_host, settings.nodes_port, NODES_HINT, is_listening=False)


def listen_for_nodes(listener: socket.socket) -> None:
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise StateError(f"cannot listen on {host}:{port}: {error.strerror}", hint=NODES_HINT) from error


def _open(host: str, port: int, hint: str, *, is_listening: bool = True) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listener.bind((host, port))
        if is_listening:
            listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003 - the name of the argument says less
    except OSError as error:
        listener.close()
        raise StateError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint=hint,
        ) from error
    return listener


async def serve(
    settings: Settings,
    core: Core,
    *,
    listener: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then return. Calls `on_ready` with the URL once it accepts
    connections.
    """
    listener = listener or open_socket(settings)
    server = make_server(create_app(core), settings)
    server.on_ready = partial(on_ready, url_of(settings, listener)) if on_ready else None
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()


def url_of(settings: Settings, listener: socket.socket) -> str:
    """The URL of the listener for a client on this machine."""
    port = listener.getsockname()[1]
    scheme, _, rest = settings.url.partition("://")
    return f"{scheme}://{rest.rpartition(':')[0]}:{port}"


async def serve_nodes(core: Core, listener: socket.socket, certify: Certify, *, until: anyio.Event) -> None:
    """Serve supervisors on other machines, over TLS by the home's own authority, until asked to end.

    `certify` returns files of a certificate and its key that stay valid for a while. It is called now and
    once a day, because a certificate that expired in a running process would end every job on other machines
    by its fence.
    """
    config = _configured(create_app(core), *certify())
    config.load()
    assert config.ssl is not None
    server = SecondaryServer(config)
    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            await until.wait()
            server.should_exit = True

        tasks.start_soon(stop)
        tasks.start_soon(_renew, config.ssl, certify)
        try:
            await server.serve(sockets=[listener])
        finally:
            listener.close()
            tasks.cancel_scope.cancel()


async def _renew(context: ssl.SSLContext, certify: Certify) -> None:
    """Make a live server use the newest certificate for new connections. Existing connections keep theirs."""
    while True:
        await anyio.sleep(RENEW_EVERY_S)
        try:
            files = await anyio.to_thread.run_sync(certify)
            context.load_cert_chain(*files)
        except (OSError, ValueError) as error:  # tried again, for weeks; `shoal doctor` shows the date
            log.warning("nodes.certificate_not_renewed", error=str(error))


class ApiServer(uvicorn.Server):
    """uvicorn that returns after a signal, so that the caller can close the control plane."""

    on_ready: Callable[[], None] | None = None
    is_asked_to_stop = False
    """A signal asked it to stop."""
    limits = ConnectionLimits()

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.slots = ConnectionSlots(max_connections())
        # Uvicorn warns of every unreadable request: lines that any stranger can write.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.is_asked_to_stop = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for listener in sockets or ():
            self.servers.append(await self._listen(listener))
        if self.on_ready is not None and not self.should_exit:
            self.on_ready()

    async def _listen(self, listener: socket.socket) -> asyncio.base_events.Server:
        config = self.config

        def connect() -> asyncio.Protocol:
            return BoundedProtocol(
                config=config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                limits=self.limits,
                slots=self.slots,
            )

        if config.ssl is not None:
            return cast("asyncio.base_events.Server", TlsListener(listener, connect, config.ssl))
        loop = asyncio.get_running_loop()
        return await loop.create_server(connect, sock=listener, backlog=config.backlog)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own version raises the signal again at the end, which would kill us before anything is
        closed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class SecondaryServer(ApiServer):
    """A second server in the same process. The first one handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def max_connections() -> int:
    """Signed connections use half of the files we may open. Strangers, the store and the engine need the
    rest.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(min(MAX_CONNECTIONS, soft // 2), 16)


def make_server(app: ASGIApp, settings: Settings) -> ApiServer:
    """A server for sockets that are open already."""
    return ApiServer(_configured(app, settings.tls_cert, settings.tls_key))


def _configured(app: ASGIApp, certificate: Path | None, key: Path | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=True,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
