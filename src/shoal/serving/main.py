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

from shoal.ownership import Secrecy, UnsafePath, problems_on_path, refuse_unsafe
from shoal.serving.feed import FileSource, LeaderSource, ServingReporter, TableConsumer, TableFeed
from shoal.serving.haproxy.plane import find_haproxy, open_haproxy_plane
from shoal.serving.housekeeping import keep_checking, keep_sweeping
from shoal.serving.leader_client import REPORTS, TABLE, LeaderClient
from shoal.serving.peers import PeerProcesses
from shoal.serving.plane import DataPlane, TlsFiles
from shoal.serving.processes import WorkerProcesses, max_clients_within, raise_limit
from shoal.serving.proxy.local_reply import STALE_S
from shoal.serving.report import AdminConnection, report
from shoal.serving.table import ServingReport

log = logging.getLogger(__name__)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.serving", description=__doc__)
    add = parser.add_argument
    add("--listen", required=True, metavar="HOST:PORT", help="port 0: any; the first line printed says which")
    add("--table", default="", metavar="FILE|URL", help="the table to serve; read again as it changes")
    add("--home", type=Path, metavar="DIR", help="serve the table of this home's control plane")
    add("--leader", type=Path, metavar="FILE", help="file that names the leader of several control planes")
    add(
        "--cache",
        type=Path,
        metavar="FILE",
        help="copy of a URL's table, for a start without the URL",
    )
    add("--report", default="", metavar="FILE|URL", help="where to send reports, once a second")
    add("--token-file", type=Path, metavar="FILE", help="token sent to URLs, and required for metrics")
    add(
        "--admin",
        default="",
        metavar="HOST:PORT",
        help="/-/health and /-/metrics; +1 for each further process",
    )
    add("--tls-cert", type=Path, metavar="FILE")
    add("--tls-key", type=Path, metavar="FILE")
    add("--zone", default="", help="zone of this process, whose replicas are preferred")
    add(
        "--processes",
        type=int,
        default=0,
        help="on the port; replaced on SIGHUP without a lost request",
    )
    add(
        "--haproxy",
        nargs="?",
        const="haproxy",
        default="",
        metavar="PROGRAM",
        help="have HAProxy serve, with a thread for each of --processes; SIGHUP reloads it",
    )
    add("--drain-s", type=float, default=30.0, help="for open requests after a stop signal")
    add("--max-connections", type=int, default=10_000, help="limit of callers' connections in each process")
    add("--replaces", action="store_true", help="take over from the process that listens there now")
    for hidden in ("--listener", "--ready", "--index", "--neighbours"):
        add(hidden, type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if bool(options.table) == bool(options.home):
        parser.error("give either --table or --home: what to serve")
    if options.home:
        options.table, options.report = TABLE, REPORTS
        options.cache = options.cache or options.home / "serving-table.json"
        options.token_file = options.token_file or options.home / "keys" / "data-plane.token"
    if options.token_file:
        try:
            refuse_unsafe(problems_on_path(options.token_file, Secrecy.OWNER))
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


def listen_on(address: str, *, is_shared: bool = False) -> socket.socket:
    """Return a listening socket. If `is_shared`, other processes may listen on the same port."""
    host, _, port = address.rpartition(":")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host.strip("[]"), int(port)))
    listener.listen(4096)
    listener.setblocking(False)  # noqa: FBT003 - the standard library's own
    return listener


def listen_on_free_port(options: argparse.Namespace) -> socket.socket:
    """Return a socket on a port that only a successor may share. Exit if another process listens there."""
    if not options.replaces:
        try:
            listen_on(options.listen).close()
        except OSError as error:
            message = f"error: cannot listen on {options.listen}: {error.strerror}"
            sys.exit(f"{message}\nhint: another process may serve there; choose another --listen")
    return listen_on(options.listen, is_shared=True)


