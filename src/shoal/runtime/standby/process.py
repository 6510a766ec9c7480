"""The standby process: prepares everything for a task that may never come, then becomes its supervisor.

It unpacks the archive and starts a zygote that makes the imports of the ranks, inside the same sandbox and
limits. No code of the program runs before the takeover. The standby ends with the supervisor that started it.
If that supervisor is killed, an engine has 30 s to send a takeover request. After the takeover the standby is
a supervisor like any other, with lock and claim.
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
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.files import removal, spool
from shoal.runtime.process import kernel
from shoal.runtime.process.launcher import Launcher, Pipes
from shoal.runtime.process.meter import Meter
from shoal.runtime.rank.board import RankBoard
from shoal.runtime.standby import slot
from shoal.runtime.supervisor import entry
from shoal.runtime.supervisor.endings import Ending
from shoal.runtime.supervisor.environment import (
    DEFAULT_PATH,
    RendezvousRound,
    path_without_stand_ins,
    rank_environment,
)
from shoal.runtime.supervisor.preparation import PreparedTask, TaskPreparation, make_directories
from shoal.runtime.supervisor.task_run import TaskRun
from shoal.runtime.warm import install
from shoal.wire import EndKind

SUPERVISOR_PIPE, LOCK = 3, 4
"""Descriptors: a pipe that closes when the active supervisor dies, and the lock of the slot."""
HIGHEST_DESCRIPTOR = 1 << 20
CALLED_WITHIN_S = 30.0
"""How long the standby waits for a request after the active supervisor has died."""
LOOK_S = 1.0
STALE_S = 2.0
"""An engine whose request is older than this no longer waits for the reply."""
MAX_CALL = 8192
HANDED_OVER = 2
LOW_WEIGHT = 50
"""The CPU weight while the standby prepares: half of the ranks' weight."""
KILL_S = 2.0


class CannotStandBy(ShoalError):
    """No standby is possible here. The next supervisor starts in the ordinary way."""

    code = "runtime.standby"


def main(arguments: list[str]) -> int:
    """Run the standby. Return 0 if it ran a task, 1 if it was not needed or was of no use."""
    for fd in (SUPERVISOR_PIPE, LOCK):
        # Children must not inherit these: they would hold the slot after this process is dead.
        os.set_inheritable(fd, False)  # noqa: FBT003 - the standard library takes it in no other way
    os.closerange(LOCK + 1, HIGHEST_DESCRIPTOR)
    kernel.hide_memory()
    kernel.become_subreaper()
    os.umask(0o077)
    with os.fdopen(os.dup(0), "rb") as file:
        config = slot.CONFIG_DECODER.decode(file.read())
    standby = StandbySupervisor(arguments[0], config)
    try:
        standby.prepare()
        return standby.wait()
    except ShoalError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    finally:
        standby.end()


