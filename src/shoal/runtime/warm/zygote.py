"""The zygote: a process that has made a program's first imports and forks ranks on request.

It makes all of its imports before it forks, so nothing that an import does can end a rank. It listens on a
socket beside the stand-ins, and owns no device and no thread. Each connection carries one request, and the
rank dies if its connection breaks. A request that a fork could not serve exactly as a start would is refused,
and the stand-in starts the program itself. If that program still runs when no forked rank does, the zygote
begins again as one for that program (`plan`).
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import warnings
from types import FrameType
from typing import Any

from . import launchers, plan, program
from .image import Image

HEADER = struct.Struct("!I")
STATUS = struct.Struct("!i")
STREAMS = 3
PATIENCE_S = 5.0
QUIET_S = 2.0
"""The zygote looks for another program to serve after this long without a request."""


class ForkedRank:
    """A forked rank and the connection of the stand-in that waits for it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid


class Zygote:
    """The server loop, which runs until it is killed. In a forked process, `serve` returns its request."""

    def __init__(self, listener: socket.socket, folder: str, image: Image) -> None:
        self._listener = listener
        self._folder = folder
        self._image = image
        self._ranks: dict[int, ForkedRank] = {}
        self._reasons: set[str] = set()
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
            if not ready and not self._ranks:
                self._serve_another()
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
        pid = -1
        try:
            head, descriptors = _with_descriptors(connection)
            request = unpack_request(_exactly(connection, HEADER.unpack(head)[0]))
            reason = self._image.refusal(request)
            if reason is None:
                pid = _fork()
            else:
                self._refuse(reason)
        except Exception as error:  # noqa: BLE001 - the zygote's end would end its ranks
            self._refuse(f"{type(error).__name__}: {error}")
        if pid == 0:
            self._drop_descriptors(connection)
            program.adopt_request(request, descriptors, self._image.changes)
            program.wait_for_first_rank()
            return request
        for fd in descriptors:
            os.close(fd)
        if pid > 0:
            self._ranks[pid] = ForkedRank(connection, pid)
            with contextlib.suppress(OSError):
                connection.sendall(STATUS.pack(0))  # the rank has started, even if this zygote dies
        else:
            connection.close()
        return None

    def _refuse(self, reason: str) -> None:
        """Say once why a rank starts cold."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            _say(reason)

    def _serve_another(self) -> None:
        """Begin again for the program that was started last, if it still runs."""
        wanted = os.path.join(self._folder, launchers.WANTED)
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(wanted, "rb") as file:
                request = unpack_request(file.read())
            os.unlink(wanted)
            if os.path.exists(f"/proc/{request['pid']}"):
                another = plan.for_command(
                    request["interpreter"], request["arguments"], request["cwd"], request["env"]
                )
                if another.statements:
                    self._image.become(another)

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


def _pass_over(signum: int, frame: FrameType | None) -> None:
    """Ignore SIGTERM, which is for the ranks."""


def unpack_request(payload: bytes) -> dict[str, Any]:
    """Decode a request of `stand_in.pack_request`. `ValueError`, `IndexError`: it is invalid."""
    parts = os.fsdecode(payload).split("\0")
    interpreter, pid, cwd, count = parts[0], int(parts[1]), parts[2], int(parts[3])
    variables = dict(word.split("=", 1) for word in parts[4 + count :])
    arguments = parts[4 : 4 + count]
    return {"interpreter": interpreter, "pid": pid, "arguments": arguments, "cwd": cwd, "env": variables}


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


def _fork() -> int:
    """Fork this process, whose heap stays shared."""
    with warnings.catch_warnings():
        # Native thread pools (OpenBLAS) restart after a fork. Python does not know that and would warn.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        return os.fork()


def _say(reason: str) -> None:
    sys.stderr.write(f"shoal: a start is cold: {reason}\n")
    sys.stderr.flush()


def _first_plan(
    interpreter: str, folder: str, work: str, scripts: list[str]
) -> tuple[plan.ImportPlan | None, dict[str, str] | None]:
    """Return what to import, and which modules that should load, if an earlier zygote has told."""
    expected: dict[str, Any] = {}
    path = os.path.join(folder, launchers.EXPECTED)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            expected = json.load(file)
    written = plan.read(folder)
    if expected:
        return written or plan.ImportPlan(**expected["plan"]), expected["modules"]
    if written is not None:
        return written, None
    plans = (plan.for_command(interpreter, [script], work, dict(os.environ)) for script in scripts)
    return next((one for one in plans if one.statements), None), None


def main(folder: str, work: str, scripts: list[str], shoal: str) -> int:
    """Import what the program imports first, listen in `folder`, and fork ranks. In a rank, return 0.

    `scripts`: files that `run` names. `shoal`: the folder of Shoal's own package, which is no program's code.
    The last argument of this process is the command with which it was started.
    """
    interpreter = sys.argv[-1]
    image = Image(folder, interpreter, shoal)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        door.bind(f"/proc/self/fd/{here}/socket.new")  # by descriptor: the path itself may be too long
        os.close(here)
        door.listen(128)
        os.rename(f"{folder}/socket.new", f"{folder}/socket")  # found only when it can be knocked at
        image.prepare(*_first_plan(interpreter, folder, work, scripts))
        request = Zygote(door, folder, image).serve()
    return program.run(request["arguments"])
