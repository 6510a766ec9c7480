"""Keep a standby on this node while the ranks train. This is the active supervisor's part.

Main thread only. While the standby waits, its memory is taken from the ranks' limit, so that both together
stay within the job's limit. When the ranks come near their limit, the monitor ends the standby. Before a
phase in which the supervisor does not poll, it ends the standby in advance (`yield_memory`).
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
from typing import Any

import msgspec

from shoal.clock import Clock
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.files import spool
from shoal.runtime.process.log import LogFile
from shoal.runtime.standby import slot
from shoal.runtime.warm import launchers
from shoal.wire import TaskCredentials, TaskSpec

NAME_ROOM = 1024
"""Bytes reserved on the standby's command line for that of the supervisor that it becomes."""
LOW = 16
"""Inherited descriptors are first moved above the numbers that they get in the child."""
LOOK_S, AGAIN_S = 0.5, 30.0
MAX_FAILED = 3
"""After this many standbys ended by themselves, no more are started, because the next would end, too."""
QUIET_S = 2.5
"""The zygote makes unforeseen imports every two seconds, so an image older than this is complete."""
MAX_IMAGE = 4 << 20
"""Bytes of an image of about 30,000 modules. The supervisor may read it twice a second."""
MAX_MEMORY = 1 << 53
ROOM, LEAST_BYTES = 1.5, 64 << 20
"""A standby may use this factor of the zygote's memory, and at least `LEAST_BYTES`."""
GROWTH, NEAR = 1.25, 0.9
"""A standby starts if the ranks could use a quarter more memory beside it, and ends if they use 90 % of their
limit."""
KILL_S = 2.0
MAX_WORDS, MAX_WORD = 1 << 16, 500
REAP_S, REAP_AGAIN_S, PATIENCE_S = 1.0, 5.0, 0.01
"""How long one poll may wait for killed processes to be gone, when a later poll tries again, and the
pause."""
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM)


class ZygoteImage(msgspec.Struct, frozen=True):
    """A zygote's report about itself. It comes from the job, so it is trusted only for that job."""

    modules: dict[str, str]
    plan: dict[str, Any]
    memory_bytes: int


def is_wanted(task_spec: TaskSpec, confinement: Confinement) -> bool:
    """Whether the attempt may survive the loss of this task, so that a standby helps.

    `setup` may have effects outside of the task, so it never runs ahead of time, and a job with `setup` has
    no standby. Without a cgroup and a sandbox of its own, a standby's processes could not be told from the
    task's.
    """
    ranks = task_spec.ranks
    return (
        ranks.has_standby
        and len(ranks.nodes) > 1
        and ranks.max_restarts > 0
        and task_spec.lease.control_url is not None
        and task_spec.program.setup is None
        and task_spec.program.probe is None
        and confinement.sandbox is not None
        and bool(confinement.cgroups)
    )


