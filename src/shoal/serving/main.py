"""`python -m shoal.serving`: reads its arguments, serves until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import uvloop

from shoal.serving.feed import FileFeed
from shoal.serving.plane import DataPlane
from shoal.serving.sweep import keep_sweeping


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.serving", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--table", required=True, metavar="FILE|URL", help="what to serve; read again as it changes"
    )
    parser.add_argument("--zone", default="", help="where this process stands: replicas there are preferred")
    parser.add_argument(
        "--drain-s", type=float, default=30.0, help="for requests under way when told to stop"
    )
    parser.add_argument("--max-connections", type=int, default=10_000)
    return parser.parse_args(argv)


def bound(address: str) -> socket.socket:
    """A listening socket that other processes may share the port with."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host.strip("[]"), int(port)))
    made.setblocking(False)  # noqa: FBT003 - the standard library's own
    return made


async def serve(options: argparse.Namespace) -> None:
    plane = DataPlane(zone=options.zone, max_clients=options.max_connections)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    feed = FileFeed(Path(options.table), plane)
    feed.read()
    await plane.listen(bound(options.listen))
    # What is there now stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(keep_sweeping(plane)), group.create_task(feed.keep_reading())]
        await stopped.wait()
        await plane.drain(options.drain_s)
        for task in running:
            task.cancel()


def main(argv: Sequence[str] | None = None) -> None:
    uvloop.run(serve(arguments(argv)))
