"""Measure a task while it runs: collect what its ranks log, and sample CPU, memory and devices.

`MetricsBuffer` holds what was not sent so far. It is bounded whatever the ranks send, and uses no socket and
no clock. Values that are too many or make no sense are dropped, and counted in one more metric.

`Meter` is a thread of its own, so that the ranks' end and the lease never wait for it. If a rank floods it,
part of that rank's messages is lost, because the thread sleeps between reads.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterable
from itertools import chain

import msgspec

from shoal.clock import Clock
from shoal.curve import MAX_X, Axis, Point, Samples, finite, single_point, thin_points
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.metrics import MAX_VALUES, MetricLine, is_metric_name
from shoal.runtime.process import tree
from shoal.wire import TaskRanks, TaskResources

MAX_SERIES = 200
MAX_SERIES_POINTS = 128
"""Points of one series before neighbours are merged."""
MAX_MESSAGE_POINTS = 2000
"""Points in one message."""
LOST_SERIES = "points_lost"

SeriesKey = tuple[str, Axis, bool]
"""A name, the axis of its points, and whether it belongs to the node."""


class MetricsBuffer:
    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._points: dict[SeriesKey, list[Point]] = {}
        self._newest: dict[SeriesKey, Point] = {}
        """The last point that ranks sent. If a step is repeated, it is not the one with the highest `x`."""
        self._owners: dict[str, int] = {}
        self._lost = self._lost_reported = 0
        self.has_lines = False
        """Whether any rank sent something since the last `take`."""
        self.steps_logged = 0
        """The number of calls that named a step."""

    def add_line(self, line: MetricLine) -> None:
        """Add one call of a rank. If several ranks use one name, the lowest rank's values are kept."""
        self._lost = min(self._lost + max(0, line.num_lost), MAX_X)
        x = line.at_ms if line.step is None else line.step
        if line.rank not in self._ranks or len(line.values) > MAX_VALUES or not 0 <= x <= MAX_X:
            self._lost += 1
            return
        self.has_lines = True
        self.steps_logged += line.step is not None
        axis = Axis.TIME if line.step is None else Axis.STEP
        for name, value in line.values.items():
            self._add_value(name, axis, line.rank, x, value)

    def count_unreadable(self) -> None:
        """Count a message that cannot be decoded."""
        self._lost += 1

    def add_measurements(self, at_ms: int, values: dict[str, float]) -> None:
        """Add what the supervisor itself measured on the node."""
        for name, value in values.items():
            self._add((name, Axis.TIME, True), [single_point(at_ms, value)])

    def take(self, at_ms: int) -> tuple[Samples, ...]:
        """Return everything since the last call, at most one message full."""
        if self._lost > self._lost_reported:
            self._lost_reported = self._lost
            self.add_measurements(at_ms, {LOST_SERIES: self._lost})
        taken, self._points, self.has_lines = self._points, {}, False
        newest, self._newest = self._newest, {}
        most = max(1, MAX_MESSAGE_POINTS // max(len(taken), 1))
        return tuple(
            self._samples(key, thin_points(points, most), newest.get(key)) for key, points in taken.items()
        )

    def put_back(self, samples: Iterable[Samples]) -> None:
        """Add samples again, before newer ones, because they could not be delivered."""
        for series in samples:
            if series.rank is None or series.rank == self._owners.get(series.name):
                key = (series.name, series.axis, series.rank is None)
                self._points[key] = list(chain(series.points, self._points.pop(key, ())))
                if series.rank is not None:
                    self._newest.setdefault(key, series.newest or series.points[-1])

    def _samples(self, key: SeriesKey, points: list[Point], newest: Point | None) -> Samples:
        name, axis, is_nodes = key
        is_last = newest is None or newest.x == points[-1].x
        return Samples(
            name=name,
            axis=axis,
            points=tuple(points),
            rank=None if is_nodes else self._owners[name],
            newest=None if is_last else newest,
        )

    def _add_value(self, name: str, axis: Axis, rank: int, x: int, value: float | None) -> None:
        if not is_metric_name(name):
            self._lost += 1
            return
        owner = self._owners.get(name)
        if owner is not None and owner < rank:
            return
        if owner is None and len(self._owners) >= MAX_SERIES:
            self._lost += 1
            return
        if owner is not None and rank < owner:
            for other in Axis:
                self._points.pop((name, other, False), None)
        self._owners[name] = rank
        kept = None if value is None else finite(value)
        point = Point(x, kept, kept, kept)
        self._newest[name, axis, False] = point
        self._add((name, axis, False), [point])

    def _add(self, key: SeriesKey, points: list[Point]) -> None:
        waiting = self._points.setdefault(key, [])
        waiting += points
        if len(waiting) > MAX_SERIES_POINTS:
            self._points[key] = thin_points(waiting, MAX_SERIES_POINTS // 2)


MAX_MESSAGE = 16 << 10
MAX_AT_ONCE = 512
PAUSE_S, REST = 0.05, 9.0
"""The shortest pause between reads, and the pause as a multiple of the last read's time. A rank that floods
cannot take more of the thread's time.
"""
FIRST_LOOK_S, LOOK_S = 1.0, 5.0
QUIET_S = 30.0
"""How long the supervisor's own measurements may wait, because nothing needs them by the second."""
BUFFER_BYTES = 1 << 20
MAX_QUEUED_LINES = 4096
"""More lines than the socket's buffer holds: 2731 of the smallest, counted on Linux 6.18."""


class Meter:
    """Receives what ranks log. Make it before the ranks start, because they inherit `fd`, and then `start`
    it.

    After that it may be used from any thread.
    """

    def __init__(self, ranks: TaskRanks, resources: TaskResources, clock: Clock) -> None:
        self._resources = resources
        self._clock = clock
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        for end in (self._ours, self._theirs):
            end.settimeout(0)
        self.fd = self._theirs.fileno()
        os.set_inheritable(self.fd, True)  # noqa: FBT003 - the standard library takes it in no other way
        first = ranks.node_rank * ranks.ranks_per_node
        self._buffer = MetricsBuffer(range(first, first + ranks.ranks_per_node))
        self._lock = threading.Lock()
        self._confinement: Confinement | None = None
        self._taken_at = clock.monotonic()
        self._cpu: tuple[float, float] | None = None

    @property
    def variable(self) -> str:
        """The variable's value that tells a rank where to write."""
        return f"{self.fd}:{os.fstat(self.fd).st_ino}"

    @property
    def steps_logged(self) -> int:
        """How often ranks have logged a step, including messages that wait to be read.

        While a rank keeps writing, read at most one buffer, so that a flooding rank cannot block the caller.
        """
        for _ in range(MAX_QUEUED_LINES // MAX_AT_ONCE):
            if self.receive() < MAX_AT_ONCE:
                break
        return self._buffer.steps_logged

    def start(self, confinement: Confinement) -> None:
        """Start to measure. A second call changes nothing."""
        if self._confinement is None:
            self._confinement = confinement
            threading.Thread(target=self._run, name="meter", daemon=True).start()

    def take(self, *, is_last: bool = False) -> tuple[Samples, ...]:
        """Return what to send now. Values from the ranks are sent at once, the rest may wait."""
        now = self._clock.monotonic()
        with self._lock:
            if not (is_last or self._buffer.has_lines or now > self._taken_at + QUIET_S):
                return ()
            self._taken_at = now
            return self._buffer.take(self._at_ms())

    def put_back(self, samples: tuple[Samples, ...]) -> None:
        with self._lock:
            self._buffer.put_back(samples)

    def receive(self) -> int:
        """Read the waiting messages up to a limit, and return their number."""
        with self._lock:
            for count in range(MAX_AT_ONCE):
                try:
                    data = self._ours.recv(MAX_MESSAGE)
                except OSError:
                    return count
                if not data:
                    return count  # a rank has shut the socket down for all ranks, so nothing comes any more
                try:
                    self._buffer.add_line(msgspec.msgpack.decode(data, type=MetricLine))
                except (ValueError, RecursionError):
                    self._buffer.count_unreadable()
        return MAX_AT_ONCE

    def close(self) -> None:
        """Close the sockets. Call it before `start`, or at the end of the process."""
        self._ours.close()
        self._theirs.close()

    def _run(self) -> None:
        devices = importlib.import_module("shoal.runtime.process.gpu_usage").GpuUsage(self._resources)
        look_at = self._clock.monotonic() + FIRST_LOOK_S
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        while True:
            wait_s = max(0.0, look_at - self._clock.monotonic())
            poll.poll(wait_s * 1000)
            began = self._clock.monotonic()
            self.receive()
            heard_s = self._clock.monotonic() - began
            if self._clock.monotonic() >= look_at:
                look_at = self._clock.monotonic() + LOOK_S
                values = {**devices.look(), **self._usage()}
                with self._lock:
                    self._buffer.add_measurements(self._at_ms(), values)
            time.sleep(max(PAUSE_S, REST * heard_s))

    def _usage(self) -> dict[str, float]:
        """Return the CPUs used since the last sample, and the memory in use now."""
        assert self._confinement is not None
        cpu_s, memory = self._confinement.cpu_seconds(), self._confinement.memory_bytes()
        if cpu_s is None or memory is None:
            cpu_s, memory = tree.usage(self._confinement.processes())
        now, before = self._clock.monotonic(), self._cpu
        self._cpu = (now, cpu_s)
        values = {"memory_bytes": float(memory)}
        if before is not None and now > before[0]:
            values["cpus_used"] = max(0.0, cpu_s - before[1]) / (now - before[0])
        return values

    def _at_ms(self) -> int:
        return int(self._clock.now() * 1000)