class StandbyMonitor:
    """Start, check and end the standby of one task. No method raises.

    Call `poll` often, `yield_memory` before a phase without polls, and `stop` at the end of the task.
    """

    def __init__(
        self,
        task_spec: TaskSpec,
        credentials: TaskCredentials,
        task: spool.SpoolTask,
        confinement: Confinement,
        clock: Clock,
        log: LogFile,
    ) -> None:
        self._task_spec = task_spec
        self._credentials = credentials
        self._task = task
        self._confinement = confinement
        self._clock = clock
        self._log = log
        self._directory = slot.directory_of(task) if is_wanted(task_spec, confinement) else None
        self._pidfd: int | None = None
        self._held: int | None = None
        """Our end of the pipe by which the standby notices that this supervisor died."""
        self._is_over = False
        """The standby was killed, and some of it still has to be reaped."""
        self._errors: int | None = None
        """The standby's error file, kept open because the standby removes its directory when it ends."""
        self._num_failed = 0
        self._look_at = self._again_at = 0.0

    def poll(self, *, is_time: bool) -> None:
        """Start a standby if `is_time`, and check a running one."""
        if self._directory is None or self._clock.monotonic() < self._look_at:
            return
        self._look_at = self._clock.monotonic() + LOOK_S
        may_begin = self._num_failed < MAX_FAILED and self._clock.monotonic() >= self._again_at
        try:
            if self._is_over:
                self._reap(self._directory)
            elif self._pidfd is not None:
                self._check(self._pidfd)
            elif is_time and may_begin:
                self._begin(self._directory)
        except OSError as error:
            self._fail(f"{error.strerror or error}")

    def yield_memory(self) -> None:
        """Kill the standby and restore the ranks' memory limit at once, for example before they save.

        Does not wait. The next `poll`, or `stop`, reaps the standby.
        """
        if self._pidfd is not None:
            self._kill(self._pidfd)
            self._restore_limit()

    def stop(self) -> None:
        """Kill the standby and everything that it started. The engine reaps what does not die in time."""
        if self._directory is None:
            return
        if self._pidfd is not None:
            self._kill(self._pidfd)
            _is_dead(self._pidfd, KILL_S)
        if self._is_over:
            self._reap(self._directory)

    def _kill(self, pidfd: int) -> None:
        self._is_over = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _reap(self, directory: str) -> None:
        """Reap the standby, and only then restore the ranks' limit. A later poll tries again."""
        for fd in (self._pidfd, self._held, self._errors):
            if fd is not None:
                os.close(fd)
        self._pidfd = self._held = self._errors = None
        self._is_over = not self._is_reaped(directory)
        if self._is_over:
            self._look_at = self._clock.monotonic() + REAP_AGAIN_S
        else:
            self._restore_limit()

    def _is_reaped(self, directory: str) -> bool:
        """Try several times, because a child of the killed standby may hold its lock a little longer."""
        until = self._clock.monotonic() + REAP_S
        while self._clock.monotonic() < until:
            with contextlib.suppress(OSError):  # the disk is full or broken: try again later
                if slot.reap(directory, timeout_s=REAP_S):
                    return True
            time.sleep(PATIENCE_S)
        return False

    def _restore_limit(self) -> None:
        limit = self._task_spec.resources.memory_bytes
        if limit is not None:
            with contextlib.suppress(OSError):
                self._confinement.limit_memory(limit)

    def _check(self, pidfd: int) -> None:
        if _is_dead(pidfd, 0.0):
            self._fail(_last_line(self._errors))
        elif self._is_near_limit():
            self._again_at = self._clock.monotonic() + AGAIN_S
            self.stop()
            self._log.add_message("the standby of this node was ended: the ranks need its memory")

    def _fail(self, reason: str) -> None:
        self._num_failed += 1
        self._again_at = self._clock.monotonic() + AGAIN_S
        if self._pidfd is None:
            self._restore_limit()  # none was started
        if self._directory is not None:
            self._reap(self._directory)
        if self._num_failed == 1:
            self._log.add_message(failure_message(reason))

    def _begin(self, directory: str) -> None:
        limit = self._task_spec.resources.memory_bytes
        image = read_image(self._task.stand_ins, self._confinement.uid)
        memory_bytes = self._room_for(image) if image is not None else None
        if image is None or (memory_bytes is None and limit is not None):
            return
        if not slot.reap(directory, timeout_s=REAP_S):
            return
        if limit is not None and memory_bytes is not None:
            self._confinement.limit_memory(limit - memory_bytes)
        config = slot.StandbyConfig(
            task_spec=self._task_spec,
            credentials=self._credentials,
            expected={"modules": image.modules, "plan": image.plan},
            memory_bytes=memory_bytes,
        )
        self._spawn(directory, msgspec.json.encode(config))

    def _room_for(self, image: ZygoteImage) -> int | None:
        """Return the memory for a standby. None: there is no limit to share, or too little is free."""
        limit, used = self._task_spec.resources.memory_bytes, self._confinement.memory_bytes()
        wanted = max(LEAST_BYTES, int(image.memory_bytes * ROOM))
        if limit is None or used is None or used * GROWTH + wanted > limit:
            return None
        return wanted

    def _is_near_limit(self) -> bool:
        used, limit = self._confinement.memory_bytes(), self._confinement.memory_limit
        return used is not None and limit is not None and used > limit * NEAR

    def _spawn(self, directory: str, config: bytes) -> None:
        os.makedirs(directory, 0o700)
        at = spool.SpoolTask(directory)
        # The new process holds the lock from its start, because any process may reap a slot that is unlocked.
        lock = spool.take_lock(at)
        if lock is None:
            raise OSError(errno.EBUSY, "another process holds its slot")
        config_fd = os.memfd_create("standby")
        held, self._held = os.pipe()
        self._errors = os.open(at.errors, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        opened = [lock, config_fd, held]
        try:
            with os.fdopen(os.dup(config_fd), "wb") as file:
                file.write(config)
            os.lseek(config_fd, 0, os.SEEK_SET)
            handed = [
                fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOW) for fd in (config_fd, held, lock, self._errors)
            ]
            opened += handed
            argv = command(directory)
            pid = os.posix_spawn(
                argv[0],
                argv,
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
    """Return the command of a standby. `-P -s` load this very code, whatever is in the current directory."""
    return [sys.executable, "-P", "-s", "-m", "shoal.runtime.standby", directory, "." * NAME_ROOM]


def read_image(stand_ins: str, uid: int | None) -> ZygoteImage | None:
    """Return the zygote's image. None: there is none, it may be incomplete, or it is invalid.

    The directory belongs to the job, so this follows no link and reads only the job's own plain files.
    """
    opened: list[int] = []
    try:
        opened.append(os.open(stand_ins, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        opened.append(os.open(launchers.IMAGE, flags, dir_fd=opened[-1]))
        facts = os.fstat(opened[-1])
        owner = os.geteuid() if uid is None else uid
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != owner or facts.st_size > MAX_IMAGE:
            return None
        if abs(time.time() - facts.st_mtime) < QUIET_S:
            return None
        image = msgspec.json.decode(os.read(opened[-1], MAX_IMAGE), type=ZygoteImage)
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


def failure_message(reason: str) -> str:
    """Return the log message for a node that cannot have a standby. It is logged once."""
    why = reason.removeprefix("shoal: ").removeprefix("no standby: ")
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
