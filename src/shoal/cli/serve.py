"""The server process: `python -m shoal.cli.serve`, started by `shoal up` or by a service manager.

Takes the home, opens the control plane, listens, then tells where in `server.json`. Configured by
`SHOAL_*` variables alone: a database's password has no place in an argument list.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import anyio
import anyio.to_thread

from shoal.api.server import serve
from shoal.cli.home import adopt_first_token, hold, prepare_home, remove_server_file, write_server_file
from shoal.cli.show import note, print_error
from shoal.control import ControlPlane
from shoal.errors import ShoalError, SpecError
from shoal.log import configure_log, get_logger
from shoal.settings import EVERYWHERE, Settings, load_settings

READY_POLL_S = 0.02


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
    settings = load_settings()
    prepare_home(settings.home)
    with hold(settings.home):
        configure_log(None if is_foreground else settings.log_file)
        settings = with_free_port(settings, is_fixed=bool(os.environ.get("SHOAL_LISTEN")))
        try:
            serving = partial(_serve, settings, is_foreground=is_foreground)
            anyio.run(serving, backend_options={"use_uvloop": True})
        finally:
            remove_server_file(settings.home, os.getpid())


async def _serve(settings: Settings, *, is_foreground: bool) -> None:
    async with ControlPlane.open(settings) as plane, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(_announce, settings, is_foreground=is_foreground))
        await serve(settings, plane)
        tasks.cancel_scope.cancel()


async def _announce(settings: Settings, *, is_foreground: bool) -> None:
    """Once it answers, tell clients and supervisors where."""
    await anyio.to_thread.run_sync(wait_until_it_answers, settings, abandon_on_cancel=True)
    facts: dict[str, str | int] = {"url": settings.url, "pid": os.getpid()}
    if settings.tls_cert:
        facts["tls_cert"] = str(settings.tls_cert)
    write_server_file(settings.home, facts)
    get_logger(__name__).info("listening", url=settings.url)
    if is_foreground:
        token = adopt_first_token(settings.home)
        note(f"listening on {settings.url}")
        if token and sys.stderr.isatty():
            note(f"admin token, shown this once: {token}")


def wait_until_it_answers(settings: Settings) -> None:
    """Until somebody takes connections on our address. Blocks a thread of its own."""
    host = "localhost" if settings.host in EVERYWHERE else settings.host
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, settings.port), timeout=1.0):
            return
        time.sleep(READY_POLL_S)


def with_free_port(settings: Settings, *, is_fixed: bool) -> Settings:
    """Settings whose port can be bound. Only the default port gives way to another."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    for port in (settings.port, 0):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and not is_fixed:
                    continue
                raise SpecError(
                    f"cannot listen on {settings.host}:{port}: {error.strerror}",
                    hint="choose another with `shoal up --listen 127.0.0.1:0`",
                ) from error
            return replace(settings, port=probe.getsockname()[1])
    raise SpecError(f"no free port on {settings.host}", hint="look with `shoal doctor`")


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


if __name__ == "__main__":
    sys.exit(main())
