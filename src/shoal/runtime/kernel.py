"""The Linux calls Python has no name for: prctl and setns, each as a function that raises `OSError`."""

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
"""The number of the system call, for which C libraries have no name."""
KEYCTL_JOIN_SESSION_KEYRING = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's, so none can slip away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """No core dump, and no other process of the same user may read this one's memory or environment."""
    _prctl(PR_SET_DUMPABLE, 0)


def leave_keyring() -> None:
    """Give up the keys of whoever started Shoal: a session's keyring is inherited whatever the user becomes.

    Must come before a change of user, who may have used up what keys it may hold. Where keys may not be used
    at all there is nothing to give up.
    """
    call = KEYCTL.get(os.uname().machine)
    if call is None:
        return
    if _libc.syscall(ctypes.c_long(call), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None) < 0:
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EPERM):
            raise OSError(number, f"keyctl: {os.strerror(number)}")


def forbid_new_privileges() -> None:
    """From here on no setuid program gives this process or its children anything."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent(parent: int | None) -> None:
    """SIGKILL for this process when the thread that forked it ends. Must come after a change of user.

    `parent` None: the parent is outside this process's PID namespace and cannot be compared.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def hear_of_parents_end(number: int) -> None:
    """That signal for this process when the thread that forked it ends, in place of what it was before."""
    _prctl(PR_SET_PDEATHSIG, number)


def drop_capabilities() -> None:
    """After the next exec this process has no capability, even as root."""
    for capability in range(LAST_CAPABILITY + 1):
        try:
            _prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            return  # past the last one this kernel knows


def setns(fd: int) -> None:
    """Enter the namespace; for a PID namespace, only children forked from now on are in it."""
    if _libc.setns(fd, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def owning_user_namespace(fd: int) -> int:
    """The user namespace that owns this namespace, as a new descriptor."""
    return fcntl.ioctl(fd, NS_GET_USERNS)


def rename(words: tuple[str, ...]) -> None:
    """Show these words as this process's command line, as far as they fit in the room it was started with.

    For a process that was forked to be another program, so that people and scripts find it by its name.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    if start:
        room = end - start
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
        ctypes.memmove(start, text.ljust(room, b"\0"), room)
