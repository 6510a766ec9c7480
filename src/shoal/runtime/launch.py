"""Start one process of a share: fork, take on the confinement, become the program.

Between fork and exec runs only what is written here. What goes wrong there is told through a pipe, so
that a program's own exit code is never mistaken for it.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable

import msgspec

from shoal.errors import ShoalError
from shoal.runtime.confine.confinement import Confinement

SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
"""bash becomes the last command it runs, so that a signal which kills the program is seen as one."""
FAILED_TO_START = 125
HIGHEST_DESCRIPTOR = 1 << 20
MAX_ARGUMENT = 120_000
"""Linux takes no single argument over 128 KiB; a longer script is handed over as a file in memory."""
RESET = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
"""All of them: a shell that starts Shoal in the background has it ignore SIGINT and SIGQUIT, for one."""


class Pipes(msgspec.Struct, frozen=True, kw_only=True):
    """The reading ends of what a process writes."""

    stdout: int
    stderr: int


class Launcher:
    """Starts processes inside one confinement. Main thread only: a process dies with its thread."""

    def __init__(self, confinement: Confinement, work: str) -> None:
        self._confinement = confinement
        self.work = work
        self.begins_in = work
        """Where scripts of the job begin; functions of ours begin in `work`."""
        self._failures, self._report = os.pipe()
        os.set_blocking(self._failures, False)

    def start_script(
        self, script: str, environment: dict[str, str], keep: tuple[int, ...] = ()
    ) -> tuple[int, Pipes]:
        """Start a shell script; its process leads a session and inherits `keep`. Returns before it runs."""

        def become() -> None:
            os.chdir(self.begins_in)
            # E2BIG and the like surface here, in the child, as any other failure to start.
            os.execve(SHELL, script_arguments(script), environment)  # noqa: S606

        return self._start(lambda: become, keep=keep)

    def start_function(
        self, module: str, function: str, arguments: tuple[object, ...], keep: tuple[int, ...]
    ) -> tuple[int, Pipes]:
        """Run a function of ours as the job's user. `keep`: descriptors it needs; all others are closed.

        Its module is loaded by the child, before it can no longer read our files: the supervisor itself
        never pays for it.
        """

        def prepare() -> Callable[[], object]:
            loaded = getattr(importlib.import_module(module), function)
            return lambda: loaded(*arguments)

        return self._start(prepare, keep=keep)

    def failure(self) -> str | None:
        """Why a child ended before its program began; None if none did since the last call."""
        try:
            said = os.read(self._failures, 4096)
        except BlockingIOError:
            return None
        return said.decode(errors="replace") or None

    def _start(self, prepare: Callable[[], Callable[[], object]], keep: tuple[int, ...]) -> tuple[int, Pipes]:
        opened: list[int] = []
        sandbox = self._confinement.sandbox
        try:
            opened += os.pipe()
            opened += os.pipe()
            stdout, stdout_w, stderr, stderr_w = opened
            if sandbox is not None:
                sandbox.target()
            pid = os.fork()
            if pid == 0:
                self._child(prepare, stdout_w, stderr_w, keep)
            opened = [stdout_w, stderr_w]
        finally:
            if sandbox is not None:
                sandbox.untarget()
            for fd in opened:
                os.close(fd)
        return pid, Pipes(stdout=stdout, stderr=stderr)

    def _child(
        self, prepare: Callable[[], Callable[[], object]], stdout: int, stderr: int, keep: tuple[int, ...]
    ) -> None:
        status = FAILED_TO_START
        try:
            os.setsid()
            become = prepare()
            _reset_signals()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            self._confinement.enter()
            _close_but(3, {self._report, *keep})
            os.umask(0o022)
            os.chdir(self.work)
            become()
            status = 0
        except ShoalError as error:
            self._tell(error.message)
        except BaseException as error:  # noqa: BLE001 - this process must never return into the supervisor
            self._tell(f"{type(error).__name__}: {error}")
        finally:
            os._exit(status)

    def _tell(self, why: str) -> None:
        # Names in an archive need not be UTF-8: what cannot be written is shown as escapes.
        os.write(self._report, why.encode(errors="backslashreplace")[:2000])


def script_arguments(script: str) -> list[str]:
    """The shell's arguments. A long script becomes a file in memory that the shell inherits and reads."""
    data = script.encode("utf-8", "surrogateescape")
    if len(data) <= MAX_ARGUMENT:
        return [SHELL, "-c", script]
    fd = os.memfd_create("script", 0)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return [SHELL, f"/proc/self/fd/{fd}"]


def _reset_signals() -> None:
    """Ignored signals and masks survive exec: a rank starts with the usual ones."""
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _close_but(first: int, keep: set[int]) -> None:
    """The lock above all: a child that does not exec would hold it on after the supervisor's death."""
    at = first
    for fd in sorted(fd for fd in keep if fd >= first):
        os.closerange(at, fd)
        at = fd + 1
    os.closerange(at, HIGHEST_DESCRIPTOR)
