"""Start one process of a task: fork, confine, execute the program.

Only the code here runs between fork and exec. Its errors travel through a pipe of their own, so that they are
never mistaken for the program's exit code.
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
"""bash executes its last command in place, so that a signal that kills the program is seen as a signal."""
FAILED_TO_START = 125
HIGHEST_DESCRIPTOR = 1 << 20
MAX_ARGUMENT = 120_000
"""Linux takes no single argument over 128 KiB, so a longer script becomes a file in memory."""
RESET = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
"""All signals. For example, a shell that starts Shoal in the background has it ignore SIGINT and SIGQUIT."""


class Pipes(msgspec.Struct, frozen=True, kw_only=True):
    """The reading ends of a process's output."""

    stdout: int
    stderr: int


class Launcher:
    """Starts processes in one confinement. Main thread only, because a process dies with the thread."""

    def __init__(self, confinement: Confinement, work: str) -> None:
        self._confinement = confinement
        self.work = work
        self.script_directory = work
        """The directory in which scripts of the job start. Functions of Shoal start in `work`."""
        self._failures, self._report = os.pipe()
        os.set_blocking(self._failures, False)

    def start_script(
        self, script: str, environment: dict[str, str], inherited_fds: tuple[int, ...] = ()
    ) -> tuple[int, Pipes]:
        """Start a shell script in a session of its own, with `inherited_fds` open. Returns before it runs."""

        def become() -> None:
            os.chdir(self.script_directory)
            # Errors such as E2BIG occur here, in the child, as any other failure to start.
            os.execve(SHELL, script_arguments(script), environment)  # noqa: S606

        return self._start(lambda: become, inherited_fds=inherited_fds)

    def start_function(
        self, module: str, function: str, arguments: tuple[object, ...], inherited_fds: tuple[int, ...]
    ) -> tuple[int, Pipes]:
        """Run a function of Shoal as the job's user, with only `inherited_fds` open.

        The child loads the module before it loses access to Shoal's files, so the supervisor itself never
        pays for the import.
        """

        def prepare() -> Callable[[], object]:
            loaded = getattr(importlib.import_module(module), function)
            return lambda: loaded(*arguments)

        return self._start(prepare, inherited_fds=inherited_fds)

    def start_failure(self) -> str | None:
        """Return why a child ended before its program started. None: none did since the last call."""
        try:
            message = os.read(self._failures, 4096)
        except BlockingIOError:
            return None
        return message.decode(errors="replace") or None

    def _start(
        self, prepare: Callable[[], Callable[[], object]], inherited_fds: tuple[int, ...]
    ) -> tuple[int, Pipes]:
        opened: list[int] = []
        sandbox = self._confinement.sandbox
        try:
            opened += os.pipe()
            opened += os.pipe()
            stdout, stdout_w, stderr, stderr_w = opened
            if sandbox is not None:
                sandbox.enter_pid_namespace()
            pid = os.fork()
            if pid == 0:
                self._child(prepare, stdout_w, stderr_w, inherited_fds)
            opened = [stdout_w, stderr_w]
        finally:
            if sandbox is not None:
                sandbox.leave_pid_namespace()
            for fd in opened:
                os.close(fd)
        return pid, Pipes(stdout=stdout, stderr=stderr)

    def _child(
        self,
        prepare: Callable[[], Callable[[], object]],
        stdout: int,
        stderr: int,
        inherited_fds: tuple[int, ...],
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
            _close_all_but(3, {self._report, *inherited_fds})
            os.umask(0o022)
            os.chdir(self.work)
            become()
            status = 0
        except ShoalError as error:
            self._report_failure(error.message)
        except BaseException as error:  # noqa: BLE001 - this process must never return into the supervisor
            self._report_failure(f"{type(error).__name__}: {error}")
        finally:
            os._exit(status)

    def _report_failure(self, why: str) -> None:
        # Names in an archive need not be UTF-8. Bytes that cannot be written appear as escapes.
        os.write(self._report, why.encode(errors="backslashreplace")[:2000])


def script_arguments(script: str) -> list[str]:
    """Return the shell's arguments. A long script becomes a file in memory that the shell inherits."""
    data = script.encode("utf-8", "surrogateescape")
    if len(data) <= MAX_ARGUMENT:
        return [SHELL, "-c", script]
    fd = os.memfd_create("script", 0)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return [SHELL, f"/proc/self/fd/{fd}"]


def _reset_signals() -> None:
    """Reset ignored signals and masks, which survive exec, so that a rank starts with the defaults."""
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _close_all_but(first: int, keep: set[int]) -> None:
    """Close other descriptors, above all the lock. A child without exec would hold it after we died."""
    at = first
    for fd in sorted(fd for fd in keep if fd >= first):
        os.closerange(at, fd)
        at = fd + 1
    os.closerange(at, HIGHEST_DESCRIPTOR)
