"""The zygote: a process that has made a program's imports and forks ranks on request.

It listens on a socket beside the stand-ins, and owns no device and no thread. A process with threads cannot
be forked safely, so a zygote that finds threads exits, and ranks start in the ordinary way. Each connection
carries one request, and the rank dies if its connection breaks.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import warnings
from types import FrameType
from typing import Any

from . import launchers, program

HEADER = struct.Struct("!I")
STATUS = struct.Struct("!i")
STREAMS = 3
PATIENCE_S = 5.0
QUIET_S = 2.0
"""The zygote makes unforeseen imports after the ranks have made no new ones for this long."""


class ForkedRank:
    """A forked rank and the connection of the stand-in that waits for it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid


class Zygote:
    """The server loop, which runs until it is killed. In a forked process, `serve` returns its request."""

    def __init__(self, listener: socket.socket, folder: str) -> None:
        self._listener = listener
        self._folder = folder
        self._learned = os.path.join(folder, "learned")
        self._ranks: dict[int, ForkedRank] = {}
        self._num_learned_bytes = 0
        self._has_written_image = False
        self._wake, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._on_sigterm: Any = signal.SIG_DFL
        """The handler that an imported module has set. The ranks get it."""
        self._ignore_sigterm()
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        self._wake_w = wake_w

    def serve(self) -> dict[str, Any]:
        while True:
            by_fd = {rank.connection.fileno(): rank for rank in self._ranks.values()}
            ready, _, _ = select.select([self._listener.fileno(), self._wake, *by_fd], [], [], QUIET_S)
            if not ready:
                self._learn()
            for one in ready:
                if one == self._listener.fileno():
                    request = self._fork_rank()
                    if request is not None:
                        return request
                elif one == self._wake:
                    self._reap()
                elif by_fd[one].pid in self._ranks:
                    self._pass_signals(by_fd[one])

    def _fork_rank(self) -> dict[str, Any] | None:
        """Accept a connection and fork a rank. Return the request in the new process, None in this one."""
        connection, _ = self._listener.accept()
        connection.settimeout(PATIENCE_S)
        descriptors: list[int] = []
        request: dict[str, Any] = {}
        try:
            head, descriptors = _with_descriptors(connection)
            request = unpack_request(_exactly(connection, HEADER.unpack(head)[0]))
            pid = os.fork()
        except (OSError, ValueError, IndexError, struct.error):
            connection.close()
            pid = -1
        if pid == 0:
            self._drop_descriptors(connection)
            program.adopt_request(request, descriptors)
            program.record_imports(self._learned)
            program.wait_for_first_rank()
            return request
        for fd in descriptors:
            os.close(fd)
        if pid > 0:
            self._ranks[pid] = ForkedRank(connection, pid)
            with contextlib.suppress(OSError):
                connection.sendall(STATUS.pack(0))  # the rank has started, even if this zygote dies
        return None

    def _ignore_sigterm(self) -> None:
        """Survive SIGTERM. A SIGTERM to the whole job is for the ranks, which may save and would die with the
        zygote. This uses a handler because programs that an import starts would inherit an ignored signal.
        """
        before = signal.signal(signal.SIGTERM, _pass_over)
        if before is not _pass_over:
            self._on_sigterm = before

    def _drop_descriptors(self, connection: socket.socket) -> None:
        """Close everything that belongs to the zygote. Runs in the new process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._on_sigterm or signal.SIG_DFL)
        for held in (self._listener, connection, *(rank.connection for rank in self._ranks.values())):
            held.close()
        os.close(self._wake)
        os.close(self._wake_w)

    def _pass_signals(self, rank: ForkedRank) -> None:
        """Forward signals, one byte each. If the stand-in has ended, kill its rank."""
        try:
            numbers = rank.connection.recv(64)
        except OSError:
            numbers = b""
        with contextlib.suppress(ProcessLookupError):
            if not numbers:
                rank.connection.close()
                del self._ranks[rank.pid]
                os.killpg(rank.pid, signal.SIGKILL)
            for number in numbers:
                os.kill(rank.pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while (seen := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                pid = seen.si_pid
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # Its children must not outlive it. Kill them before `waitpid` frees its pid.
                    os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                rank = self._ranks.pop(pid, None)
                if rank is not None:
                    with contextlib.suppress(OSError), rank.connection:
                        rank.connection.sendall(STATUS.pack(status))

    def _learn(self) -> None:
        """Make the unforeseen imports of the ranks, once the ranks make no new ones."""
        with contextlib.suppress(OSError), open(self._learned, "rb") as file:
            file.seek(self._num_learned_bytes)
            text = file.read()
            self._num_learned_bytes += len(text)
            program.preload(list(dict.fromkeys(text.decode(errors="replace").split())))
            self._ignore_sigterm()  # an import may have set something else
            _freeze_heap()
            if text or not self._has_written_image:
                self._has_written_image = True
                _write_image(self._folder)


def _pass_over(signum: int, frame: FrameType | None) -> None:
    """Ignore SIGTERM, which is for the ranks."""


def unpack_request(payload: bytes) -> dict[str, Any]:
    """Decode a request of `stand_in.pack_request`. `ValueError`, `IndexError`: it is invalid."""
    parts = os.fsdecode(payload).split("\0")
    cwd, count = parts[0], int(parts[1])
    variables = dict(word.split("=", 1) for word in parts[2 + count :])
    return {"arguments": parts[2 : 2 + count], "cwd": cwd, "env": variables}


def _with_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive the head of a request and its standard streams. `socket.recv_fds` needs Python 3.9."""
    fds = array.array("i")
    head, rights, _, _ = connection.recvmsg(HEADER.size, socket.CMSG_SPACE(STREAMS * fds.itemsize))
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return head, list(fds)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise ValueError("the stand-in closed the connection in the middle of a request")
        data += chunk
    return bytes(data)


