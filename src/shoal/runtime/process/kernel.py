"""Linux calls that Python lacks: prctl, setns and others, each as a function that raises `OSError`."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
NS_GET_USERNS = 0xB701
LAST_CAPABILITY = 63
KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
"""The number of the system call, because C libraries have no function for it."""
KEYCTL_JOIN_SESSION_KEYRING = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def become_subreaper() -> None:
    """Have orphans below this process become its children instead of init's, so that none gets away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Allow no core dump, and let no other process of the same user read our memory or environment."""
    _prctl(PR_SET_DUMPABLE, 0)


def leave_keyring() -> None:
    """Give up the keys of the user that started Shoal: processes inherit a session's keyring with any user
    id.

    Call this before a change of user, because the new user may have no quota for keys left. If the kernel
    does not let us use keys at all, there is nothing to give up.
    """
    call = KEYCTL.get(os.uname().machine)
    if call is None:
        return
    if _libc.syscall(ctypes.c_long(call), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None) < 0:
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EPERM):
            raise OSError(number, f"keyctl: {os.strerror(number)}")


def forbid_new_privileges() -> None:
    """From here on, no setuid program raises the rights of this process or its children."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent(parent: int | None) -> None:
    """Have this process killed when the thread that forked it ends. Call this after a change of user.

    `parent` None: the parent is outside this process's PID namespace and cannot be compared.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def signal_on_parent_death(signum: int) -> None:
    """Send this process a signal when the thread that forked it ends. This replaces an earlier setting."""
    _prctl(PR_SET_PDEATHSIG, signum)


def drop_capabilities() -> None:
    """Drop all capabilities with the next exec, even as root."""
    for capability in range(LAST_CAPABILITY + 1):
        try:
            _prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            return  # past the last capability that this kernel knows


def setns(fd: int) -> None:
    """Enter the namespace. In a PID namespace, only children forked from now on are inside."""
    if _libc.setns(fd, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def owning_user_namespace(fd: int) -> int:
    """Return the user namespace that owns this namespace, as a new descriptor."""
    return fcntl.ioctl(fd, NS_GET_USERNS)


def rename(command_line: tuple[str, ...]) -> None:
    """Show these words as this process's command line, cut to the room that it was started with.

    This is for a process that was forked to be another program, so that people and scripts find it by name.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    if start:
        room = end - start
        text = b"".join(os.fsencode(word) + b"\0" for word in command_line)[: room - 1]
        ctypes.memmove(start, text.ljust(room, b"\0"), room)
