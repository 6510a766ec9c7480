"""What a program says about its training: `runtime.log(loss=..., step=...)`.

Cheap and never in the way: one message to the supervisor, which is dropped and counted where the supervisor
cannot keep up. Outside of Shoal nobody listens and nothing is sent. Needs no torch.
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
from shoal.runtime.arguments import check_number, whole

VARIABLE: Final = "SHOAL_METRICS"
"""`<descriptor>:<inode>`: a socket that a process inherits, unless something else has its number by now."""
MAX_NAME, MAX_VALUES = 100, 64
RATE_S = 1.0
EXIT_MS = 500


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One call, as it travels."""

    rank: int
    step: int | None
    at_ms: int
    values: dict[str, float | None]
    lost: int = 0
    """Calls of this process since the last that was heard, which were not."""


class Voice:
    """This process's way to its supervisor. `step`: where training is, for those who do not say."""

    def __init__(self) -> None:
        self._fd = _found(os.environ.get(VARIABLE, ""))
        self._lost = 0
        self._held: bytes | None = None
        self._rate = Rate()
        self.step: int | None = None
        if self._fd is not None:
            atexit.register(self._flush)

    def say(self, values: Mapping[str, float], step: int | None) -> None:
        if self._fd is None:
            return
        at = self.step if step is None else step
        told = {name: finite(value) for name, value in values.items()}
        if step is not None and (rate := self._rate.seen(step, time.monotonic())) is not None:
            told.setdefault("steps_per_s", rate)
        rank = int(os.environ.get("SHOAL_RANK") or os.environ.get("RANK", "0"))
        line = Line(rank, at, time.time_ns() // 1_000_000, told, self._lost)
        self._send(msgspec.msgpack.encode(line))

    def _send(self, data: bytes) -> None:
        assert self._fd is not None
        try:
            os.write(self._fd, data)
        except OSError:
            # What is held may still be heard: the last words of a program matter more than those before.
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


class Rate:
    """Steps for each second, told about once a second."""

    def __init__(self) -> None:
        self._step, self._at = -1, 0.0

    def seen(self, step: int, now: float) -> float | None:
        """The rate since it was last told; None: too early to say, or steps are made again."""
        is_first = not 0 <= self._step < step
        if not is_first and now < self._at + RATE_S:
            return None
        rate = None if is_first else (step - self._step) / (now - self._at)
        if step != self._step:
            self._step, self._at = step, now
        return rate


_voice: Voice | None = None


def voice() -> Voice:
    """Made when it is first used: a process that forks ranks has none."""
    global _voice  # noqa: PLW0603 - one for each process
    if _voice is None:
        _voice = Voice()
    return _voice


def log(values: Mapping[str, float] | None = None, /, *, step: int | None = None, **named: float) -> None:
    """Note these numbers for this step: by name, or in a mapping where a name is no Python word.

    Without a step it is the one that `runtime.train` is at, and elsewhere the time. Of ranks that log the
    same name, the lowest one's counts. What is not finite is kept as such; a name that is not printable or
    longer than 100, or more than 64 at once, is a `SpecError`; a value or a step that is not a number, a
    `TypeError`: whether anybody listens or not. Reading a tensor waits for its device.
    """
    told = {**(values or {}), **named}
    if not told or len(told) > MAX_VALUES:
        raise SpecError(f"{len(told)} values in one call of `log`; it takes 1 to {MAX_VALUES}")
    for name, value in told.items():
        if not is_metric_name(name):
            raise SpecError(f"{name!r:.120} cannot name a metric; use up to {MAX_NAME} printable characters")
        check_number(name, value)
    at = None if step is None else whole("step", step, 0)
    if at is not None and at > MAX_X:
        raise SpecError(f"step={at!r:.40} is too great; pass {MAX_X} or less")
    voice().say(told, at)


def is_metric_name(name: object) -> bool:
    """Whether it may stand in a table: short, printable, and no space at either end."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()


def _found(told: str) -> int | None:
    fd, _, inode = told.partition(":")
    if not fd:
        return None
    with contextlib.suppress(OSError, ValueError):
        found = os.fstat(int(fd))
        if stat.S_ISSOCK(found.st_mode) and found.st_ino == int(inode):
            return int(fd)
    return None
