"""Wait for the task's processes: carry their output into the log, and notice how they end.

The watcher is one loop without threads. It never decides to stop anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
from collections import deque

from shoal.clock import Clock
from shoal.runtime.process.launcher import Pipes
from shoal.runtime.process.log import LineSplitter, LogFile
from shoal.runtime.process.log_rules import LogRules
from shoal.runtime.process.output_tail import OutputTail, tail_of_streams

STACKS_STREAM = "t"
"""The stream letter of stack dumps in the log."""
CHUNK = 1 << 18
HELD_LINES, HELD_LENGTH = 50, 1000
SEARCHED_CHUNK = 1 << 16
"""A smaller read for output that log rules have to search, so that the loop comes round again soon."""


class Process:
    """One started process of the task. `rank` None: it prepares for the ranks.

    If a process that `is_needed` fails, the task fails.
    """

    def __init__(self, pid: int, rank: int | None, *, is_needed: bool = True) -> None:
        self.pid = pid
        self.rank = rank
        self.is_needed = is_needed
        self.slot = 0
        """Its slot on the task's rank board."""
        self.was_killed = False
        """The supervisor has killed it, but it may not be gone."""
        self.status: int | None = None
        """The status from `waitpid`; None while it runs."""
        self.ended_at = 0.0
        """When the watcher noticed the end."""
        self.first_output_at: float | None = None
        """When it first wrote something, by the wall clock."""
        self._error, self._output = OutputTail(), OutputTail()
        self.held_lines: deque[bytes] | None = None
        """The last lines of a helper of the ranks, which would confuse readers if they appeared during
        training. None: all lines of this process go into the log.
        """

    def note_output(self, lines: list[bytes], now: float, *, is_error: bool) -> None:
        """Note the lines that it wrote at `now`, by the wall clock."""
        self.first_output_at = self.first_output_at or now
        (self._error if is_error else self._output).add(lines, now)

    @property
    def output_tail(self) -> str:
        """The part of its output that best says why it ended."""
        return tail_of_streams(self._error, self._output, self.ended_at)


class _Stream:
    def __init__(self, fd: int, process: Process, *, is_error: bool) -> None:
        self.fd = fd
        self.process = process
        self.is_error = is_error
        self.splitter = LineSplitter()

    @property
    def letter(self) -> str:
        """The stream's letter in the log. A process before the ranks has a letter of its own."""
        if self.process.rank is None:
            return "s"
        return "e" if self.is_error else "o"


def is_killed_by_others(status: int | None) -> bool:
    """Whether a signal ended it, except the one that ranks send themselves when they lose a peer."""
    return status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGABRT


class Watcher:
    """Watches all processes. Between two calls of `poll`, nothing is lost, but it is noticed later."""

    def __init__(self, log: LogFile, rules: LogRules, wake_fd: int, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._rules = rules
        self._wake_fd = wake_fd
        self._epoll = select.epoll()
        self._epoll.register(wake_fd, select.EPOLLIN)
        self._streams: dict[int, _Stream] = {}
        self._redrawn: dict[int, _Stream] = {}
        """Streams in the middle of a line that is redrawn."""
        self._processes: dict[int, Process] = {}
        self.first_failed: Process | None = None

    def add(self, process: Process, pipes: Pipes) -> None:
        """Watch a process that was just started."""
        self._processes[process.pid] = process
        for fd, is_error in ((pipes.stdout, False), (pipes.stderr, True)):
            stream = _Stream(fd, process, is_error=is_error)
            os.set_blocking(stream.fd, False)
            self._streams[stream.fd] = stream
            self._epoll.register(stream.fd, select.EPOLLIN)

    def poll(self, timeout_s: float) -> None:
        """Wait until something happens or the time is over, and handle all of it."""
        at_once = 1 if self._rules.has_pending else -1
        for fd, _ in self._epoll.poll(max(0.0, timeout_s), at_once):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            else:
                self._pump(self._streams[fd])
        for stream in list(self._redrawn.values()):
            self._take(stream, stream.splitter.settled(self._clock.monotonic()))
        self.reap()

    def reap(self) -> None:
        """Collect every dead child, including orphans that came to us, and note how watched ones ended."""
        batch: set[int] = set()
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = self._processes.get(pid)
            if process is not None:
                process.status, process.ended_at = status, self._clock.now()
                if status != 0 and process.is_needed and self._is_before(process, batch):
                    self.first_failed = process
                batch.add(pid)
                if process.held_lines is not None and os.WIFEXITED(status) and status != 0:
                    self.log_held_output(process)

    def _is_before(self, process: Process, batch: set[int]) -> bool:
        """Whether it is the first failure. Of failures seen at once, a killed process counts as first,
        because the others give up when they lose a peer.
        """
        first = self.first_failed
        if first is None or first.pid not in batch:
            return first is None
        return is_killed_by_others(process.status) and not is_killed_by_others(first.status)

    def forget(self, processes: list[Process]) -> None:
        """Ignore from now on how these processes end, or ended."""
        for process in processes:
            process.is_needed = False
        self.first_failed = None

    def blame(self, process: Process) -> None:
        """Count the process as failed, now or when it ends."""
        process.is_needed = True
        if process.status is not None:
            self.first_failed = self.first_failed or process

    def log_message(self, text: str) -> None:
        """Put a message of Shoal into the log."""
        self._log.add_message(text)

    def has_closed_output(self, process: Process) -> bool:
        """Whether no process holds its output open: it is gone, and so is everything that it started."""
        return not any(stream.process is process for stream in self._streams.values())

    def drain_process(self, process: Process) -> None:
        """Read what an ended process left in its pipes, because its last lines may say why it ended."""
        for stream in [candidate for candidate in self._streams.values() if candidate.process is process]:
            left = fcntl.fcntl(stream.fd, fcntl.F_GETPIPE_SZ)
            while left > 0 and stream.fd in self._streams and (read := self._pump(stream)):
                left -= read

    def hold_output(self, process: Process) -> None:
        """Keep the output of this helper of the ranks out of the log, unless it exits with an error."""
        process.held_lines = deque(maxlen=HELD_LINES)

    def log_held_output(self, process: Process) -> None:
        """Put the last lines of a held process into the log after all."""
        self.drain_process(process)
        lines, process.held_lines = list(process.held_lines or ()), None
        self._log.add(None, "s", lines)

    def log_stacks(self, rank: int | None, text: str) -> None:
        """Put the stacks of a rank into the log, on a stream of their own."""
        self._log.add(rank, STACKS_STREAM, [line.encode() for line in text.splitlines()])

    def pipe_inodes(self, process: Process) -> set[int]:
        """Return the inode numbers of the pipes that it writes to."""
        return {os.fstat(stream.fd).st_ino for stream in self._streams.values() if stream.process is process}

    def drain(self) -> None:
        """Read what is left in the pipes when every process of the task is dead.

        Read no more than the pipes hold now, because a rank may have passed its pipe to a process that still
        writes.
        """
        self.reap()
        for stream in list(self._streams.values()):
            left = fcntl.fcntl(stream.fd, fcntl.F_GETPIPE_SZ)
            while left > 0 and stream.fd in self._streams:
                read = self._pump(stream)
                left = left - read if read else 0
            if stream.fd in self._streams:
                self._end(stream)

    def _pump(self, stream: _Stream) -> int:
        """Read once and return the number of bytes."""
        try:
            chunk = os.read(stream.fd, SEARCHED_CHUNK if self._rules.has_pending else CHUNK)
        except BlockingIOError:
            return 0
        if chunk:
            self._take(stream, stream.splitter.feed(chunk, self._clock.monotonic()))
            if stream.splitter.is_redrawn:
                self._redrawn[stream.fd] = stream
            else:
                self._redrawn.pop(stream.fd, None)
        else:
            self._end(stream)
        return len(chunk)

    def _end(self, stream: _Stream) -> None:
        self._take(stream, stream.splitter.finish())
        self._epoll.unregister(stream.fd)
        os.close(stream.fd)
        del self._streams[stream.fd]
        self._redrawn.pop(stream.fd, None)

    def _take(self, stream: _Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        if stream.process.held_lines is not None:
            stream.process.held_lines.extend(line[:HELD_LENGTH] for line in lines[-HELD_LINES:])
        else:
            self._log.add(stream.process.rank, stream.letter, lines)
        stream.process.note_output(lines, self._clock.now(), is_error=stream.is_error)
        self._rules.check(lines)
        while self._rules.complaints:
            self._log.add_message(self._rules.complaints.pop(0))
