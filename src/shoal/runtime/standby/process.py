"""The waiting process: makes everything ready for a share that may never come, and becomes its supervisor.

Nothing of the program runs before that: it unpacks, and has a zygote make the imports that the ranks made,
inside the same walls and limits. It ends with the supervisor that started it, unless that one is killed: then
an engine has half a minute to call. From there on it is a supervisor like any other: by lock and claim.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys

import msgspec

from shoal.clock import BootClock
from shoal.errors import ShoalError
from shoal.runtime import entry, kernel, removal, spool
from shoal.runtime.board import Board
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.ending import Ending
from shoal.runtime.environment import DEFAULT_PATH, Generation, own_path, rank_environment
from shoal.runtime.groundwork import Groundwork, make_directories
from shoal.runtime.launch import Launcher, Pipes
from shoal.runtime.meter import Meter
from shoal.runtime.ready import Ready
from shoal.runtime.share import ShareRun
from shoal.runtime.standby import place
from shoal.runtime.warm import install
from shoal.wire import EndKind

MINDER, LOCK = 3, 4
"""Descriptors: a pipe that ends with our supervisor, and the lock on our place."""
HIGHEST_DESCRIPTOR = 1 << 20
CALLED_WITHIN_S = 30.0
"""After the end of our supervisor."""
LOOK_S = 1.0
STALE_S = 2.0
"""Whoever called so long ago has given us up."""
MAX_CALL = 8192
HANDED_OVER = 2
LOW_WEIGHT = 50
"""Of the processors, while it gets ready: half of what the ranks have, where they want them."""
KILL_S = 2.0


class CannotStandBy(ShoalError):
    """There will be no standby here; the next supervisor starts the ordinary way."""

    code = "runtime.standby"


def main(arguments: list[str]) -> int:
    """0: a share was run. 1: nobody needs us, or could have used us."""
    for fd in (MINDER, LOCK):
        # Not for whatever we start: it would hold our place, or seem to be us, when we are dead.
        os.set_inheritable(fd, False)  # noqa: FBT003 - the standard library takes it in no other way
    os.closerange(LOCK + 1, HIGHEST_DESCRIPTOR)
    kernel.hide_memory()
    kernel.become_subreaper()
    os.umask(0o077)
    with os.fdopen(os.dup(0), "rb") as file:
        brief = place.BRIEF.decode(file.read())
    standby = Standby(arguments[0], brief)
    try:
        standby.prepare()
        return standby.wait()
    except ShoalError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    finally:
        standby.end()


class Standby:
    """`prepare`, then `wait`, and `end` whatever came of it."""

    def __init__(self, directory: str, brief: place.Brief) -> None:
        self._directory = directory
        self._at = spool.Share(directory)
        self._brief = brief
        # Ours until the share is there; then its own limit holds.
        limits = msgspec.structs.replace(brief.order.limits, memory_bytes=brief.memory_bytes)
        self._order = msgspec.structs.replace(brief.order, limits=limits)
        self._share = spool.Share(_share_of(directory, brief))
        self._clock = BootClock()
        self._confinement: Confinement | None = None
        self._ready: Ready | None = None
        self._zygote: int | None = None
        self._has_become = False

    def prepare(self) -> None:
        """Sandbox, files, zygote. Returns when that one was started, not when it has made its imports."""
        path = os.environ.get("SHOAL_PATH") or DEFAULT_PATH
        confinement = self._confinement = Confinement(self._order, self._share, path, self._at)
        make_directories(self._at, confinement.uid)
        confinement.prepare()
        if confinement.sandbox is None or not confinement.cgroups:
            raise CannotStandBy("a standby needs bubblewrap and a cgroup of its own")
        confinement.weigh(LOW_WEIGHT)
        launcher = Launcher(confinement, self._share.work)
        ground = Groundwork(
            self._order, self._share, launcher, lambda what, child: _finish(launcher, what, child)
        )
        end = ground.unpack() or ground.link_checkpoint()
        if end is not None:
            raise CannotStandBy(end.message)
        confinement.leave_network()
        self._warm_up(launcher, confinement)

    def _warm_up(self, launcher: Launcher, confinement: Confinement) -> None:
        environment = rank_environment(
            self._order,
            None,
            Generation(),
            work=self._share.work,
            path=confinement.path,
            credentials=self._brief.credentials,
            network={},
            service={},
            cache=confinement.cache.directory,
            start=self._share.stand_ins,
        )
        # What dies with the share that is now is found by its marks and by where it works: not so this one.
        del environment["SHOAL_NODE"]
        own = own_path(self._order, confinement.path)
        told = (self._share.stand_ins, own, environment, self._brief.expected)
        installing = launcher.start_function("shoal.runtime.warm.install", "install", told, keep=())
        end = _finish(launcher, "preparing the stand-ins for launchers", installing)
        if end is not None:
            raise CannotStandBy(end.message)
        page, meter = Board.make(), Meter(self._brief.order, self._clock)
        script = "cd /; " + install.zygote_script(self._share.stand_ins, self._share.work, self._order.run)
        zygote = launcher.start_script(script, environment, keep=(page[0], meter.fd))
        self._zygote = os.pidfd_open(zygote[0])
        self._ready = Ready(
            confinement=confinement,
            launcher=launcher,
            page=page,
            meter=meter,
            zygote=zygote,
        )

    def wait(self) -> int:
        """Be called, or be needed no more."""
        assert self._zygote is not None
        with contextlib.closing(_listen(self._directory)) as door:
            poll = select.poll()
            for fd in (MINDER, self._zygote, door.fileno()):
                poll.register(fd, select.POLLIN)
            until: float | None = None
            while until is None or self._clock.monotonic() < until:
                ready = dict(poll.poll(LOOK_S * 1000))
                if self._zygote in ready:
                    raise CannotStandBy(self._zygote_words())
                if MINDER in ready:
                    poll.unregister(MINDER)
                    until = self._clock.monotonic() + CALLED_WITHIN_S
                if door.fileno() in ready:
                    return self._answer(door)
                if until is not None and not os.path.isdir(os.path.dirname(self._share.directory)):
                    return 1  # the attempt is over and put away
        return 1

    def _answer(self, door: socket.socket) -> int:
        """Become the supervisor that is called for. Who cannot, or wakes up too late, waits no longer."""
        connection, _ = door.accept()
        with connection:
            connection.settimeout(STALE_S)
            handed: list[int] = []
            try:
                said, handed, _, _ = socket.recv_fds(connection, MAX_CALL, HANDED_OVER)
                call = self._understood(connection, said, handed)
                connection.sendall(b"%d" % (os.getpid() if call is not None else 0))
            except OSError:
                call = None
        try:
            return self._become(call, handed) if call is not None else entry.NOTHING_TO_DO
        finally:
            for fd in handed:
                os.close(fd)

    def _understood(self, connection: socket.socket, said: bytes, handed: list[int]) -> place.Call | None:
        with contextlib.suppress(msgspec.DecodeError, OSError):
            call = place.CALL.decode(said)
            order = spool.read_order(self._share)
            if order is None or call.directory != self._share.directory:
                return None
            is_fresh = 0 <= self._clock.monotonic() - call.sent_at < STALE_S
            if is_fresh and len(handed) == HANDED_OVER and _caller(connection) == os.geteuid():
                return call if place.fits(self._brief.order, order) else None
        return None

    def _become(self, call: place.Call, handed: list[int]) -> int:
        """As an engine's nursery makes a supervisor, from the lock on."""
        for fd, target in ((handed[0], 0), (handed[1], 1), (handed[1], 2)):
            os.dup2(fd, target)
        kernel.rename((sys.executable, "-m", "shoal.runtime.supervisor", self._share.directory))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        taken = entry.take(self._share, self._clock)
        if taken is None:
            return entry.NOTHING_TO_DO
        order, credentials = taken
        self._has_become = True
        if self._ready is not None:
            self._ready.on_settled = self._leave_place
        ShareRun(self._share, order, credentials, self._clock, call.sent_at, self._ready).run()
        return entry.DONE

    def _leave_place(self) -> None:
        """The share has taken over the directories: what is left is of no use to anybody.

        Where it cannot be removed, nobody else may make anything of it while we live.
        """
        if removal.remove(self._directory, timeout_s=KILL_S):
            os.close(LOCK)

    def end(self) -> None:
        """Leave nothing behind, unless it is a share's by now."""
        if self._has_become:
            return
        confinement = self._confinement
        if confinement is None or confinement.kill(reap=_reap, timeout_s=KILL_S):
            if confinement is not None:
                confinement.remove()
            removal.remove(self._directory, timeout_s=KILL_S)

    def _zygote_words(self) -> str:
        assert self._ready is not None
        pipe = self._ready.zygote[1].stderr
        os.set_blocking(pipe, False)
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(pipe, 65536)
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the process that made the imports has ended"


def _share_of(directory: str, brief: place.Brief) -> str:
    root = os.path.dirname(os.path.dirname(directory))
    return f"{root}/live/{brief.order.attempt_id}/{brief.order.node}"


def _listen(directory: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        door.bind(f"/proc/self/fd/{here}/door.new")  # by descriptor: the path itself may be too long
        door.listen(4)
        os.rename(f"{directory}/door.new", place.door_of(directory))
    finally:
        os.close(here)
    return door


def _caller(connection: socket.socket) -> int:
    """Whose process it is."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


def _finish(launcher: Launcher, what: str, started: tuple[int, Pipes]) -> Ending | None:
    """Wait for a process that prepares something. None: it went well."""
    _, status = os.waitpid(started[0], 0)
    for fd in (started[1].stdout, started[1].stderr):
        os.close(fd)
    if status == 0:
        return None
    because = launcher.failure() or f"it ended with status {status}"
    return Ending(kind=EndKind.SETUP_FAILED, message=f"{what} failed: {because}")


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