class StandbySupervisor:
    """Call `prepare`, then `wait`, and always `end`."""

    def __init__(self, directory: str, config: slot.StandbyConfig) -> None:
        self._directory = directory
        self._at = spool.SpoolTask(directory)
        self._config = config
        # This limit holds until the takeover. Then the task's own limit holds.
        resources = msgspec.structs.replace(config.task_spec.resources, memory_bytes=config.memory_bytes)
        self._task_spec = msgspec.structs.replace(config.task_spec, resources=resources)
        self._task = spool.SpoolTask(_task_directory(directory, config))
        self._clock = BootClock()
        self._confinement: Confinement | None = None
        self._ready: PreparedTask | None = None
        self._zygote: int | None = None
        self._has_become = False

    def prepare(self) -> None:
        """Prepare sandbox, files and zygote. Does not wait for the zygote's imports."""
        path = os.environ.get("SHOAL_PATH") or DEFAULT_PATH
        confinement = self._confinement = Confinement(self._task_spec, self._task, path, self._at)
        make_directories(self._at, confinement.uid)
        confinement.prepare()
        if confinement.sandbox is None or not confinement.cgroups:
            raise CannotStandBy("a standby needs bubblewrap and a cgroup of its own")
        confinement.set_cpu_weight(LOW_WEIGHT)
        launcher = Launcher(confinement, self._task.work)
        ground = TaskPreparation(
            self._task_spec, self._task, launcher, lambda what, child: _finish(launcher, what, child)
        )
        end = ground.unpack() or ground.link_checkpoint()
        if end is not None:
            raise CannotStandBy(end.message)
        confinement.leave_network()
        self._warm_up(launcher, confinement)

    def _warm_up(self, launcher: Launcher, confinement: Confinement) -> None:
        environment = rank_environment(
            self._task_spec,
            None,
            RendezvousRound(),
            work=self._task.work,
            path=confinement.path,
            credentials=self._config.credentials,
            network={},
            service={},
            cache=confinement.cache.directory,
            stand_ins=self._task.stand_ins,
        )
        # Processes of the current task are found by this variable. The standby must not be killed with them.
        del environment["SHOAL_NODE"]
        own_path = path_without_stand_ins(self._task_spec.program.env, confinement.path)
        arguments = (self._task.stand_ins, own_path, environment, self._config.expected)
        installing = launcher.start_function(
            "shoal.runtime.warm.install", "install", arguments, inherited_fds=()
        )
        end = _finish(launcher, "preparing the stand-ins for launchers", installing)
        if end is not None:
            raise CannotStandBy(end.message)
        page = RankBoard.create()
        meter = Meter(self._task_spec.ranks, self._task_spec.resources, self._clock)
        script = "cd /; " + install.zygote_script(
            self._task.stand_ins, self._task.work, self._task_spec.program.run
        )
        zygote = launcher.start_script(script, environment, inherited_fds=(page[0], meter.fd))
        self._zygote = os.pidfd_open(zygote[0])
        self._ready = PreparedTask(
            confinement=confinement,
            launcher=launcher,
            board=page,
            meter=meter,
            zygote=zygote,
        )

    def wait(self) -> int:
        """Wait for a takeover request and run the task, or return 1 when no request can come any more."""
        assert self._zygote is not None
        with contextlib.closing(_listen(self._directory)) as door:
            poll = select.poll()
            for fd in (SUPERVISOR_PIPE, self._zygote, door.fileno()):
                poll.register(fd, select.POLLIN)
            until: float | None = None
            while until is None or self._clock.monotonic() < until:
                ready = dict(poll.poll(LOOK_S * 1000))
                if self._zygote in ready:
                    raise CannotStandBy(self._zygote_words())
                if SUPERVISOR_PIPE in ready:
                    poll.unregister(SUPERVISOR_PIPE)
                    until = self._clock.monotonic() + CALLED_WITHIN_S
                if door.fileno() in ready:
                    return self._answer(door)
                if until is not None and not os.path.isdir(os.path.dirname(self._task.directory)):
                    return 1  # the attempt has ended and its directory is gone
        return 1

    def _answer(self, door: socket.socket) -> int:
        """Answer a takeover request and run the task. Return `NOTHING_TO_DO` if the request is not usable."""
        connection, _ = door.accept()
        with connection:
            connection.settimeout(STALE_S)
            handed: list[int] = []
            try:
                data, handed, _, _ = socket.recv_fds(connection, MAX_CALL, HANDED_OVER)
                call = self._read_request(connection, data, handed)
                connection.sendall(b"%d" % (os.getpid() if call is not None else 0))
            except OSError:
                call = None
        try:
            return self._become(call, handed) if call is not None else entry.NOTHING_TO_DO
        finally:
            for fd in handed:
                os.close(fd)

    def _read_request(
        self, connection: socket.socket, data: bytes, handed: list[int]
    ) -> slot.TakeoverRequest | None:
        with contextlib.suppress(msgspec.DecodeError, OSError):
            call = slot.REQUEST_DECODER.decode(data)
            task_spec = spool.read_task_spec(self._task)
            if task_spec is None or call.directory != self._task.directory:
                return None
            is_fresh = 0 <= self._clock.monotonic() - call.sent_at < STALE_S
            if is_fresh and len(handed) == HANDED_OVER and _peer_uid(connection) == os.geteuid():
                return call if slot.fits(self._config.task_spec, task_spec) else None
        return None

    def _become(self, call: slot.TakeoverRequest, handed: list[int]) -> int:
        """Become the supervisor in the same way as a fork server's child, from the lock on."""
        for fd, target in ((handed[0], 0), (handed[1], 1), (handed[1], 2)):
            os.dup2(fd, target)
        kernel.rename((sys.executable, "-m", "shoal.runtime.supervisor", self._task.directory))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        taken = entry.claim_task(self._task, self._clock)
        if taken is None:
            return entry.NOTHING_TO_DO
        task_spec, credentials = taken
        self._has_become = True
        if self._ready is not None:
            self._ready.on_settled = self._leave_slot
        TaskRun(self._task, task_spec, credentials, self._clock, call.sent_at, self._ready).run()
        return entry.DONE

    def _leave_slot(self) -> None:
        """Remove the slot after the task has taken over its directories.

        If the slot cannot be removed, keep its lock, so that no other process uses it while this one lives.
        """
        if removal.remove(self._directory, timeout_s=KILL_S):
            os.close(LOCK)

    def end(self) -> None:
        """Remove everything that the standby made, unless a task has taken it over."""
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
        output = b""
        with contextlib.suppress(BlockingIOError):
            output = os.read(pipe, 65536)
        lines = output.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the process that made the imports has ended"


def _task_directory(directory: str, config: slot.StandbyConfig) -> str:
    root = os.path.dirname(os.path.dirname(directory))
    return f"{root}/live/{config.task_spec.identity.attempt_id}/{config.task_spec.identity.node}"


def _listen(directory: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        door.bind(f"/proc/self/fd/{here}/socket.new")  # by descriptor: the path itself may be too long
        door.listen(4)
        os.rename(f"{directory}/socket.new", slot.socket_path(directory))
    finally:
        os.close(here)
    return door


def _peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


def _finish(launcher: Launcher, description: str, started: tuple[int, Pipes]) -> Ending | None:
    """Wait for a preparing process. Return how it failed, or None."""
    _, status = os.waitpid(started[0], 0)
    for fd in (started[1].stdout, started[1].stderr):
        os.close(fd)
    if status == 0:
        return None
    because = launcher.start_failure() or f"it ended with status {status}"
    return Ending(kind=EndKind.SETUP_FAILED, message=f"{description} failed: {because}")


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
