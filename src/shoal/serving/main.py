"""`python -m shoal.serving`: the data plane of services. Serves until it is told to stop, then drains."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import uvloop

from shoal.ownership import Secrecy, UnsafePath, problems_on_the_way, refuse_unsafe
from shoal.serving.admin import Admin
from shoal.serving.checks import keep_checking
from shoal.serving.descriptors import clients_within, raised
from shoal.serving.feed import Fed, Feed, FileSource, Reporter, ServerSource
from shoal.serving.freshness import STALE_S
from shoal.serving.haproxy.start import find_haproxy, running
from shoal.serving.neighbours import Neighbours
from shoal.serving.plane import DataPlane
from shoal.serving.processes import Family
from shoal.serving.report import report
from shoal.serving.server import REPORTS, TABLE, Server
from shoal.serving.sweep import keep_sweeping
from shoal.serving.table import Report
from shoal.serving.tls import TlsFiles

log = logging.getLogger(__name__)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.serving", description=__doc__)
    add = parser.add_argument
    add("--listen", required=True, metavar="HOST:PORT", help="port 0: any; the first line printed says which")
    add("--table", default="", metavar="FILE|URL", help="what to serve; read again as it changes")
    add("--home", type=Path, metavar="DIR", help="serve what the control plane of this home says")
    add("--leader", type=Path, metavar="FILE", help="where the leader of several control planes is named")
    add("--cache", type=Path, metavar="FILE", help="keeps the table of a URL for a start without it")
    add("--report", default="", metavar="FILE|URL", help="where to tell what happens, once a second")
    add("--token-file", type=Path, metavar="FILE", help="shown to URLs, and to be shown for metrics")
    add(
        "--admin",
        default="",
        metavar="HOST:PORT",
        help="/-/health and /-/metrics; +1 for each further process",
    )
    add("--tls-cert", type=Path, metavar="FILE")
    add("--tls-key", type=Path, metavar="FILE")
    add("--zone", default="", help="where this process stands: replicas there are preferred")
    add("--processes", type=int, default=0, help="on the one port, replaced on SIGHUP without a lost request")
    add(
        "--haproxy",
        nargs="?",
        const="haproxy",
        default="",
        metavar="PROGRAM",
        help="have HAProxy serve, with a thread for each of --processes; SIGHUP reloads it",
    )
    add("--drain-s", type=float, default=30.0, help="for requests under way when told to stop")
    add("--max-connections", type=int, default=10_000, help="of callers, in each process")
    add("--replaces", action="store_true", help="the one that listens there now, which ends after this")
    for hidden in ("--listener", "--ready", "--index", "--neighbours"):
        add(hidden, type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if bool(options.table) == bool(options.home):
        parser.error("what is to be served? give --table or --home, one of the two")
    if options.home:
        options.table, options.report = TABLE, REPORTS
        options.cache = options.cache or options.home / "serving-table.json"
        options.token_file = options.token_file or options.home / "keys" / "data-plane.token"
    if options.token_file:
        try:
            refuse_unsafe(problems_on_the_way(options.token_file, Secrecy.OWNER))
        except UnsafePath as error:
            parser.error(f"{error.message}; {error.hint}")
    if bool(options.tls_cert) != bool(options.tls_key):
        parser.error("--tls-cert and --tls-key belong together")
    for name in ("admin", "zone"):
        if options.haproxy and getattr(options, name):
            parser.error(f"--{name} is for the embedded data plane: leave it out with --haproxy")
    if options.admin and not options.token_file and not _is_loopback(options.admin):
        parser.error(f"--admin {options.admin} can be reached from elsewhere: give --token-file, too")
    return options


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def bound(address: str, *, is_shared: bool = False) -> socket.socket:
    """A socket to listen on; `is_shared`: other processes may have the same port."""
    host, _, port = address.rpartition(":")
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host.strip("[]"), int(port)))
    made.listen(4096)
    made.setblocking(False)  # noqa: FBT003 - the standard library's own
    return made


def taken(options: argparse.Namespace) -> socket.socket:
    """A socket on a port that its successor may share, and nobody else: refused where somebody listens."""
    if not options.replaces:
        try:
            bound(options.listen).close()
        except OSError as error:
            told = f"error: cannot listen on {options.listen}: {error.strerror}"
            sys.exit(f"{told}\nhint: another one may serve there; choose another --listen")
    return bound(options.listen, is_shared=True)


async def serve(options: argparse.Namespace, listener: socket.socket) -> None:
    """Until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    share = 1.0 / max(1, options.processes)
    max_clients = clients_within(raised(), options.max_connections)
    if max_clients < options.max_connections:
        log.warning(
            "%d connections of callers at most, not %d: raise `ulimit -n`",
            max_clients,
            options.max_connections,
        )
    plane = DataPlane(share=share, zone=options.zone, max_clients=max_clients)
    token = options.token_file.read_text().strip() if options.token_file else ""
    source, sink = Server(token, _files(options)), Server(token, _files(options))
    feed = await _fed(options, plane, source)
    tls = TlsFiles(options.tls_cert, options.tls_key) if options.tls_cert else None
    reporter = _reporter(options, lambda: report(plane), sink)
    if reporter is not None:
        feed.on_taken = reporter.soon
        await reporter.tell()  # before it may send anything anywhere, it is known to be there
    await plane.listen(listener, tls.context if tls else None)
    if options.listener >= 0:
        _follow_parent(stopped)
    keeps = [keep_sweeping(plane), keep_checking(plane), feed.keep_reading()]
    keeps += [tls.keep_fresh()] if tls is not None else []
    if options.neighbours >= 0:
        keeps.append(Neighbours(plane, socket.socket(fileno=options.neighbours)).keep_talking())
    keeps += [reporter.keep_telling()] if reporter is not None else []
    admin = await _admin(options, plane, token)
    _ready(options, listener)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(keep) for keep in keeps]
        await stopped.wait()
        if options.ready >= 0:
            os.close(options.ready)  # somebody else is to accept connections from here on
        await plane.drain(options.drain_s)
        for task in running:
            task.cancel()
    if reporter is not None:
        await reporter.tell(is_last=True)
    source.close()
    sink.close()
    if admin is not None:
        admin.close()


