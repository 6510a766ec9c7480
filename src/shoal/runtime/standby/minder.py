"""The supervisor's part: have a standby on this node once the ranks train, and none when they have ended.

Main thread only. What the standby may use of the job's memory is taken from the ranks' limit while it waits,
so that both together stay within what the job asked for; when the ranks come near their limit it is ended,
and where nobody looks at them for a while it gives way beforehand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import stat
import sys
import time

import msgspec

from shoal.clock import Clock
from shoal.runtime import spool
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.logs import LogFile
from shoal.runtime.standby import place
from shoal.runtime.warm import names
from shoal.wire import Credentials, Order

NAME_ROOM = 1024
"""On its command line, for the words of the supervisor that it becomes."""
LOW = 16
"""Descriptors that are handed over are moved above those that they become."""
LOOK_S, AGAIN_S = 0.5, 30.0
MAX_FAILED = 3
"""So many standbys may end by themselves: another would, too."""
QUIET_S = 2.5
"""The zygote makes imports that nobody foresaw every two seconds: an older image is whole."""
MAX_IMAGE = 4 << 20
"""Bytes of some 30,000 modules. The supervisor may read it twice a second."""
MAX_MEMORY = 1 << 53
ROOM, LEAST_BYTES = 1.5, 64 << 20
"""What a standby may use, beside what the zygote uses that it is to be like."""
GROWTH, NEAR = 1.25, 0.9
"""A standby is started where the ranks could use a quarter more beside it, and ended near their limit."""
KILL_S = 2.0
MAX_WORDS, MAX_WORD = 1 << 16, 500
BURY_S, BURY_AGAIN_S, PATIENCE_S = 1.0, 5.0, 0.01
"""How long a look may wait for what was killed to be gone, and when the next one tries."""
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM)


class Image(msgspec.Struct, frozen=True):
    """What a zygote says of itself. Its word is the job's: believed about that job alone."""

    modules: dict[str, str]
    memory_bytes: int


def is_wanted(order: Order, confinement: Confinement) -> bool:
    """Whether the loss of this share alone is one that its attempt may outlive, and a standby can help.

    What `setup` does may be seen outside of the share, so it is never done ahead of time. Without a cgroup
    of its own and a sandbox there would be no telling a standby's processes from those of a share.
    """
    return (
        order.has_standby
        and len(order.nodes) > 1
        and order.max_restarts > 0
        and order.control_url is not None
        and order.setup is None
        and order.probe is None
        and confinement.sandbox is not None
        and bool(confinement.cgroups)
    )


