"""The process that has imported what a program imports, and forks its ranks on request.

It listens where stand-ins find it, and owns no device and no thread: a process with threads cannot be forked
safely, so one that finds itself with any gives up, and ranks start the ordinary way. One request for each
connection; a connection that breaks kills its rank.
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

from . import imports, names, program

HEADER = struct.Struct("!I")
STATUS = struct.Struct("!i")
STREAMS = 3
PATIENCE_S = 5.0
QUIET_S = 2.0
"""So long after the last import that nobody foresaw, the zygote makes it too."""


class Rank:
    """A forked rank and the stand-in that waits for it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid


class Zygote:
    """Serves until it is killed. In a process that it forked, `serve` returns that process's request."""

    def __init__(self, door: socket.socket, folder: str) -> None:
        self._door = door
        self._folder = folder
        self._learned = os.path.join(folder, "learned")
        self._ranks: dict[int, Rank] = {}
        self._known = 0
        self._is_told = False
        self._wake, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._on_sigterm: Any = signal.SIG_DFL
        """What an imported module had set, which is the ranks'."""
        self._hold_out()
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        self._wake_w = wake_w

    def serve(self) -> dict[str, Any]:
        while True:
            by_fd = {rank.connection.fileno(): rank for rank in self._ranks.values()}
            ready, _, _ = select.select([self._door.fileno(), self._wake, *by_fd], [], [], QUIET_S)
            if not ready:
                self._learn()
            for one in ready:
                if one == self._door.fileno():
                    request = self._take()
                    if request is not None:
                        return request
                elif one == self._wake:
                    self._reap()
                elif by_fd[one].pid in self._ranks:
                    self._hear(by_fd[one])

    def _take(self) -> dict[str, Any] | None:
        """Fork a rank for whoever knocks. The request itself in the new process, None in this one."""
        connection, _ = self._door.accept()
        connection.settimeout(PATIENCE_S)
        descriptors: list[int] = []
        request: dict[str, Any] = {}
        try:
            head, descriptors = _with_descriptors(connection)
            request = unpacked(_exactly(connection, HEADER.unpack(head)[0]))
            pid = os.fork()
        except (OSError, ValueError, IndexError, struct.error):
            connection.close()
            pid = -1
        if pid == 0:
            self._leave(connection)
            program.settle(request, descriptors)
            imports.record(self._learned)
            program.let_the_first_go_first()
            return request
        for fd in descriptors:
            os.close(fd)
        if pid > 0:
            self._ranks[pid] = Rank(connection, pid)
            with contextlib.suppress(OSError):
                connection.sendall(STATUS.pack(0))  # from here on it has begun, whatever becomes of us
        return None

    def _hold_out(self) -> None:
        """Against SIGTERM. Sent to all of a job, it is for the ranks, who may save by it: this one's end
        would be theirs. By a handler: to ignore it would be passed on to programs that an import starts.
        """
        before = signal.signal(signal.SIGTERM, _pass_over)
        if before is not _pass_over:
            self._on_sigterm = before

    def _leave(self, connection: socket.socket) -> None:
        """In the new process: let go of everything that is the zygote's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._on_sigterm or signal.SIG_DFL)
        for held in (self._door, connection, *(rank.connection for rank in self._ranks.values())):
            held.close()
        os.close(self._wake)
        os.close(self._wake_w)

    def _hear(self, rank: Rank) -> None:
        """A signal to pass on, one byte each; or the end of a stand-in, and with it of its rank."""
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
                    # What it had started must not outlive it; once it is reaped, its number is free.
                    os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                rank = self._ranks.pop(pid, None)
                if rank is not None:
                    with contextlib.suppress(OSError), rank.connection:
                        rank.connection.sendall(STATUS.pack(status))

    def _learn(self) -> None:
        """Make the imports that ranks made and nobody had foreseen, once they have stopped making them."""
        with contextlib.suppress(OSError), open(self._learned, "rb") as file:
            file.seek(self._known)
            text = file.read()
            self._known += len(text)
            imports.load(list(dict.fromkeys(text.decode(errors="replace").split())))
            self._hold_out()  # an import may have set something else
            _be_still()
            if text or not self._is_told:
                self._is_told = True
                _tell(self._folder)


def _pass_over(signum: int, frame: FrameType | None) -> None:
    """It was for the ranks."""


def unpacked(payload: bytes) -> dict[str, Any]:
    """What a stand-in packed. `ValueError`, `IndexError`: it is no such thing."""
    words = os.fsdecode(payload).split("\0")
    cwd, count = words[0], int(words[1])
    variables = dict(word.split("=", 1) for word in words[2 + count :])
    return {"arguments": words[2 : 2 + count], "cwd": cwd, "env": variables}


def _with_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The head of a request and the streams that come with it. `socket.recv_fds` is of Python 3.9."""
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
            raise ValueError("the stand-in left in the middle of a sentence")
        data += chunk
    return bytes(data)


def _be_still() -> None:
    """Ready to be forked: without threads of Python's, and with a heap that stays shared."""
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        sys.exit(f"shoal: starts stay cold: an imported module started threads ({names})")
    gc.collect()
    gc.freeze()


def _tell(folder: str) -> None:
    """Leave word of what this process has imported, for whoever is to have the same."""
    draft = os.path.join(folder, f"{names.IMAGE}.new")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with open(draft, "w", encoding="utf-8") as file:
        json.dump({"modules": imports.image(folder), "memory_bytes": peak_bytes}, file)
    os.replace(draft, os.path.join(folder, names.IMAGE))


def _import_expected(folder: str) -> bool:
    """Import what the zygote before us had, if it left word; and refuse to be another than that one."""
    try:
        with open(os.path.join(folder, names.EXPECTED), encoding="utf-8") as file:
            expected: dict[str, str] = json.load(file)
    except FileNotFoundError:
        return False
    imports.load(list(expected))
    found = imports.differing(expected, folder)
    if found:
        few = ", ".join(found[:5])
        sys.exit(f"shoal: no standby: other modules than those of the ranks are found here ({few})")
    return True


def main(folder: str, scripts: list[str]) -> int:
    """Listen in `folder`, import what the scripts import, fork ranks. In a rank: its exit code."""
    # Native pools (OpenBLAS) are told of a fork and start again; Python cannot know and would warn each time.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        door.bind(f"/proc/self/fd/{here}/door.new")  # by descriptor: the path itself may be too long
        os.close(here)
        door.listen(128)
        os.rename(f"{folder}/door.new", f"{folder}/door")  # found only when it can be knocked at
        if not _import_expected(folder):
            for script in scripts:
                imports.load(imports.found_in(script))
        _be_still()
        request = Zygote(door, folder).serve()
    return program.run(request["arguments"])
