"""The only file of this engine that starts a process or opens a socket."""

# The spool names its files by strings: a supervisor starts without pathlib.
# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping

import msgspec

from shoal.clock import BootClock
from shoal.runtime import spool
from shoal.runtime.standby.place import Call, door_of
from shoal.socket_file import pinned

FIRST_PORT = 20_000
NUM_PORTS = 10_000
"""Below Linux's ephemeral ports (32768 on), which any outgoing connection may take at any time."""
PIPE_SIZE = 64 << 10
WORDS_S = 20.0
CALL_S = 0.5
"""A standby that takes longer to answer is passed over."""
FORK_S = 2.0
"""A nursery that takes longer than this is given up: a plain start takes a tenth of it."""
MAX_LOSSES = 10
"""Nurseries lost without having forked anything in between, after which no more are started."""


class Nursery:
    """Our end of the warm process that forks supervisors (`shoal.runtime.nursery`).

    Only makes starts quicker: whatever is wrong with it, the caller starts the supervisor itself. A share
    that got two supervisors this way is claimed by one of them.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = dict(environment)
        self._guard = threading.Lock()
        self._pid: int | None = None
        self._door: socket.socket | None = None
        self._is_ready = False
        self._num_losses = 0

    def tend(self) -> None:
        """Have one running. Call it often: a nursery that was killed is replaced here."""
        with self._guard:
            if self._pid is not None and not _is_running(self._pid, None):
                self._lose()
            if self._pid is None and self._num_losses < MAX_LOSSES:
                with contextlib.suppress(OSError):
                    self._start()

    def fork(self, directory: str, given: int, errors: int) -> int | None:
        """A new supervisor's pid. None: nobody answered, and whether there is a supervisor is not known.

        Does not wait for a nursery that is still getting ready: a plain start would be quicker.
        """
        with self._guard:
            if self._door is None or not self._listens(self._door):
                return None
            try:
                socket.send_fds(self._door, [os.fsencode(directory)], [given, errors])
                answer = self._door.recv(64)
            except OSError:
                answer = b""
            if not answer:
                self._lose()
                return None
            self._num_losses = 0
        return int(answer) or None

    def is_ready(self) -> bool:
        """Whether it could fork one now."""
        with self._guard:
            return self._door is not None and self._listens(self._door)

    def close(self) -> None:
        """End it for good. Its supervisors do not notice."""
        with self._guard:
            self._lose()
            self._num_losses = MAX_LOSSES

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            self._pid = _start(self._command, self._environment, theirs.fileno(), subprocess.DEVNULL, None)
            undo.pop_all()
        ours.settimeout(0.0)
        self._door, self._is_ready = ours, False

    def _listens(self, door: socket.socket) -> bool:
        """Whether it has said that it is ready. One that is dead answers too, with nothing."""
        if not self._is_ready:
            with contextlib.suppress(OSError):
                self._is_ready = bool(door.recv(64))
                door.settimeout(FORK_S)
        return self._is_ready

    def _lose(self) -> None:
        """Kill what is left of it: one that hangs must not wake up later as nobody's."""
        if self._door is not None:
            self._door.close()
        if self._pid is not None and _is_running(self._pid, None):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = self._door = None
        self._num_losses += 1


def call_standby(directory: str, share_directory: str, given: int, errors: int) -> int | None:
    """Have the standby whose place this is become the supervisor of a share; its pid. None: there is none, it
    does not fit, or it does not answer, and whether it will yet is not known: the claim decides.
    """
    call = Call(directory=share_directory, sent_at=BootClock().monotonic())
    try:
        with pinned(door_of(directory)) as path, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(CALL_S)
            door.connect(path)
            socket.send_fds(door, [msgspec.json.encode(call)], [given, errors])
            answer = door.recv(64)
    except OSError:
        return None
    return int(answer or 0) or None


