"""Let a rank stand behind one launcher at a time.

A rank has one number, and one address at which it meets the others. Two launchers side by side
(`torchrun a.py & torchrun b.py & wait`) would send two programs there under that number, and `a.py` of one
rank may form a group with `b.py` of another.
"""

from __future__ import annotations

import errno
import fcntl
import os

from . import launchers, names

BEHIND = "SHOAL_LAUNCHED"
"""Set for the program behind a launcher and all that it starts: launchers in there are its own affair."""
MAX_PID = 1 << 22


def claim(folder: str, environment: dict[str, str]) -> None:
    """Hold this rank's place until this process ends. Raise `Refused` if another launcher holds it."""
    if environment.get("SHOAL_WORLD_SIZE", "1") == "1" or BEHIND in environment:
        return
    try:
        fd = os.open(os.path.join(folder, names.LAUNCHING), os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError:
        # The program has removed the folder, or the disk is full: no reason to fail a program that trains.
        return
    # A spare process may run the same script beside the rank: it has a session of its own.
    place = int(environment.get("SHOAL_RANK", "0")) * MAX_PID + os.getsid(0)
    try:
        # A lock of the process itself: it outlasts `execv`, and what the process forks does not hold it.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return
        raise launchers.Refused(
            "another launcher of this rank is still running: both would have one number among the ranks",
            "start one after the other, or submit each as a job of its own (`shoal run --array`)",
            names.SECOND,
        ) from None
    os.set_inheritable(fd, True)  # noqa: FBT003
    os.environ[BEHIND] = "1"
