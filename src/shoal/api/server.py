"""Listen: on loopback, or elsewhere with TLS or behind a declared proxy. Never otherwise."""

from __future__ import annotations

import socket
from collections.abc import Callable

import structlog
import uvicorn
from starlette.types import ASGIApp

from shoal.api.app import create_app
from shoal.api.protocol import BoundedProtocol
from shoal.control import ControlPlane
from shoal.errors import SpecError, StateError
from shoal.settings import Settings

KEEP_ALIVE_S = 75
SHUTDOWN_S = 5
BACKLOG = 1024
MAX_CONNECTIONS = 4096

log = structlog.get_logger()


def check_listen(settings: Settings) -> None:
    """Raise `SpecError` unless it is safe to listen where the settings say."""
    if settings.is_loopback or settings.tls_cert is not None or settings.is_behind_proxy:
        return
    raise SpecError(
        f"refusing to listen on {settings.host} without TLS: every token would cross the network in clear",
        hint="give `--tls-cert FILE --tls-key FILE`, or `--behind-proxy` where a proxy on the way does TLS",
    )


def open_socket(settings: Settings) -> socket.socket:
    """A listening socket, so that the port is known before anybody is told of it."""
    check_listen(settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003 - the name of the argument says less
    except OSError as error:
        listener.close()
        raise StateError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            hint="is another server there? Look with `shoal status`, or choose a port: `shoal up --port 0`",
        ) from error
    return listener


async def serve(
    settings: Settings,
    plane: ControlPlane,
    *,
    listener: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `on_ready` is told the URL once connections are taken."""
    listener = listener or open_socket(settings)
    server = _Server(_config(create_app(plane), settings), on_ready, url_of(settings, listener))
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()


def url_of(settings: Settings, listener: socket.socket) -> str:
    """Where a client on this machine finds the listener."""
    port = listener.getsockname()[1]
    scheme, _, rest = settings.url.partition("://")
    return f"{scheme}://{rest.rpartition(':')[0]}:{port}"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[str], None] | None, url: str) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("server.listening", url=self._url)
        if self._on_ready is not None and not self.should_exit:
            self._on_ready(self._url)


def _config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
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
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
