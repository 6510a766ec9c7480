"""Starts supervisors: from a standby, from the fork server, or as new processes. Notices when one dies.

This is the only file of the engine that starts a process or opens a socket. The kernel reports the death of
a supervisor through its pidfd. That is a hint to observe the task at once, never evidence: the lock is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from shoal.clock import BootClock
from shoal.local_sockets import pinned_socket
from shoal.runtime.files import spool
from shoal.runtime.standby.slot import TakeoverRequest, socket_path


class ExitNotifier:
    """Calls back when the supervisor of a followed task dies. Safe to use from several threads.

    Its own thread begins with the first listener.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._callback: Callable[[], None] | None = None
        self._epoll: select.epoll | None = None
        self._followed: dict[int, spool.SpoolTask] = {}
        """By pidfd."""

    def listen(self, callback: Callable[[], None]) -> None:
        with self._guard:
            self._callback = callback
            if self._epoll is None:
                self._epoll = select.epoll()
                threading.Thread(target=self._run, args=(self._epoll,), name="notice", daemon=True).start()

    def follow(self, task: spool.SpoolTask) -> None:
        """Call back when the process that claimed the task is gone. Call this once for each claim."""
        with contextlib.suppress(OSError), self._guard:
            claim = spool.read_claim(task)
            if self._epoll is None or claim is None or claim.boot_id != spool.boot_id():
                return
            pidfd = os.pidfd_open(claim.pid)
            if spool.start_ticks(claim.pid) != claim.start_ticks:
                os.close(pidfd)
                return
            self._followed[pidfd] = task
            self._epoll.register(pidfd, select.EPOLLIN)

    def close(self) -> None:
        """Stop calling back. The thread sleeps until its process ends."""
        with self._guard:
            self._callback = None

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for pidfd, _ in epoll.poll():
                with self._guard:
                    task, callback = self._followed.pop(pidfd), self._callback
                    epoll.unregister(pidfd)
                    os.close(pidfd)
                if callback is not None and not os.path.exists(task.outcome):  # noqa: PTH110
                    with contextlib.suppress(RuntimeError):  # the event loop that it would wake is closed
                        callback()


# The spool names its files by strings: a supervisor starts without pathlib.
# ruff: noqa: PTH123


FIRST_PORT = 20_000
NUM_PORTS = 10_000
"""Below Linux's ephemeral ports (32768 on), which any outgoing connection may take at any time."""
PIPE_SIZE = 64 << 10
WORDS_S = 20.0
CALL_S = 0.5
"""A standby that takes longer to reply is skipped."""
FORK_S = 2.0
"""A fork server that takes longer than this is given up: a plain start takes a tenth of it."""
MAX_LOSSES = 10
"""After this many fork servers were lost without a fork in between, no more are started."""