class Children:
    """The supervisors this process started. They need no parent; we only keep them from becoming zombies."""

    def __init__(self, nursery: Nursery | None) -> None:
        self._nursery = nursery
        self._pids: dict[int, int | None] = {}
        """With when each was started, which tells it from a later process with its pid."""
        self._guard = threading.Lock()

    def spawn(
        self,
        directory: str,
        command: list[str],
        environment: Mapping[str, str],
        errors_path: str,
        given: bytes,
        standby: str | None = None,
    ) -> int:
        """Start the supervisor of `directory`: from the standby whose place is named, if it is there, from
        the nursery, or else by `command`; its pid.

        It leads a session and has `given` on its standard input. `OSError`: it was not started. Never
        blocks on the child: what it is given fits in the pipe, or nothing is started.
        """
        # O_APPEND: a second supervisor of the share must not overwrite what the first one said.
        errors = os.open(errors_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            pid = None
            if standby is not None:
                with _pipe_with(given) as reader:
                    pid = call_standby(standby, directory, reader, errors)
            if pid is None and self._nursery is not None:
                with _pipe_with(given) as reader:  # of the first one somebody may have read a part
                    pid = self._nursery.fork(directory, reader, errors)
            if pid is None:
                with _pipe_with(given) as reader:
                    pid = _start(command, environment, reader, errors, errors)
        finally:
            os.close(errors)
        with self._guard:
            self._pids[pid] = spool.start_ticks(pid)
        return pid

    def reap(self) -> None:
        """Collect those that ended, and see to the nursery. Does not wait for any of them."""
        with self._guard:
            self._pids = {pid: ticks for pid, ticks in self._pids.items() if _is_running(pid, ticks)}
        if self._nursery is not None:
            self._nursery.tend()

    def close(self) -> None:
        """Start nothing any more. Supervisors run on."""
        if self._nursery is not None:
            self._nursery.close()
        self.reap()

    def kill(self, pid: int) -> None:
        """End a child of ours; one that has ended is left alone."""
        with self._guard:
            if pid in self._pids and _is_running(pid, self._pids[pid]):
                os.kill(pid, signal.SIGKILL)

    def is_running(self, pid: int) -> bool:
        """Whether `pid` is a child of ours that has not ended."""
        self.reap()
        with self._guard:
            return pid in self._pids


def _start(
    command: list[str], environment: Mapping[str, str], stdin: int, stdout: int, stderr: int | None
) -> int:
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd="/",
        env=dict(environment),
        start_new_session=True,
    )
    # We wait for it by pid. Left alone, a Popen warns when it is dropped before its child ends.
    process.returncode = 0
    return process.pid


@contextlib.contextmanager
def _pipe_with(given: bytes) -> Iterator[int]:
    """The reading end of a pipe that holds `given`."""
    reader, writer = os.pipe()
    try:
        with open(writer, "wb", buffering=0) as pipe:
            _fill(pipe.fileno(), given)
        yield reader
    finally:
        os.close(reader)


def _fill(writer: int, given: bytes) -> None:
    """Put all of `given` in the pipe, or raise `OSError` rather than wait for a reader."""
    if len(given) > PIPE_SIZE:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, len(given))
    os.set_blocking(writer, False)
    if given and os.write(writer, given) < len(given):
        raise OSError(errno.ENOBUFS, "the credentials do not fit in a pipe")


def _is_running(pid: int, ticks: int | None) -> bool:
    """Whether this very process has not ended; a child of ours that has is taken off the kernel's hands."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:  # the nursery's child, or nobody's any more
        return ticks is not None and spool.start_ticks(pid) == ticks


def read_words(command: list[str], environment: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """The words a short command prints, and why there are none where it failed."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            cwd="/",
            capture_output=True,
            timeout=WORDS_S,
            check=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return (), str(told).strip().splitlines()[-1]
    return tuple(done.stdout.split()), ""


def free_port(address: str, taken: Collection[int], start: int) -> int:
    """A port that can be bound now and is not among `taken`, looked for from `start` on.

    Nothing keeps it free afterwards: `taken` must name the ports promised to attempts that still run.
    """
    for step in range(NUM_PORTS):
        port = FIRST_PORT + (start + step) % NUM_PORTS
        if port not in taken and _can_bind(address, port):
            return port
    raise OSError(errno.EADDRINUSE, f"all {NUM_PORTS} ports from {FIRST_PORT} on are taken")


def _can_bind(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
