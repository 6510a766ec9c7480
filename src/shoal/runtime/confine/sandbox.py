"""bubblewrap namespaces: one sandbox for a share, which every process of it enters on its own.

bubblewrap builds the mounts and keeps the PID namespace's first process; when that dies the kernel kills
all the rest. The ranks stay direct children of the supervisor, so their exit codes and signals are the
kernel's own words. Ranks of one attempt talk to each other, so the network is the machine's, but for
servers that ask for one of their own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

import msgspec

from shoal.errors import ShoalError
from shoal.runtime import kernel

READY_S = 20.0
MAX_SAID = 1 << 16
WAIT = "echo ready; read forever"
"""What the sandbox runs: says that the mounts are there, then waits for the supervisor's end of the pipe."""


class SandboxFailed(ShoalError):
    """bubblewrap would not build the sandbox; nothing of it runs."""

    code = "runtime.sandbox"


class Info(msgspec.Struct):
    """What bubblewrap tells about itself."""

    pid: int = msgspec.field(name="child-pid")


class Sandbox:
    """A running sandbox. `enter` is for a child that was just forked between `target` and `untarget`."""

    def __init__(self, program: str, arguments: list[str], *, has_own_network: bool = False) -> None:
        """Start it without waiting; call `wait_ready` before anything else."""
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
        # The view is an argument list of its own: one that is too long for a command line still works.
        with contextlib.suppress(BrokenPipeError), os.fdopen(rest_w, "wb") as pipe:
            pipe.write(
                b"".join(argument.encode("utf-8", "surrogateescape") + b"\0" for argument in arguments)
            )

    def wait_ready(self) -> None:
        """Wait for the mounts and open the namespaces. `SandboxFailed`: with bubblewrap's own reason."""
        said = _read_until(self._ready, b"ready\n")
        if not said.endswith(b"ready\n"):
            self.kill()
            raise SandboxFailed(f"bubblewrap: {said.decode(errors='replace').strip() or 'no answer'}")
        init_pid = msgspec.json.decode(_read_until(self._info, b"}\n"), type=Info).pid
        self._pidfds.append(os.pidfd_open(init_pid))
        for name in ("net", "ipc", "uts", "mnt", "pid", "user"):
            self._namespaces[name] = os.open(f"/proc/{init_pid}/ns/{name}", os.O_RDONLY)
        self._namespaces["own pid"] = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def target(self) -> None:
        """Children forked by this thread from now on are born in the sandbox's PID namespace."""
        if self.is_root:
            kernel.setns(self._namespaces["pid"])

    def untarget(self) -> None:
        """Children are born outside again; without it this process could not start a thread."""
        if self.is_root:
            kernel.setns(self._namespaces["own pid"])

    def leave_network(self) -> None:
        """Children from now on are in the sandbox's own network, if it has one."""
        if self._has_own_network:
            self._entered = ("net", "ipc", "uts", "mnt")

    def enter(self) -> None:
        """Move this just forked process into the sandbox. Where that takes another fork, the caller's
        process stays behind to pass on the end of the one that returns.
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
        # Where bubblewrap used two, the inner one maps us back from root to ourselves.
        with contextlib.suppress(OSError):
            kernel.setns(spaces["user"])

    def kill(self) -> None:
        """End everything inside, at once. May be repeated; `pid` is left for the caller to reap."""
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Whether its first process has ended, and with it, by the kernel's promise, all others."""
        poll = select.poll()
        for pidfd in self._pidfds:
            poll.register(pidfd, select.POLLIN)
        return len(poll.poll(0)) == len(self._pidfds)

    def close(self) -> None:
        """Let go of every descriptor; the sandbox ends with it."""
        for fd in (self._ready, self._info, self._alive, *self._pidfds, *self._namespaces.values()):
            os.close(fd)
        self._namespaces.clear()


def pass_on_end(child: int) -> None:
    """Wait for the child and end as it did: same exit code, same signal. Never returns."""
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
        # Sent to all of a job, it is for the ranks, who may save by it: here it would be their end.
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