class Minder:
    """`look` often, `give_way` where nobody will, `end` once all else of the share is over. None raises."""

    def __init__(
        self,
        order: Order,
        credentials: Credentials,
        share: spool.Share,
        confinement: Confinement,
        clock: Clock,
        log: LogFile,
    ) -> None:
        self._order = order
        self._credentials = credentials
        self._share = share
        self._confinement = confinement
        self._clock = clock
        self._log = log
        self._directory = place.directory_of(share) if is_wanted(order, confinement) else None
        self._pidfd: int | None = None
        self._held: int | None = None
        """Our end of the pipe that tells it that we live."""
        self._is_over = False
        """It is to live no more, and something of it is still to be buried."""
        self._errors: int | None = None
        """What it writes to, held open: it removes its directory when it ends."""
        self._num_failed = 0
        self._look_at = self._again_at = 0.0

    def look(self, *, is_time: bool) -> None:
        """Start a standby if it is time for one, and see whether one that was started is well."""
        if self._directory is None or self._clock.monotonic() < self._look_at:
            return
        self._look_at = self._clock.monotonic() + LOOK_S
        may_begin = self._num_failed < MAX_FAILED and self._clock.monotonic() >= self._again_at
        try:
            if self._is_over:
                self._let_go(self._directory)
            elif self._pidfd is not None:
                self._see(self._pidfd)
            elif is_time and may_begin:
                self._begin(self._directory)
        except OSError as error:
            self._fail(f"{error.strerror or error}")

    def give_way(self) -> None:
        """Kill it, and let the ranks use all of their memory at once: they may save now, and nobody looks.

        Waits for nothing; the next `look`, or `end`, buries it.
        """
        if self._pidfd is not None:
            self._kill(self._pidfd)
            self._restore_limit()

    def end(self) -> None:
        """Kill it, and all that it has prepared. What does not die in time is left to the engine."""
        if self._directory is None:
            return
        if self._pidfd is not None:
            self._kill(self._pidfd)
            _is_dead(self._pidfd, KILL_S)
        if self._is_over:
            self._let_go(self._directory)

    def _kill(self, pidfd: int) -> None:
        self._is_over = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _let_go(self, directory: str) -> None:
        """Bury it; only then is its memory the ranks' again. What lives on is tried again at a later look."""
        for fd in (self._pidfd, self._held, self._errors):
            if fd is not None:
                os.close(fd)
        self._pidfd = self._held = self._errors = None
        self._is_over = not self._is_buried(directory)
        if self._is_over:
            self._look_at = self._clock.monotonic() + BURY_AGAIN_S
        else:
            self._restore_limit()

    def _is_buried(self, directory: str) -> bool:
        """A child of the one that was killed may hold its lock for an instant longer: asks more than once."""
        until = self._clock.monotonic() + BURY_S
        while self._clock.monotonic() < until:
            with contextlib.suppress(OSError):  # a disk that is full or broken: later, then
                if place.bury(directory, timeout_s=BURY_S):
                    return True
            time.sleep(PATIENCE_S)
        return False

    def _restore_limit(self) -> None:
        limit = self._order.limits.memory_bytes
        if limit is not None:
            with contextlib.suppress(OSError):
                self._confinement.limit_memory(limit)

    def _see(self, pidfd: int) -> None:
        if _is_dead(pidfd, 0.0):
            self._fail(_last_line(self._errors))
        elif self._is_near_limit():
            self._again_at = self._clock.monotonic() + AGAIN_S
            self.end()
            self._log.say("the standby of this node was ended: the ranks need its memory")

    def _fail(self, because: str) -> None:
        self._num_failed += 1
        self._again_at = self._clock.monotonic() + AGAIN_S
        if self._pidfd is None:
            self._restore_limit()  # none was started
        if self._directory is not None:
            self._let_go(self._directory)
        if self._num_failed == 1:
            self._log.say(no_standby(because))

    def _begin(self, directory: str) -> None:
        limit = self._order.limits.memory_bytes
        image = read_image(self._share.stand_ins, self._confinement.uid)
        memory_bytes = self._room_for(image) if image is not None else None
        if image is None or (memory_bytes is None and limit is not None):
            return
        if not place.bury(directory, timeout_s=BURY_S):
            return
        if limit is not None and memory_bytes is not None:
            self._confinement.limit_memory(limit - memory_bytes)
        brief = place.Brief(
            order=self._order,
            credentials=self._credentials,
            expected=image.modules,
            memory_bytes=memory_bytes,
        )
        self._spawn(directory, msgspec.json.encode(brief))

    def _room_for(self, image: Image) -> int | None:
        """How much memory a standby gets; None: there is no limit to share, or not enough below it."""
        limit, used = self._order.limits.memory_bytes, self._confinement.memory_bytes()
        wanted = max(LEAST_BYTES, int(image.memory_bytes * ROOM))
        if limit is None or used is None or used * GROWTH + wanted > limit:
            return None
        return wanted

    def _is_near_limit(self) -> bool:
        used, limit = self._confinement.memory_bytes(), self._confinement.memory_limit
        return used is not None and limit is not None and used > limit * NEAR

    def _spawn(self, directory: str, brief: bytes) -> None:
        os.makedirs(directory, 0o700)
        at = spool.Share(directory)
        # Held by the new process from its first moment: who finds the lock free may bury what is there.
        lock = spool.take_lock(at)
        if lock is None:
            raise OSError(errno.EBUSY, "somebody else holds its place")
        told = os.memfd_create("standby")
        held, self._held = os.pipe()
        self._errors = os.open(at.errors, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        opened = [lock, told, held]
        try:
            with os.fdopen(os.dup(told), "wb") as file:
                file.write(brief)
            os.lseek(told, 0, os.SEEK_SET)
            handed = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOW) for fd in (told, held, lock, self._errors)]
            opened += handed
            words = command(directory)
            pid = os.posix_spawn(
                words[0],
                words,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, handed[0], 0),
                    (os.POSIX_SPAWN_DUP2, handed[3], 1),
                    (os.POSIX_SPAWN_DUP2, handed[3], 2),
                    (os.POSIX_SPAWN_DUP2, handed[1], 3),
                    (os.POSIX_SPAWN_DUP2, handed[2], 4),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=IGNORED,
            )
            self._pidfd = os.pidfd_open(pid)
        finally:
            for fd in opened:
                os.close(fd)


def command(directory: str) -> list[str]:
    """As an engine starts supervisors: this very code, whatever the current directory holds."""
    return [sys.executable, "-P", "-s", "-m", "shoal.runtime.standby", directory, "." * NAME_ROOM]


def read_image(stand_ins: str, uid: int | None) -> Image | None:
    """What the zygote says that it has imported; None: it has not, or not for long enough, or says nonsense.

    The directory is the job's: no link is followed, and nothing is read that is not the job's own file.
    """
    opened: list[int] = []
    try:
        opened.append(os.open(stand_ins, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        opened.append(os.open(names.IMAGE, flags, dir_fd=opened[-1]))
        facts = os.fstat(opened[-1])
        owner = os.geteuid() if uid is None else uid
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != owner or facts.st_size > MAX_IMAGE:
            return None
        if abs(time.time() - facts.st_mtime) < QUIET_S:
            return None
        image = msgspec.json.decode(os.read(opened[-1], MAX_IMAGE), type=Image)
    except (OSError, ValueError, RecursionError):
        return None
    else:
        return image if 0 <= image.memory_bytes <= MAX_MEMORY else None
    finally:
        for fd in opened:
            os.close(fd)


def _is_dead(pidfd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def no_standby(because: str) -> str:
    """What a job's log says once on each node that cannot have a standby."""
    why = because.removeprefix("shoal: ").removeprefix("no standby: ")
    return (
        f"no standby waits on this node: {why or 'it was killed, or ended before it wrote why'}. It is tried "
        f"again {MAX_FAILED - 1} times, every {AGAIN_S:g} s. The job runs without one, but if this node is "
        "lost its ranks import everything again. To do without, submit the job with "
        "`retry: {standby: false}`; `shoal doctor` says what nodes lack"
    )


def _last_line(fd: int | None) -> str:
    if fd is None:
        return ""
    size = os.fstat(fd).st_size
    lines = os.pread(fd, MAX_WORDS, max(0, size - MAX_WORDS)).decode(errors="replace").strip().splitlines()
    return lines[-1][:MAX_WORD] if lines else ""