async def serve(options: argparse.Namespace, listener: socket.socket) -> None:
    """Run until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    share = 1.0 / max(1, options.processes)
    max_clients = max_clients_within(raise_limit(), options.max_connections)
    if max_clients < options.max_connections:
        log.warning(
            "%d connections of callers at most, not %d: raise `ulimit -n`",
            max_clients,
            options.max_connections,
        )
    plane = DataPlane(share=share, zone=options.zone, max_clients=max_clients)
    token = options.token_file.read_text().strip() if options.token_file else ""
    source, sink = LeaderClient(token, _leader_files(options)), LeaderClient(token, _leader_files(options))
    feed = await _open_feed(options, plane, source)
    tls = TlsFiles(options.tls_cert, options.tls_key) if options.tls_cert else None
    reporter = _reporter(options, lambda: report(plane), sink)
    if reporter is not None:
        feed.on_new_table = reporter.send_soon
        await reporter.send()  # the control plane must know this process before it sends any request
    await plane.listen(listener, tls.context if tls else None)
    if options.listener >= 0:
        _follow_parent(stopped)
    keeps = [keep_sweeping(plane), keep_checking(plane), feed.keep_reading()]
    keeps += [tls.keep_fresh()] if tls is not None else []
    if options.neighbours >= 0:
        keeps.append(PeerProcesses(plane, socket.socket(fileno=options.neighbours)).keep_exchanging())
    keeps += [reporter.keep_sending()] if reporter is not None else []
    admin = await _admin(options, plane, token)
    _report_ready(options, listener)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(keep) for keep in keeps]
        await stopped.wait()
        if options.ready >= 0:
            os.close(options.ready)  # from here on, another process accepts the connections
        await plane.drain(options.drain_s)
        for task in tasks:
            task.cancel()
    if reporter is not None:
        await reporter.send(is_last=True)
    source.close()
    sink.close()
    if admin is not None:
        admin.close()


async def serve_by_haproxy(options: argparse.Namespace, listener: socket.socket) -> None:
    """Run until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    token = options.token_file.read_text().strip() if options.token_file else ""
    tls = (options.tls_cert, options.tls_key) if options.tls_cert else None
    program = find_haproxy(options.haproxy)
    if program is None:
        sys.exit(f"error: there is no program `{options.haproxy}`\nhint: `apt-get install haproxy`")
    async with open_haproxy_plane(
        program,
        listener,
        tls=tls,
        num_threads=options.processes,
        max_connections=options.max_connections,
    ) as plane:
        source, sink = (
            LeaderClient(token, _leader_files(options)),
            LeaderClient(token, _leader_files(options)),
        )
        feed = await _open_feed(options, plane, source)
        await plane.start()
        loop.add_signal_handler(signal.SIGHUP, plane.renew)
        _print_address(listener)
        keeps = [plane.keep_running(), plane.keep_fresh(), plane.keep_sending_health(), feed.keep_reading()]
        reporter = _reporter(options, plane.report, sink)
        if reporter is not None:
            feed.on_new_table = reporter.send_soon
            await reporter.send()  # the control plane must know this process before it sends any request
            keeps.append(reporter.keep_sending())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(keep) for keep in keeps]
            await stopped.wait()
            for task in tasks:
                task.cancel()
        await plane.drain(options.drain_s)
        if reporter is not None:
            await reporter.send(is_last=True)
        source.close()
        sink.close()


def _reporter(
    options: argparse.Namespace, counts: Callable[[], ServingReport], server: LeaderClient
) -> ServingReporter | None:
    if not options.report:
        return None
    if options.home or "://" in options.report:
        return ServingReporter(counts, server, options.report)
    suffix = f".{options.index}" if options.index > 0 else ""
    return ServingReporter(counts, server, Path(options.report + suffix))


async def _admin(options: argparse.Namespace, plane: DataPlane, token: str) -> asyncio.Server | None:
    if not options.admin:
        return None
    host, _, port = options.admin.rpartition(":")
    at = int(port) + max(0, options.index) if int(port) else 0
    loop = asyncio.get_running_loop()
    connections: dict[AdminConnection, None] = {}
    return await loop.create_server(
        lambda: AdminConnection(plane, token, connections), host.strip("[]"), at, reuse_port=True
    )


def _follow_parent(stopped: asyncio.Event) -> None:
    """Drain when the parent is gone, because no process would replace or reload this worker."""
    parent = os.getppid()
    loop = asyncio.get_running_loop()

    def check_parent() -> None:
        if os.getppid() != parent:
            stopped.set()
        else:
            loop.call_later(1.0, check_parent)

    check_parent()


def _leader_files(options: argparse.Namespace) -> list[Path]:
    """Files in which control planes say where they listen: that of the leader, then that of the home."""
    home_files = [options.home / "server.json"] if options.home else []
    return [options.leader, *home_files] if options.leader else home_files


async def _open_feed(options: argparse.Namespace, plane: TableConsumer, server: LeaderClient) -> TableFeed:
    if not options.home and "://" not in options.table:
        feed = TableFeed(FileSource(Path(options.table)), plane)
    else:
        plane.freshness.limit_s = STALE_S
        source = LeaderSource(server, options.table, options.cache)
        feed = TableFeed(source, plane)
        cached = source.cached_table()
        if cached is not None:
            with contextlib.suppress(ValueError, msgspec.MsgspecError):  # the read below may get a better one
                feed.take(cached)
    await feed.read()
    return feed


def _report_ready(options: argparse.Namespace, listener: socket.socket) -> None:
    if options.ready >= 0:
        os.write(options.ready, b"1")
    else:
        _print_address(listener)
    # Objects that exist now stay: exempt them from garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def _print_address(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"listening on {host}:{port}\n")
    sys.stdout.flush()


async def supervise(options: argparse.Namespace, argv: Sequence[str]) -> None:
    first = listen_on_free_port(options)
    host, port = first.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    others = [listen_on(address, is_shared=True) for _ in range(options.processes - 1)]

    def command(index: int, listener: int, ready: int, neighbours: int) -> list[str]:
        options_of_worker = {"index": index, "listener": listener, "ready": ready, "neighbours": neighbours}
        return [*argv, *(f"--{name}={value}" for name, value in options_of_worker.items())]

    await WorkerProcesses([first, *others], command).run(lambda: _print_address(first))


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    os.umask(0o077)
    options = parse_arguments(argv)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    if options.listener >= 0:
        uvloop.run(serve(options, socket.socket(fileno=options.listener)))
    elif options.haproxy:
        asyncio.run(serve_by_haproxy(options, listen_on_free_port(options)))
    elif options.processes > 0:
        asyncio.run(supervise(options, argv))
    else:
        uvloop.run(serve(options, listen_on(options.listen)))
