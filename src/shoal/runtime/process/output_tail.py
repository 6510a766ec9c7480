"""Why a process failed, in its own output: its newest Python traceback, otherwise its last lines.

Programs are noisy at their end: libraries report leaks, connections that peers closed, and memory freed
twice. So the newest traceback is kept apart from the lines that follow it. All buffers are bounded, because a
job writes whatever it likes.
"""

from __future__ import annotations

import re
from collections import deque

import msgspec

REMEMBERED_LINES, REMEMBERED_LENGTH = 5, 300
TRACE_LINES, TRACE_BYTES = 30, 1600
"""The inner end of a traceback is kept, because the message of an outcome has 2,000 characters."""
FATAL_LINES = 8
"""faulthandler names the innermost frame first, so its beginning is kept."""
MESSAGE_LINES = 4
"""Indented lines of an exception's message that are kept after the first one."""
NO_MPI = re.compile(
    r"An error occurred in MPI_Init|\*\*\* on a NULL communicator|MPI_INIT failed|PMI_Init returned -1"
    r"|before MPI_INIT completed|orte/util/show_help\.c|error has occurred in ORTE|start_it_with_mpirun"
    r"|connection back\s+to mpirun|instead of ORTE_SUCCESS"
)
"""Messages of Open MPI and MPICH that MPI could not start. Their launchers write more lines after it than are
kept, so the newest such line is kept apart like a traceback.
"""
_NO_MPI = re.compile(NO_MPI.pattern.encode())
MAX_NOISE = 200
"""Lines of noise in one piece of output that do not push out the lines before them."""
MAX_OPEN = 8
"""Tracebacks that may interleave in one stream. Their prefixes tell them apart."""
STALE_LINES, STALE_S = 20, 10.0
"""The program handled a traceback that is older and followed by more lines, so it is not why it ended."""

_MARKS = (b"Traceback (most recent call last)", b"Fatal Python error: ")
_COLOURS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
# Prefixes: torch writes `[rank1]: `, exception groups `  | `, launchers `[1]<stderr>:`.
_HEADER = re.compile(
    rb"^(?P<prefix>|.{0,60}?[\]:|>+] ?)(?P<indent> *)(?:Original |Exception Group )?"
    rb"(?:Traceback \(most recent call last\):?\s*$|(?P<fatal>Fatal Python error: ))"
)
_BOX = re.compile(rb"^\s*(?:\xe2\x95\xad|\+-).*Traceback \(most recent call last\)")
"""Rich draws its tracebacks in a box, with the exception below it."""
_BOX_SIDES = re.compile(rb"^\s*(?:\xe2\x94\x82|\|)\s*|\s*(?:\xe2\x94\x82|\|)\s*$")
_BOX_FRAME = re.compile(rb"^(?:\S+:\d+ in |\xe2\x9d\xb1 )")
_ERROR = re.compile(rb"^(?:(?:[A-Za-z_]\w*\.)+\w+|[A-Z_]\w*)(?::|\s*$)")
"""The name of an exception, as in the last line of a traceback."""
_ASIDE = re.compile(rb"Exception (?:ignored |in thread )")
"""Introduces the traceback of an exception that does not end the program."""
_CHAIN = re.compile(rb"^(?:The above exception was the direct cause|During handling of the above exception)")
_NOISE = re.compile(
    rb"^nanobind: |^ - leaked |resource_tracker|leaked (?:semaphore|shared_memory)"
    rb"|\w+Warning: |^ *warnings\.warn\("
)


class Traceback(msgspec.Struct):
    """A traceback in a stream. `prefix` comes before each of its lines."""

    prefix: bytes = b""
    indent: int = 0
    is_aside: bool = False
    is_box: bool = False
    is_fatal: bool = False
    lines: deque[bytes] = msgspec.field(default_factory=lambda: deque(maxlen=TRACE_LINES))
    num_skipped: int = 0
    """Lines since the header that belong to another writer."""
    num_message_lines: int = 0
    """Lines of the exception itself."""

    def consume(self, line: bytes) -> bool:
        """Take the line if it belongs to this traceback. False also if that is complete: see `is_open`."""
        if not line.startswith(self.prefix):
            return False
        body = line[len(self.prefix) + self.indent :].rstrip()
        if self.is_box and not self.num_message_lines:
            return self._consume_box(line)
        is_frame = body[:1] in (b" ", b"\t")
        if self.num_message_lines:
            self.num_message_lines = self.num_message_lines + 1 if is_frame else MESSAGE_LINES + 1
            if is_frame:
                self.lines.append(body)
            return is_frame
        if is_frame or (_ERROR.match(body) and not _NOISE.search(body)):
            self.lines.append(body)
            self.num_message_lines += not is_frame
            return True
        self.num_skipped += 1
        return False

    def _consume_box(self, line: bytes) -> bool:
        body = _BOX_SIDES.sub(b"", line)
        if _BOX_FRAME.match(body):
            self.lines.append(b"  " + body)
        elif _ERROR.match(line):
            self.lines.append(line)
            self.num_message_lines = 1
        else:
            self.num_skipped += line.lstrip()[:1] not in (b"|", b"\xe2")
        return True

    @property
    def is_open(self) -> bool:
        """Whether more lines of it may come."""
        if self.is_fatal and len(self.lines) >= FATAL_LINES:
            return False
        return self.num_message_lines <= MESSAGE_LINES and self.num_skipped <= STALE_LINES


