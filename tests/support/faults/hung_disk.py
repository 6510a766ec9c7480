"""A disk that never answers about any file: who asks for one is stuck in the kernel, whatever signal comes.

As with a driver that hangs: once the question was read, not even SIGKILL ends who asked (`D` in `ps`; where
another thread than the first has asked, `Z`, as the first does end). Needs root and FUSE. The disk is served
by this very process: if it dies, however it does, the kernel ends all questions, and nobody stays stuck.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FUSE_DEVICE = Path("/dev/fuse")
LOOKUP, FORGET, GETATTR, INIT, INTERRUPT, DESTROY, BATCH_FORGET = 1, 2, 3, 26, 36, 38, 42
"""Of linux/fuse.h."""
HEADER, REPLY = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
MINOR, PARALLEL_DIROPS = 31, 1 << 18
MAX_REQUEST = 1 << 17
MNT_FORCE, MNT_DETACH = 1, 2
DIRECTORY = 0o040755
_libc = ctypes.CDLL(None, use_errno=True)


def what_is_missing() -> str | None:
    """Why nobody can be stuck here, and what to do; None: somebody can."""
    if os.getuid() != 0:
        return "a disk of one's own needs root: `sudo make test`"
    return None if FUSE_DEVICE.exists() else f"no {FUSE_DEVICE}: `modprobe fuse` brings it"


class HungDisk:
    def __init__(self, mount_point: Path) -> None:
        """Who looks at a name below `place` does not return until `free`; then there is an `OSError`."""
        self.mount_point = mount_point
        self.stuck_threads: dict[str, int] = {}
        """By name: the first thread that is stuck there, or was."""
        mount_point.mkdir(parents=True, exist_ok=True)
        self._device = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        words = f"fd={self._device},rootmode={DIRECTORY:o},user_id=0,group_id=0,allow_other"
        if _libc.mount(b"deaf", bytes(mount_point), b"fuse", 0, words.encode()) != 0:
            os.close(self._device)
            raise OSError(ctypes.get_errno(), f"no FUSE at {mount_point}")
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()

    def release(self) -> None:
        """All questions end with an error, and so do all to come. May be repeated."""
        for how in (MNT_FORCE, MNT_DETACH):  # the first ends them, though it may be called busy
            _libc.umount2(bytes(self.mount_point), how)
        self._server.join()

    def _serve(self) -> None:
        try:
            while True:
                self._reply(os.read(self._device, MAX_REQUEST))
        except OSError as error:
            if error.errno != errno.ENODEV:  # it is unmounted
                raise
        finally:
            os.close(self._device)

    def _reply(self, request: bytes) -> None:
        _, what, number, _, _, _, asker, _ = HEADER.unpack_from(request)
        if what == LOOKUP:
            self.stuck_threads.setdefault(request[HEADER.size : -1].decode(), asker)
        elif what not in (FORGET, BATCH_FORGET, INTERRUPT, DESTROY):  # who says these wants no answer
            told = REPLIES.get(what)
            code = errno.ENOSYS if told is None else 0
            head = REPLY.pack(REPLY.size + len(told or b""), -code, number)
            os.write(self._device, head + (told or b""))


REPLIES = {
    # Several questions about one directory at a time, else the second waits for the first.
    INIT: struct.pack("<IIII48x", 7, MINOR, 0, PARALLEL_DIROPS),
    # For an hour: inode 1, a directory with two links.
    GETATTR: struct.pack("<Q8xQ52xII20x", 3600, 1, DIRECTORY, 2),
}
"""To all else it says that it cannot do that: who looks at the directory itself is not held up."""


@contextmanager
def hung_disk(mount_point: Path) -> Iterator[HungDisk]:
    """One that is there; afterwards nobody is stuck at it."""
    disk = HungDisk(mount_point)
    try:
        yield disk
    finally:
        disk.release()
