"""Wait for the share's processes: carry what they write into the log, notice how they end.

One loop without threads. It never decides to stop anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
from collections import deque

from shoal.clock import Clock
from shoal.runtime.last_words import LastWords, why
from shoal.runtime.launch import Pipes
from shoal.runtime.logs import LineSplitter, LogFile
from shoal.runtime.rules import LogRules

STACKS = "t"
"""The letter of stacks in the log."""
CHUNK = 1 << 18
HELD_LINES, HELD_LENGTH = 50, 1000
SEARCHED_CHUNK = 1 << 16
"""Less at once where log rules have to go through it: the loop must come round again soon."""


class Process:
    """One started process of the share. `rank` None: it prepares the ranks' place.

    One that `is_needed` and ends badly ends the share.
    """

    def __init__(self, pid: int, rank: int | None, *, is_needed: bool = True) -> None:
        self.pid = pid
        self.rank = rank
        self.is_needed = is_needed
        self.slot = 0
        """Its place on the share's board."""
        self.is_doomed = False
        """We have killed it, and it may not be gone yet."""
        self.status: int | None = None
        """As `waitpid` gives it; None while it runs."""
        self.ended_at = 0.0
        """When we saw that."""
        self.spoke_at: float | None = None
        """When it first wrote something, by the wall clock."""
        self._error, self._output = LastWords(), LastWords()
        self.held: deque[bytes] | None = None
        """The last lines of a helper of the ranks, which would confuse in the midst of training.
        None: all lines of this process go into the log."""

    def hear(self, lines: list[bytes], now: float, *, is_error: bool) -> None:
        """Note what it wrote at `now`, by the wall clock."""
        self.spoke_at = self.spoke_at or now
        (self._error if is_error else self._output).add(lines, now)

    @property
    def last_words(self) -> str:
        """What it wrote that tells best why it ended."""
        return why(self._error, self._output, self.ended_at)


class _Stream:
    def __init__(self, fd: int, process: Process, *, is_error: bool) -> None:
        self.fd = fd
        self.process = process
        self.is_error = is_error
        self.splitter = LineSplitter()

    @property
    def letter(self) -> str:
        """As the log names it: of a rank, or of what is none yet."""
        if self.process.rank is None:
            return "s"
        return "e" if self.is_error else "o"


def is_killed(status: int | None) -> bool:
    """Whether a signal ended it, and not one that ranks send themselves when they lose a peer."""
    return status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGABRT


class Watcher:
    """The loop's eyes. `turn` is one look; between looks nothing is lost, only late."""

    def __init__(self, log: LogFile, rules: LogRules, wake_fd: int, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._rules = rules
        self._wake_fd = wake_fd
        self._epoll = select.epoll()
        self._epoll.register(wake_fd, select.EPOLLIN)
        self._streams: dict[int, _Stream] = {}
        self._redrawn: dict[int, _Stream] = {}
        """Streams in the middle of a line that is drawn again and again."""
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

    def turn(self, timeout_s: float) -> None:
        """Wait until something happens or the time is over, and deal with all of it."""
        at_once = 1 if self._rules.are_waiting else -1
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
        """Collect every dead child, ours and the orphans that fell to us; note how ours ended."""
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
                if process.held is not None and os.WIFEXITED(status) and status != 0:
                    self.show(process)

    def _is_before(self, process: Process, batch: set[int]) -> bool:
        """Whether it is the first failure. Of those seen at once, one that was killed: its peers give up."""
        first = self.first_failed
        if first is None or first.pid not in batch:
            return first is None
        return is_killed(process.status) and not is_killed(first.status)

    def forget(self, processes: list[Process]) -> None:
        """What these do from now on, and how they ended, is nobody's business any more."""
        for process in processes:
            process.is_needed = False
        self.first_failed = None

    def blame(self, process: Process) -> None:
        """It has failed, now or when it ends."""
        process.is_needed = True
        if process.status is not None:
            self.first_failed = self.first_failed or process

    def say(self, text: str) -> None:
        """Put a word of our own into the log."""
        self._log.say(text)

    def is_silent(self, process: Process) -> bool:
        """Whether nobody is left who could write for it: it is gone, and so is all that it started."""
        return not any(stream.process is process for stream in self._streams.values())

    def catch_up(self, process: Process) -> None:
        """Take what a process that ended has left in its pipes: its last lines may say why."""
        for stream in [one for one in self._streams.values() if one.process is process]:
            left = fcntl.fcntl(stream.fd, fcntl.F_GETPIPE_SZ)
            while left > 0 and stream.fd in self._streams and (read := self._pump(stream)):
                left -= read

    def hold(self, process: Process) -> None:
        """Keep what this helper of the ranks writes out of the log, unless it exits with an error."""
        process.held = deque(maxlen=HELD_LINES)

    def show(self, process: Process) -> None:
        """Put the last lines of a process that was held into the log, after all."""
        self.catch_up(process)
        lines, process.held = list(process.held or ()), None
        self._log.add(None, "s", lines)

    def keep(self, rank: int | None, text: str) -> None:
        """Put the stacks of a rank into the log, where they are not mistaken for what it wrote."""
        self._log.add(rank, STACKS, [line.encode() for line in text.splitlines()])

    def pipes_of(self, process: Process) -> set[int]:
        """The inode numbers of what it writes to."""
        return {os.fstat(stream.fd).st_ino for stream in self._streams.values() if stream.process is process}

    def drain(self) -> None:
        """Take what is left in the pipes when everything of the share is dead.

        No more than they held at that time: a rank may have handed its pipe to somebody who writes on.
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
        """Take one read's worth; how many bytes it was."""
        try:
            chunk = os.read(stream.fd, SEARCHED_CHUNK if self._rules.are_waiting else CHUNK)
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
        if stream.process.held is not None:
            stream.process.held.extend(line[:HELD_LENGTH] for line in lines[-HELD_LINES:])
        else:
            self._log.add(stream.process.rank, stream.letter, lines)
        stream.process.hear(lines, self._clock.now(), is_error=stream.is_error)
        self._rules.check(lines)
        while self._rules.complaints:
            self._log.say(self._rules.complaints.pop(0))