class OutputTail:
    """Takes the lines of one stream. `now` is always in seconds of the same clock."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=REMEMBERED_LINES)
        self._open: dict[bytes, Traceback] = {}
        self._newest: Traceback | None = None
        self._newest_at = 0.0
        self._num_since = 0
        """Lines after the newest traceback."""
        self._is_aside = False
        self._chain: list[bytes] = []
        self._no_mpi = b""
        self._num_since_mpi = 0

    def add(self, lines: list[bytes], now: float) -> None:
        if not self._open and not any(mark in line for line in lines for mark in _MARKS):
            self._num_since += len(lines)
            for line in lines[-MAX_NOISE:]:
                self._remember(_visible(line))
            return
        for line in lines:
            shown = _visible(line)
            if shown.strip():
                self._remember(shown)
                self._take(shown, now)

    def text(self, now: float) -> str:
        """Return the newest traceback if the process may have ended by it, otherwise its last lines."""
        trace = self._newest if self.has_traceback(now) else None
        if trace is not None:
            return _bounded_text(list(trace.lines))
        is_cause = self._no_mpi and self._no_mpi not in self._lines and self._num_since_mpi <= STALE_LINES
        return _bounded_text([*([self._no_mpi] if is_cause else []), *self._lines])

    def has_traceback(self, now: float) -> bool:
        is_stale = self._num_since > STALE_LINES and now - self._newest_at > STALE_S
        return self._newest is not None and not is_stale

    def _remember(self, shown: bytes) -> None:
        """Remember a line. Noise is remembered only if there is nothing else."""
        if shown.strip() and not (self._lines and _NOISE.search(shown)):
            self._lines.append(shown)
            self._num_since_mpi += 1
            if _NO_MPI.search(shown):
                self._no_mpi, self._num_since_mpi = shown, 0
        self._is_aside = bool(_ASIDE.search(shown)) or (
            self._is_aside and any(mark in shown for mark in _MARKS)
        )

    def _take(self, shown: bytes, now: float) -> None:
        if any(mark in shown for mark in _MARKS) and (begun := _parse_header(shown)) is not None:
            self._begin(begun, shown, now)
            return
        for prefix, trace in list(self._open.items()):
            is_taken = trace.consume(shown)
            if not trace.is_open:
                del self._open[prefix]
            if is_taken:
                self._newest_at = now if trace is self._newest else self._newest_at
                return
        self._num_since += 1
        if _CHAIN.match(shown) and self._newest is not None and self._newest.num_message_lines:
            error_line = next((line for line in reversed(self._newest.lines) if _ERROR.match(line)), b"")
            self._chain = [error_line, shown]

    def _begin(self, begun: Traceback, shown: bytes, now: float) -> None:
        begun.is_aside, self._is_aside = self._is_aside, False
        begun.lines.extend(self._chain)
        self._chain = []
        begun.lines.append(_MARKS[0] + b":" if begun.is_box else shown[len(begun.prefix) :].strip())
        self._open.pop(begun.prefix, None)
        if len(self._open) >= MAX_OPEN:
            del self._open[next(iter(self._open))]
        self._open[begun.prefix] = begun
        if self._newest is None or self._newest.is_aside or not begun.is_aside:
            self._newest, self._newest_at, self._num_since = begun, now, 0


def tail_of_streams(error: OutputTail, output: OutputTail, now: float) -> str:
    """Return the text that explains a process by both streams: with `2>&1` its errors are in its output."""
    if output.has_traceback(now) and not error.has_traceback(now):
        return output.text(now)
    return error.text(now) or output.text(now)


def _parse_header(shown: bytes) -> Traceback | None:
    if _BOX.match(shown):
        return Traceback(is_box=True)
    match = _HEADER.match(shown)
    if match is None:
        return None
    return Traceback(prefix=match["prefix"], indent=len(match["indent"]), is_fatal=match["fatal"] is not None)


def _visible(line: bytes) -> bytes:
    """Return the line as a terminal finally shows it: without colours and without overwritten text."""
    cut = line.rstrip(b"\r").rpartition(b"\r")[2][: 2 * REMEMBERED_LENGTH]
    return _COLOURS.sub(b"", cut)[:REMEMBERED_LENGTH]


def _bounded_text(lines: list[bytes]) -> str:
    """Join the lines, at most `TRACE_BYTES` unless the last lines alone are longer."""
    while len(lines) > REMEMBERED_LINES and sum(len(line) + 1 for line in lines) > TRACE_BYTES:
        lines.pop(0)
    return "\n".join(line.decode("utf-8", "replace") for line in lines)