class ForkServer:
    """The engine's end of the warm process that forks supervisors (`shoal.runtime.process.fork_server`).

    It only makes starts faster: if anything is wrong with it, the caller starts the supervisor itself. If a
    task gets two supervisors this way, one of them claims it.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = dict(environment)
        self._guard = threading.Lock()
        self._pid: int | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._num_losses = 0

    def ensure_running(self) -> None:
        """Start the fork server if none runs. Call this often, because it replaces one that was killed."""
        with self._guard:
            if self._pid is not None and not _is_running(self._pid, None):
                self._discard()
            if self._pid is None and self._num_losses < MAX_LOSSES:
                with contextlib.suppress(OSError):
                    self._start()

    def fork(self, directory: str, stdin: int, errors: int) -> int | None:
        """Fork a supervisor and return its pid. None: no reply, and whether a supervisor exists is unknown.

        Does not wait for a fork server that is getting ready, because a plain start would be faster.
        """
        with self._guard:
            if self._socket is None or not self._check_ready(self._socket):
                return None
            try:
                socket.send_fds(self._socket, [os.fsencode(directory)], [stdin, errors])
                reply = self._socket.recv(64)
            except OSError:
                reply = b""
            if not reply:
                self._discard()
                return None
            self._num_losses = 0
        return int(reply) or None

    def is_ready(self) -> bool:
        """Return whether it could fork a supervisor now."""
        with self._guard:
            return self._socket is not None and self._check_ready(self._socket)

    def close(self) -> None:
        """Stop the fork server for good. Its supervisors do not notice."""
        with self._guard:
            self._discard()
            self._num_losses = MAX_LOSSES

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            self._pid = _start(self._command, self._environment, theirs.fileno(), subprocess.DEVNULL, None)
            undo.pop_all()
        ours.settimeout(0.0)
        self._socket, self._is_ready = ours, False

    def _check_ready(self, connection: socket.socket) -> bool:
        """Return whether it has reported that it is ready. A dead one also "replies", with an empty
        message.
        """
        if not self._is_ready:
            with contextlib.suppress(OSError):
                self._is_ready = bool(connection.recv(64))
                connection.settimeout(FORK_S)
        return self._is_ready

    def _discard(self) -> None:
        """Kill what is left of it: one that hangs must not wake up later without an owner."""
        if self._socket is not None:
            self._socket.close()
        if self._pid is not None and _is_running(self._pid, None):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = self._socket = None
        self._num_losses += 1


def call_standby(directory: str, task_directory: str, stdin: int, errors: int) -> int | None:
    """Make the standby in `directory` the supervisor of a task; return its pid.

    None: there is no standby, it does not fit, or it does not reply. Whether it will still take over is
    unknown; the claim decides.
    """
    call = TakeoverRequest(directory=task_directory, sent_at=BootClock().monotonic())
    try:
        with (
            pinned_socket(socket_path(directory)) as path,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        ):
            connection.settimeout(CALL_S)
            connection.connect(path)
            socket.send_fds(connection, [msgspec.json.encode(call)], [stdin, errors])
            reply = connection.recv(64)
    except OSError:
        return None
    return int(reply or 0) or None


class SupervisorProcesses:
    """The supervisors that this process started. They need no parent; we only reap zombies."""

    def __init__(self, fork_server: ForkServer | None) -> None:
        self._fork_server = fork_server
        self._pids: dict[int, int | None] = {}
        """With the start time of each, which distinguishes it from a later process with its pid."""
        self._guard = threading.Lock()

    def spawn(
        self,
        directory: str,
        command: list[str],
        environment: Mapping[str, str],
        errors_path: str,
        stdin_data: bytes,
        standby: str | None = None,
    ) -> int:
        """Start the supervisor of `directory` and return its pid.

        It comes from the standby in the folder `standby`, if there is one, from the fork server, or else
        from `command`. It leads a session and has `stdin_data` on its standard input. `OSError`: it was not
        started. Never blocks on the child: `stdin_data` fits in the pipe, or nothing is started.
        """
        # O_APPEND: a second supervisor of the task must not overwrite the output of the first.
        errors = os.open(errors_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            pid = None
            if standby is not None:
                with _pipe_with(stdin_data) as reader:
                    pid = call_standby(standby, directory, reader, errors)
            if pid is None and self._fork_server is not None:
                # another process may have read a part of the first pipe
                with _pipe_with(stdin_data) as reader:
                    pid = self._fork_server.fork(directory, reader, errors)
            if pid is None:
                with _pipe_with(stdin_data) as reader:
                    pid = _start(command, environment, reader, errors, errors)
        finally:
            os.close(errors)
        with self._guard:
            self._pids[pid] = spool.start_ticks(pid)
        return pid

    def reap(self) -> None:
        """Reap the children that ended, and ensure that the fork server runs. Does not wait for any of
        them.
        """
        with self._guard:
            self._pids = {pid: ticks for pid, ticks in self._pids.items() if _is_running(pid, ticks)}
        if self._fork_server is not None:
            self._fork_server.ensure_running()

    def close(self) -> None:
        """Stop starting supervisors. Running ones keep running."""
        if self._fork_server is not None:
            self._fork_server.close()
        self.reap()

    def kill(self, pid: int) -> None:
        """Kill a child of ours; one that has ended is left alone."""
        with self._guard:
            if pid in self._pids and _is_running(pid, self._pids[pid]):
                os.kill(pid, signal.SIGKILL)

    def is_running(self, pid: int) -> bool:
        """Return whether `pid` is a child of ours that has not ended."""
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
    # We wait for it by pid. Without this, Popen warns when it is dropped before its child ends.
    process.returncode = 0
    return process.pid


@contextlib.contextmanager
def _pipe_with(data: bytes) -> Iterator[int]:
    """Yield the reading end of a pipe that holds `data`."""
    reader, writer = os.pipe()
    try:
        with open(writer, "wb", buffering=0) as pipe:
            _fill(pipe.fileno(), data)
        yield reader
    finally:
        os.close(reader)


def _fill(writer: int, data: bytes) -> None:
    """Put all of `data` in the pipe, or raise `OSError` instead of waiting for a reader."""
    if len(data) > PIPE_SIZE:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, len(data))
    os.set_blocking(writer, False)
    if data and os.write(writer, data) < len(data):
        raise OSError(errno.ENOBUFS, "the credentials do not fit in a pipe")


def _is_running(pid: int, ticks: int | None) -> bool:
    """Return whether exactly this process has not ended. Reaps it if it is our child and has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:  # a child of the fork server, or an orphan
        return ticks is not None and spool.start_ticks(pid) == ticks


def read_words(command: list[str], environment: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Return the words that a short command prints, and the reason if it failed."""
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
        message = getattr(error, "stderr", None) or str(error)
        return (), str(message).strip().splitlines()[-1]
    return tuple(done.stdout.split()), ""


def free_port(address: str, taken: Collection[int], start: int) -> int:
    """Return a port that can be bound now and is not among `taken`. The search begins at `start`.

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