def _freeze_heap() -> None:
    """Prepare for forks: check that Python has no other thread, and keep the heap shared."""
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        sys.exit(f"shoal: starts stay cold: an imported module started threads ({names})")
    gc.collect()
    gc.freeze()


def _write_image(folder: str) -> None:
    """Write what this process has imported, for a standby that should import the same."""
    draft = os.path.join(folder, f"{launchers.IMAGE}.new")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with open(draft, "w", encoding="utf-8") as file:
        json.dump({"modules": program.loaded_modules(folder), "memory_bytes": peak_bytes}, file)
    os.replace(draft, os.path.join(folder, launchers.IMAGE))


def _import_expected(folder: str) -> bool:
    """Import the modules of an earlier zygote's image, and exit if the result differs. False: no image."""
    try:
        with open(os.path.join(folder, launchers.EXPECTED), encoding="utf-8") as file:
            expected: dict[str, str] = json.load(file)
    except FileNotFoundError:
        return False
    program.preload(list(expected))
    differing = program.differing_modules(expected, folder)
    if differing:
        few = ", ".join(differing[:5])
        sys.exit(f"shoal: no standby: other modules than those of the ranks are found here ({few})")
    return True


def main(folder: str, scripts: list[str]) -> int:
    """Listen in `folder`, import what the scripts import, and fork ranks. In a rank, return its exit code."""
    # Native thread pools (OpenBLAS) restart after a fork. Python cannot know that and would warn each time.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        door.bind(f"/proc/self/fd/{here}/socket.new")  # by descriptor: the path itself may be too long
        os.close(here)
        door.listen(128)
        os.rename(f"{folder}/socket.new", f"{folder}/socket")  # found only when it can be knocked at
        if not _import_expected(folder):
            for script in scripts:
                program.preload(program.imported_by(script))
        _freeze_heap()
        request = Zygote(door, folder).serve()
    return program.run(request["arguments"])
