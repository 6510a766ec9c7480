"""Measure a share while it runs: hear what its ranks log, look at its processor, memory and devices.

A thread of its own, which the ranks' end and the lease do not wait for. A rank that floods is heard only in
part: it loses its own words, and the thread sleeps between looks.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import threading
import time

import msgspec

from shoal.clock import Clock
from shoal.runtime import tree
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.metrics import Line
from shoal.runtime.tally import Tally
from shoal.samples import Samples
from shoal.wire import Order

MAX_MESSAGE = 16 << 10
MAX_AT_ONCE = 512
PAUSE_S, REST = 0.05, 9.0
"""So long between looks at least, and so many times what the last one took: who floods is not heard."""
FIRST_LOOK_S, LOOK_S = 1.0, 5.0
QUIET_S = 30.0
"""How long what only the supervisor measured may wait: nobody looks at it by the second."""
BUFFER_BYTES = 1 << 20
MAX_WAITING = 4096
"""More lines than the buffer takes: 2731 of the smallest, by the count of Linux 6.18."""


class Meter:
    """`fd` is the ranks' end. Made before they are started, `start` after; then from any thread."""

    def __init__(self, order: Order, clock: Clock) -> None:
        self._order = order
        self._clock = clock
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        for end in (self._ours, self._theirs):
            end.settimeout(0)
        self.fd = self._theirs.fileno()
        os.set_inheritable(self.fd, True)  # noqa: FBT003 - the standard library takes it in no other way
        first = order.node_rank * order.ranks_per_node
        self._tally = Tally(range(first, first + order.ranks_per_node))
        self._lock = threading.Lock()
        self._confinement: Confinement | None = None
        self._told_at = clock.monotonic()
        self._cpu: tuple[float, float] | None = None

    @property
    def variable(self) -> str:
        """What tells a rank where to write."""
        return f"{self.fd}:{os.fstat(self.fd).st_ino}"

    @property
    def steps_heard(self) -> int:
        """How often ranks have logged something of a step, with all that still waits to be heard.

        Of one that goes on meanwhile, no more than the line can hold: nobody waits here for who floods.
        """
        for _ in range(MAX_WAITING // MAX_AT_ONCE):
            if self.hear() < MAX_AT_ONCE:
                break
        return self._tally.steps_heard

    def start(self, confinement: Confinement) -> None:
        """Begin to measure. Again changes nothing."""
        if self._confinement is None:
            self._confinement = confinement
            threading.Thread(target=self._run, name="meter", daemon=True).start()

    def take(self, *, is_last: bool = False) -> tuple[Samples, ...]:
        """What is to be told now. What the ranks said does not wait; the rest may."""
        now = self._clock.monotonic()
        with self._lock:
            if not (is_last or self._tally.has_lines or now > self._told_at + QUIET_S):
                return ()
            self._told_at = now
            return self._tally.take(self._at_ms())

    def put_back(self, told: tuple[Samples, ...]) -> None:
        with self._lock:
            self._tally.put_back(told)

    def hear(self) -> int:
        """Take what waits, up to a number; returns how much it was."""
        with self._lock:
            for count in range(MAX_AT_ONCE):
                try:
                    data = self._ours.recv(MAX_MESSAGE)
                except OSError:
                    return count
                if not data:
                    return count  # a rank has shut the line, for all of them: nothing comes any more
                try:
                    self._tally.hear(msgspec.msgpack.decode(data, type=Line))
                except (ValueError, RecursionError):
                    self._tally.miss()
        return MAX_AT_ONCE

    def close(self) -> None:
        """Nobody says anything any more; before `start`, or with the process."""
        self._ours.close()
        self._theirs.close()

    def _run(self) -> None:
        devices = importlib.import_module("shoal.runtime.devices").Devices(self._order)
        look_at = self._clock.monotonic() + FIRST_LOOK_S
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        while True:
            wait_s = max(0.0, look_at - self._clock.monotonic())
            poll.poll(wait_s * 1000)
            began = self._clock.monotonic()
            self.hear()
            heard_s = self._clock.monotonic() - began
            if self._clock.monotonic() >= look_at:
                look_at = self._clock.monotonic() + LOOK_S
                values = {**devices.look(), **self._usage()}
                with self._lock:
                    self._tally.note(self._at_ms(), values)
            time.sleep(max(PAUSE_S, REST * heard_s))

    def _usage(self) -> dict[str, float]:
        """Processors used since the last look, and memory now."""
        assert self._confinement is not None
        cpu_s, memory = self._confinement.cpu_seconds(), self._confinement.memory_bytes()
        if cpu_s is None or memory is None:
            cpu_s, memory = tree.usage(self._confinement.processes())
        now, before = self._clock.monotonic(), self._cpu
        self._cpu = (now, cpu_s)
        found = {"memory_bytes": float(memory)}
        if before is not None and now > before[0]:
            found["cpus_used"] = max(0.0, cpu_s - before[1]) / (now - before[0])
        return found

    def _at_ms(self) -> int:
        return int(self._clock.now() * 1000)
