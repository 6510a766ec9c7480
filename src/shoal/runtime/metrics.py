"""Log the metrics of a training program: `runtime.log(loss=..., step=...)`.

A call costs one message to the supervisor and never blocks. If the supervisor cannot keep up, the message is
dropped and counted. Outside of Shoal nothing is sent. Needs no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import stat
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from shoal.curve import MAX_X, finite
from shoal.errors import SpecError
from shoal.runtime.rank.arguments import check_number, whole_number

METRICS_VARIABLE: Final = "SHOAL_METRICS"
"""`<descriptor>:<inode>`: an inherited socket. The inode tells whether the descriptor was reused."""
MAX_NAME, MAX_VALUES = 100, 64
RATE_S = 1.0
EXIT_MS = 500


class MetricLine(msgspec.Struct, frozen=True, array_like=True):
    """One call of `log`, as a message."""

    rank: int
    step: int | None
    at_ms: int
    values: dict[str, float | None]
    num_lost: int = 0
    """Calls of this process that were dropped since its last message."""


class MetricChannel:
    """This process's channel to its supervisor. `step`: the current step, for calls without a step."""

    def __init__(self) -> None:
        self._fd = _inherited_socket(os.environ.get(METRICS_VARIABLE, ""))
        self._lost = 0
        self._held: bytes | None = None
        self._rate = StepRate()
        self.step: int | None = None
        if self._fd is not None:
            atexit.register(self._flush)

    def send(self, values: Mapping[str, float], step: int | None) -> None:
        if self._fd is None:
            return
        at = self.step if step is None else step
        finite_values = {name: finite(value) for name, value in values.items()}
        if step is not None and (rate := self._rate.update(step, time.monotonic())) is not None:
            finite_values.setdefault("steps_per_s", rate)
        rank = int(os.environ.get("SHOAL_RANK") or os.environ.get("RANK", "0"))
        line = MetricLine(rank, at, time.time_ns() // 1_000_000, finite_values, self._lost)
        self._write(msgspec.msgpack.encode(line))

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        try:
            os.write(self._fd, data)
        except OSError:
            # Keep the newest message for a later try, because a program's last values matter most.
            self._lost += self._held is not None
            self._held = data
        else:
            self._lost, self._held = int(self._held is not None), None

    def _flush(self) -> None:
        if self._held is None or self._fd is None:
            return
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            poll.poll(EXIT_MS)
            os.write(self._fd, self._held)


class StepRate:
    """Steps per second, reported about once a second."""

    def __init__(self) -> None:
        self._step, self._at = -1, 0.0

    def update(self, step: int, now: float) -> float | None:
        """Return the rate since the last report. None: it is too early, or steps are repeated."""
        is_first = not 0 <= self._step < step
        if not is_first and now < self._at + RATE_S:
            return None
        rate = None if is_first else (step - self._step) / (now - self._at)
        if step != self._step:
            self._step, self._at = step, now
        return rate


_channel: MetricChannel | None = None


def metric_channel() -> MetricChannel:
    """Return this process's channel. It is made at the first use, because a zygote must have none."""
    global _channel  # noqa: PLW0603 - one for each process
    if _channel is None:
        _channel = MetricChannel()
    return _channel


def log(values: Mapping[str, float] | None = None, /, *, step: int | None = None, **named: float) -> None:
    """Log these numbers for this step: as keyword arguments, or in a mapping if a name is no Python
    identifier.

    Without `step`, the current step of `runtime.train` counts, and outside of it the time. If several ranks
    log the same name, the value of the lowest rank counts. Infinite and NaN values are kept as such. Reading
    a tensor waits for its device.

    `SpecError`: a name is not printable or longer than 100 characters, or there are more than 64 at once.
    `TypeError`: a value or the step is no number. Both are also raised outside of Shoal.
    """
    all_values = {**(values or {}), **named}
    if not all_values or len(all_values) > MAX_VALUES:
        raise SpecError(f"{len(all_values)} values in one call of `log`; it takes 1 to {MAX_VALUES}")
    for name, value in all_values.items():
        if not is_metric_name(name):
            raise SpecError(f"{name!r:.120} cannot name a metric; use up to {MAX_NAME} printable characters")
        check_number(name, value)
    at = None if step is None else whole_number("step", step, 0)
    if at is not None and at > MAX_X:
        raise SpecError(f"step={at!r:.40} is too great; pass {MAX_X} or less")
    metric_channel().send(all_values, at)


def is_metric_name(name: object) -> bool:
    """Whether the name is short and printable, without a space at either end."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()


def _inherited_socket(variable: str) -> int | None:
    fd, _, inode = variable.partition(":")
    if not fd:
        return None
    with contextlib.suppress(OSError, ValueError):
        facts = os.fstat(int(fd))
        if stat.S_ISSOCK(facts.st_mode) and facts.st_ino == int(inode):
            return int(fd)
    return None
