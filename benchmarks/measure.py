"""Numbers and tables: percentiles, ratios against a named row, and when a job's first instruction ran."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

SO_TIMESTAMPNS = 35  # Linux: the kernel stamps every datagram when it arrives


class Task(Protocol):
    def __call__(self, index: int, /) -> object: ...


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds >= 0.02 else f"{seconds * 1000:.1f} ms"


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def times(value: float, other: float | None) -> str:
    """Format as `2.5x`: how many times `other`. A dash if there is nothing to compare with."""
    return f"{value / other:.2f}x" if other else "-"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Plain text that fits a terminal and a bug report."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [title, ""]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, ["-" * width for width in widths], *rows]
    ]
    return "\n".join([*lines, *(f"  {note}" for note in notes), ""])


def timed(task: Task, count: int, *, at_once: int) -> tuple[float, list[float]]:
    """Run `task(0)` to `task(count - 1)`, `at_once` together. Return the whole time, and the time of each."""

    def one(index: int) -> float:
        began = time.perf_counter()
        task(index)
        return time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        each = list(pool.map(one, range(count)))
    return time.perf_counter() - began, each


class Doorbell:
    """Receives the first instruction of a job: the job sends its label in a datagram, which the kernel
    stamps.

    It needs no shared folder and no common user, so the same line is measured on every system. `host`: an
    address of this machine that the jobs can reach.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.settimeout(0.2)
        self._rung: dict[str, float] = {}
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._thread.join()
        self._socket.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where it receives datagrams."""
        return self._host, self._socket.getsockname()[1]

    def script(self, label: str) -> str:
        """The job's one line. bash opens the socket itself, so no program is started before the datagram is
        sent.
        """
        host, port = self.address
        return f"exec bash -c 'echo {label} > /dev/udp/{host}/{port}'"

    def wait(self, label: str, timeout_s: float) -> float:
        """Return when the label arrived, in seconds since 1970. Raise `TimeoutError` if it did not."""
        with self._changed:
            if not self._changed.wait_for(lambda: label in self._rung, timeout_s):
                raise TimeoutError(f"job {label} did not start within {timeout_s:g} s")
            return self._rung[label]

    def count(self) -> int:
        """Return how many labels have arrived."""
        with self._changed:
            return len(self._rung)

    def _listen(self) -> None:
        while self._is_open:
            try:
                data, extra, _, _ = self._socket.recvmsg(200, 200)
            except TimeoutError:
                continue
            seconds, nanoseconds = struct.unpack("qq", extra[0][2][:16])
            with self._changed:
                self._rung.setdefault(data.decode().strip(), seconds + nanoseconds / 1e9)
                self._changed.notify_all()