async def serve_by_haproxy(options: argparse.Namespace, listener: socket.socket) -> None:
    """Until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    token = options.token_file.read_text().strip() if options.token_file else ""
    tls = (options.tls_cert, options.tls_key) if options.tls_cert else None
    program = find_haproxy(options.haproxy)
    if program is None:
        sys.exit(f"error: there is no program `{options.haproxy}`\nhint: `apt-get install haproxy`")
    async with running(
        program,
        listener,
        tls=tls,
        num_threads=options.processes,
        max_connections=options.max_connections,
    ) as plane:
        source, sink = Server(token, _files(options)), Server(token, _files(options))
        feed = await _fed(options, plane, source)
        await plane.start()
        loop.add_signal_handler(signal.SIGHUP, plane.renew)
        _tell(listener)
        keeps = [plane.keep_running(), plane.keep_fresh(), plane.keep_telling_health(), feed.keep_reading()]
        reporter = _reporter(options, plane.report, sink)
        if reporter is not None:
            feed.on_taken = reporter.soon
            await reporter.tell()  # before it may send anything anywhere, it is known to be there
            keeps.append(reporter.keep_telling())
        async with asyncio.TaskGroup() as group:
            running_ones = [group.create_task(keep) for keep in keeps]
            await stopped.wait()
            for task in running_ones:
                task.cancel()
        await plane.drain(options.drain_s)
        if reporter is not None:
            await reporter.tell(is_last=True)
        source.close()
        sink.close()


def _reporter(options: argparse.Namespace, counts: Callable[[], Report], server: Server) -> Reporter | None:
    if not options.report:
        return None
    if options.home or "://" in options.report:
        return Reporter(counts, server, options.report)
    suffix = f".{options.index}" if options.index > 0 else ""
    return Reporter(counts, server, Path(options.report + suffix))


async def _admin(options: argparse.Namespace, plane: DataPlane, token: str) -> asyncio.Server | None:
    if not options.admin:
        return None
    host, _, port = options.admin.rpartition(":")
    at = int(port) + max(0, options.index) if int(port) else 0
    loop = asyncio.get_running_loop()
    connections: dict[Admin, None] = {}
    return await loop.create_server(
        lambda: Admin(plane, token, connections), host.strip("[]"), at, reuse_port=True
    )


def _follow_parent(stopped: asyncio.Event) -> None:
    """A child whose parent is gone would be replaced by nobody and reloaded by nobody: it drains."""
    parent = os.getppid()
    loop = asyncio.get_running_loop()

    def look() -> None:
        if os.getppid() != parent:
            stopped.set()
        else:
            loop.call_later(1.0, look)

    look()


def _files(options: argparse.Namespace) -> list[Path]:
    """Where control planes say that they listen: the one that leads, then that of the home."""
    own = [options.home / "server.json"] if options.home else []
    return [options.leader, *own] if options.leader else own


async def _fed(options: argparse.Namespace, plane: Fed, server: Server) -> Feed:
    if not options.home and "://" not in options.table:
        feed = Feed(FileSource(Path(options.table)), plane)
    else:
        plane.freshness.limit_s = STALE_S
        source = ServerSource(server, options.table, options.cache)
        feed = Feed(source, plane)
        remembered = source.remembered()
        if remembered is not None:
            with contextlib.suppress(ValueError, msgspec.MsgspecError):  # there may be a better one by now
                feed.take(remembered)
    await feed.read()
    return feed


def _ready(options: argparse.Namespace, listener: socket.socket) -> None:
    if options.ready >= 0:
        os.write(options.ready, b"1")
    else:
        _tell(listener)
    # What is there now stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def _tell(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"listening on {host}:{port}\n")
    sys.stdout.flush()


async def supervise(options: argparse.Namespace, argv: Sequence[str]) -> None:
    first = taken(options)
    host, port = first.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    others = [bound(address, is_shared=True) for _ in range(options.processes - 1)]

    def command(index: int, listener: int, ready: int, neighbours: int) -> list[str]:
        own = {"index": index, "listener": listener, "ready": ready, "neighbours": neighbours}
        return [*argv, *(f"--{name}={value}" for name, value in own.items())]

    await Family([first, *others], command).run(lambda: _tell(first))


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    os.umask(0o077)
    options = arguments(argv)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    if options.listener >= 0:
        uvloop.run(serve(options, socket.socket(fileno=options.listener)))
    elif options.haproxy:
        asyncio.run(serve_by_haproxy(options, taken(options)))
    elif options.processes > 0:
        asyncio.run(supervise(options, argv))
    else:
        uvloop.run(serve(options, bound(options.listen)))
