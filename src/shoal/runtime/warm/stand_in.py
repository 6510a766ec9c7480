"""What a rank's script finds as `python` or as a launcher: hands the command to the zygote, ends as it ends.

Anything that a fork cannot give faithfully (another interpreter, options of Python's own, variables that
Python reads before the program) is executed as written.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from types import FrameType

from . import launchers, mpirun

HEADER = struct.Struct("!I")
STATUS = struct.Struct("!i")
PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
KNOCKS, PAUSE_S = 200, 0.01
EARLY = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "LD_")
"""Variables that are read before, or while, modules are loaded."""


def main(folder: str, name: str, arguments: list[str]) -> None:
    """Never returns."""
    path, ours = os.environ.get("PATH", os.defpath), os.path.join(folder, "bin")
    if name in mpirun.NAMES:
        mpirun.become(name, arguments, find(name, path, ours))
    launcher, words = launchers.named(name, arguments)
    if launcher is not None:
        name = name if name.startswith("python") else "python"
        arguments = launchers.program(launcher, words, dict(os.environ))
    real = find(name, path, ours)
    if real is None:
        sys.stderr.write(f"{name}: command not found\n")
        os._exit(127)
    if launcher == "accelerate":
        # Loaded here: what it imports would cost every other start 10 ms.
        accelerate = importlib.import_module(".accelerate", __package__)
        os.environ.update(accelerate.variables(real, folder, launchers.options(words)))
    if is_plain(arguments) and known(real, dict(os.environ)) == _zygote(folder):
        status = ask(folder, arguments)
        if status is not None:
            end_as(status)
    os.execv(real, [real, *arguments])  # noqa: S606


def find(name: str, path: str, without: str) -> str | None:
    """The program a shell would have found, had it not found us."""
    for entry in path.split(":"):
        candidate = os.path.join(entry, name)
        if entry and entry != without and os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    return None


def known(interpreter: str, environment: dict[str, str]) -> dict[str, object]:
    """What must be the same for a fork to be the same as a start: the interpreter and what it reads early."""
    where = [os.path.realpath(os.path.dirname(interpreter)), os.path.realpath(interpreter)]
    return {"interpreter": where, "early": {n: v for n, v in environment.items() if n.startswith(EARLY)}}


def _zygote(folder: str) -> object:
    """What the zygote of this node is; None where there is none."""
    with contextlib.suppress(OSError), open(f"{folder}/known.json", encoding="utf-8") as file:
        return json.load(file)
    return None


def is_plain(arguments: list[str]) -> bool:
    """A script, `-m module` or `-c code`, with no option of Python's but `-u`."""
    words = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if words[:1] in (["-m"], ["-c"]):
        return len(words) > 1
    return bool(words) and not words[0].startswith("-") and os.path.isfile(words[0])


def ask(folder: str, arguments: list[str]) -> int | None:
    """Have the zygote run it; how it ended, as `waitpid` says it. None: nothing was started."""
    request = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
    payload = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door, contextlib.suppress(OSError):
        _knock(door, folder)
        for number in PASSED_ON:
            signal.signal(number, _pass_on_to(door))
        socket.send_fds(door, [HEADER.pack(len(payload))], [0, 1, 2])
        door.sendall(payload)
        return _wait(door) if _said(door) is not None else None
    return None


def _knock(door: socket.socket, folder: str) -> None:
    """Connect; the zygote may be on its way, but it opens its door before it does anything else."""
    here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{here}/door"  # by descriptor: the path itself may be too long
    for _ in range(KNOCKS):
        if os.path.exists(path):
            break
        time.sleep(PAUSE_S)
    door.connect(path)
    os.close(here)


def _pass_on_to(door: socket.socket) -> Callable[[int, FrameType | None], None]:
    def pass_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            door.send(bytes([number]))

    return pass_on


def _wait(door: socket.socket) -> int:
    status = _said(door)
    # Without a word the zygote is gone, and the kernel has killed what it had forked.
    return signal.SIGKILL if status is None else status


def _said(door: socket.socket) -> int | None:
    data = b""
    while len(data) < STATUS.size:
        chunk = door.recv(STATUS.size - len(data))
        if not chunk:
            return None
        data += chunk
    return int(STATUS.unpack(data)[0])


def end_as(status: int) -> None:
    """End with the same exit code or by the same signal. Never returns."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
