"""The bubblewrap sandbox of one task, which each of the task's processes enters by itself.

bubblewrap builds the mounts and runs the first process of the PID namespace. When that process dies, the
kernel kills all others. The ranks stay direct children of the supervisor, so the kernel reports their exit
codes and signals to it. Ranks of one attempt communicate, so they use the machine's network, except for
servers that ask for a network of their own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

import msgspec

from shoal.errors import ShoalError
from shoal.runtime.process import kernel

READY_S = 20.0
MAX_SAID = 1 << 16
WAIT = "echo ready; read forever"
"""The script in the sandbox: it reports that the mounts are there, then waits until the supervisor's pipe
closes."""


class SandboxFailed(ShoalError):
    """bubblewrap could not build the sandbox. None of its processes runs."""

    code = "runtime.sandbox"


class BubblewrapInfo(msgspec.Struct):
    """The information that bubblewrap writes about its sandbox."""

    pid: int = msgspec.field(name="child-pid")


class Sandbox:
    """A running sandbox.

    `enter` is for a child that was forked between `enter_pid_namespace` and `leave_pid_namespace`.
    """

    def __init__(self, program: str, arguments: list[str], *, has_own_network: bool = False) -> None:
        """Start the sandbox without waiting. Call `wait_ready` before anything else."""
        self.is_root = os.geteuid() == 0
        self._namespaces: dict[str, int] = {}
        self._has_own_network = has_own_network
        self._entered: tuple[str, ...] = ("ipc", "uts", "mnt")
        self._pidfds: list[int] = []
        ready, ready_w = os.pipe()
        info, info_w = os.pipe()
        alive, self._alive = os.pipe()
        rest, rest_w = os.pipe()
        self._ready, self._info = ready, info
        options = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
        options += ["--unshare-net"] if has_own_network else []
        options += ["--cap-drop", "ALL"] if self.is_root else ["--unshare-user"]
        options += ["--info-fd", str(info_w), "--args", str(rest), "--", "/bin/sh", "-c", WAIT]
        self.pid = os.fork()
        if self.pid == 0:
            _exec_bwrap(program, options, stdin=alive, stdout=ready_w, keep=(info_w, rest))
        self._pidfds.append(os.pidfd_open(self.pid))
        for fd in (ready_w, info_w, alive, rest):
            os.close(fd)
        # Pass the view through a descriptor, because it may be too long for a command line.
        with contextlib.suppress(BrokenPipeError), os.fdopen(rest_w, "wb") as pipe:
            pipe.write(
                b"".join(argument.encode("utf-8", "surrogateescape") + b"\0" for argument in arguments)
            )

    def wait_ready(self) -> None:
        """Wait for the mounts and open the namespaces. `SandboxFailed` has bubblewrap's reason."""
        output = _read_until(self._ready, b"ready\n")
        if not output.endswith(b"ready\n"):
            self.kill()
            raise SandboxFailed(f"bubblewrap: {output.decode(errors='replace').strip() or 'no answer'}")
        init_pid = msgspec.json.decode(_read_until(self._info, b"}\n"), type=BubblewrapInfo).pid
        self._pidfds.append(os.pidfd_open(init_pid))
        for name in ("net", "ipc", "uts", "mnt", "pid", "user"):
            self._namespaces[name] = os.open(f"/proc/{init_pid}/ns/{name}", os.O_RDONLY)
        self._namespaces["own pid"] = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def enter_pid_namespace(self) -> None:
        """Make later children of this thread start in the sandbox's PID namespace."""
        if self.is_root:
            kernel.setns(self._namespaces["pid"])

    def leave_pid_namespace(self) -> None:
        """Make later children start outside again. Otherwise this process could not start a thread."""
        if self.is_root:
            kernel.setns(self._namespaces["own pid"])

    def leave_network(self) -> None:
        """Make later children start in the sandbox's own network, if it has one."""
        if self._has_own_network:
            self._entered = ("net", "ipc", "uts", "mnt")

    def enter(self) -> None:
        """Move this newly forked process into the sandbox.

        If that needs another fork, only the new process returns, and the caller's process passes on its end.
        """
        spaces = self._namespaces
        if self.is_root:
            for name in self._entered:
                kernel.setns(spaces[name])
            return
        owner = kernel.owning_user_namespace(spaces["mnt"])
        kernel.setns(owner)
        for name in (*self._entered, "pid"):
            kernel.setns(spaces[name])
        child = os.fork()
        if child:
            pass_on_end(child)
        # If bubblewrap made two user namespaces, the inner one maps root back to this user.
        with contextlib.suppress(OSError):
            kernel.setns(spaces["user"])

    def kill(self) -> None:
        """Kill all processes inside at once. May be repeated. The caller reaps `pid`."""
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Whether the first process has ended. The kernel guarantees that all others have ended, too."""
        poll = select.poll()
        for pidfd in self._pidfds:
            poll.register(pidfd, select.POLLIN)
        return len(poll.poll(0)) == len(self._pidfds)

    def close(self) -> None:
        """Close every descriptor, which ends the sandbox."""
        for fd in (self._ready, self._info, self._alive, *self._pidfds, *self._namespaces.values()):
            os.close(fd)
        self._namespaces.clear()


def pass_on_end(child: int) -> None:
    """Wait for the child and end with the same exit code or signal. Never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    kernel.die_with_parent(None)
    os.closerange(0, 1024)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _exec_bwrap(program: str, options: list[str], *, stdin: int, stdout: int, keep: tuple[int, ...]) -> None:
    try:
        os.setsid()
        # A signal to the whole job is for the ranks, which may save. If it ended this process, they would
        # die.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.umask(0o022)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        for fd in keep:
            os.set_inheritable(fd, True)  # noqa: FBT003
        os.execve(program, [program, *options], {"PATH": "/usr/bin:/bin"})  # noqa: S606
    finally:
        os._exit(127)


def _read_until(fd: int, end: bytes) -> bytes:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    data = b""
    while not data.endswith(end) and poll.poll(READY_S * 1000):
        chunk = os.read(fd, 65536)
        data += chunk
        if not chunk or len(data) > MAX_SAID:
            break
    return data
