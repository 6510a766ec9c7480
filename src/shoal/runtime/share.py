"""The life of one share: prepare, run the ranks, stop them, leave nothing behind, say how it ended."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from types import FrameType

import msgspec

from shoal.clock import Clock
from shoal.errors import ShoalError
from shoal.runtime import ending, listening, network, removal, shared_memory, spool
from shoal.runtime.board import Request
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.crew import Crew
from shoal.runtime.drills import Driller
from shoal.runtime.ending import Ending, recovered
from shoal.runtime.environment import (
    DEFAULT_PATH,
    Generation,
    own_path,
    rank_environment,
    setup_environment,
)
from shoal.runtime.groundwork import Groundwork, make_directories
from shoal.runtime.kept import Kept
from shoal.runtime.launch import Launcher, Pipes
from shoal.runtime.left_running import left_running
from shoal.runtime.logs import LogFile
from shoal.runtime.meter import Meter
from shoal.runtime.ready import Ready
from shoal.runtime.reasons import Reasons
from shoal.runtime.renewal import Renewer
from shoal.runtime.replica_server import ReplicaServer
from shoal.runtime.restarts import OTHERS_FAILED, RANK_FAILED, Restarts
from shoal.runtime.rules import DEVICE_FAULTS, LogRules
from shoal.runtime.standby.minder import Minder
from shoal.runtime.warm import install
from shoal.runtime.watch import Process, Watcher
from shoal.runtime.work_folder import WorkFolder
from shoal.runtime.worlds import Worlds
from shoal.wire import Credentials, EndKind, NodeOutcome, Order, Phase

TURN_S = 1.0
STOPPING_TURN_S = 0.03
RETRY_S = 1.0
KILL_S = 2.0
SCRATCH_S = 2.0
"""How long the outcome waits for the ranks' /tmp to be removed; the engine removes what is left."""


SLEEP_GRACE_S = 10.0
"""For a server that is ended so that it sleeps: nobody waits for anything of it."""
TOGETHER_S = 0.5
"""How far apart a signal to all of a job, as of Slurm's, may reach us and a rank."""
ASLEEP = Ending(kind=EndKind.STOPPED, message="the server sleeps")
ALL_STOP = frozenset({EndKind.STOPPED, EndKind.TIME_LIMIT})
"""Endings that every node of the attempt has at about the same time: its ranks can save together."""


class ShareRun:
    """One run. `run` returns when the outcome is on disk and nothing of the share runs any more."""

    def __init__(
        self,
        share: spool.Share,
        order: Order,
        credentials: Credentials,
        clock: Clock,
        born_at: float,
        ready: Ready | None = None,
        kept: Kept | None = None,
    ) -> None:
        """`ready`: what a standby has prepared for this share. `kept`: by whom, where a keeper forked us."""
        self._kept = kept
        self._ready = ready
        self._share = share
        self._order = order
        self._credentials = credentials
        self._clock = clock
        self._path = os.environ.get("SHOAL_PATH") or DEFAULT_PATH
        wake, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._renewer: Renewer | None = None
        self._meter = ready.meter if ready is not None else Meter(order, clock)
        if order.control_url is not None:
            # Without credentials no answer will count, and the fence ends the share: somebody who may be
            # replaced must never run on only because a credential was forgotten.
            server_file = os.environ.get("SHOAL_SERVER_FILE")
            self._renewer = Renewer(
                order, credentials, server_file, clock, self._wake_w, born_at, self._meter
            )
        self._reasons = Reasons(share, order, clock, self._renewer, kept)
        self._log = LogFile(share.log, order.limits.max_log_bytes, clock)
        has_gpus = bool(order.gpu_ids) and not order.are_gpus_simulated
        self._rules = LogRules((*order.log_rules, *(DEVICE_FAULTS if has_gpus else ())))
        self._watcher = Watcher(self._log, self._rules, wake, clock)
        self._confinement: Confinement | None = None
        self._cache: str | None = None
        self._worlds: Worlds | None = None
        self._running: list[Process] = []
        self._crew: Crew | None = None
        self._phase = Phase.PREPARING
        self._started_at: float | None = None
        self._folder = WorkFolder(order, share)
        self._restarts = Restarts(order, self._renewer)
        self._network: dict[str, str] = {}
        self._zygote: Process | None = None
        self._minder: Minder | None = None
        self._server = ReplicaServer(order, credentials, share.home, clock, self._watcher, self._renewer)
        self._driller = Driller(order, self._renewer, clock, self._log)
        self._failed: tuple[float, int] | None = (clock.now(), time.monotonic_ns())
        """When the group before failed here, or we began, until it is told how this group did."""
        self._blamed: Process | None = None
        """The first process of the newest group that failed, also when that group is cleared away."""
        self._over_at = -math.inf
        """When what ran last was seen to be over by itself, well or not, by the monotonic clock."""

    def run(self) -> None:
        """Run the share to its end. Only what cannot be caught keeps it from writing an outcome."""
        self._listen()
        try:
            end = self._live()
        except ShoalError as error:
            end = self._reasons.signalled() or Ending(kind=EndKind.SETUP_FAILED, message=error.message)
        except Exception as error:  # noqa: BLE001 - whatever it was, nothing may run on without us
            sys.excepthook(*sys.exc_info())  # the traceback module would cost every start 2 ms
            end = Ending(kind=EndKind.LOST, message=f"the supervisor failed: {type(error).__name__}: {error}")
        self._bury()
        self._report(self._outcome(self._in_hindsight(end)))
        if self._confinement is not None:
            self._confinement.cache.trim()

    def _listen(self) -> None:
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, _only_wake)
        signal.signal(signal.SIGTERM, self._reasons.on_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if self._kept is not None:
            self._kept.listen()

    def _live(self) -> Ending:
        launcher = self._confine()
        end = self._reasons.now() or self._lay_ground(launcher) or self._run_ranks(launcher)
        if end.kind is not EndKind.SUCCEEDED:
            self._stop(end)
        elif self._crew is not None:
            left = left_running(self._crew.left_behind, self._clock, self._watcher.turn)
            if left is not None:
                self._log.say(left)
                end = self._judge_rest(end, self._crew.generation)
        return end

    def _judge_rest(self, end: Ending, generation: int) -> Ending:
        """The end of ranks that ended well and left something running."""
        cut_off = self._worlds.cut_off(generation, self._watcher.turn) if self._worlds is not None else None
        if cut_off is None:
            return end
        self._stop(cut_off)
        return cut_off

    def _confine(self) -> Launcher:
        if self._ready is not None:
            self._confinement = self._ready.confinement
            self._path, self._cache = self._confinement.path, self._confinement.cache.directory
            self._ready.settle(self._order)
            return self._ready.launcher
        confinement = self._confinement = Confinement(self._order, self._share, self._path)
        self._path, self._cache = confinement.path, confinement.cache.directory
        make_directories(self._share, confinement.uid)
        listening.make(self._order, os.path.realpath(self._share.home), confinement.uid)
        confinement.prepare()
        return Launcher(confinement, self._share.work)

    def _lay_ground(self, launcher: Launcher) -> Ending | None:
        if self._ready is not None:
            return None
        setup = setup_environment(
            self._order,
            work=self._share.work,
            path=self._path,
            credentials=self._credentials,
            cache=self._cache,
        )
        ground = Groundwork(
            self._order, self._share, launcher, lambda what, child: self._first(launcher, what, child)
        )
        return ground.unpack() or ground.link_checkpoint() or ground.set_up(setup)

    def _first(
        self, launcher: Launcher, what: str, started: tuple[int, Pipes], *, is_quick: bool = False
    ) -> Ending | None:
        """Wait for a process that comes before the ranks. None: it went well.

        `is_quick`: the ranks start within milliseconds, so no renewal is spent on this.
        """
        process = Process(started[0], None)
        self._watcher.add(process, started[1])
        self._running = [process]
        if not is_quick:
            self._tell(Phase.PREPARING)
        end = self._follow(launcher, what)
        return None if end.kind is EndKind.SUCCEEDED else end

    def _warm_up(self, launcher: Launcher, crew: Crew) -> Ending | None:
        """Have later starts of the ranks cost no imports, where a failure or a sleep is followed by one."""
        order = self._order
        if self._ready is not None:
            self._adopt(self._ready.zygote)
            return None
        may_begin_again = order.max_restarts > 0 or (order.probe is not None and order.probe.can_sleep)
        is_warm = may_begin_again and install.is_python(order.run)
        zygote = self._environment(None, self._restarts.generation) if is_warm else None
        told = (self._share.stand_ins, own_path(order, self._path), zygote)
        installing = launcher.start_function("shoal.runtime.warm.install", "install", told, keep=())
        end = self._first(launcher, "preparing the stand-ins for launchers", installing, is_quick=True)
        if end is not None or zygote is None:
            return end
        script = install.zygote_script(self._share.stand_ins, self._share.work, order.run)
        self._adopt(launcher.start_script(script, zygote, keep=crew.kept_fds))
        return None

    def _adopt(self, started: tuple[int, Pipes]) -> None:
        """Have ranks forked by this zygote."""
        self._zygote = Process(started[0], None, is_needed=False)
        self._watcher.add(self._zygote, started[1])
        self._watcher.hold(self._zygote)  # modules that it imports while the ranks train may print something

    def _run_ranks(self, launcher: Launcher) -> Ending:
        """Run one group of ranks after the other, until one ends well or nothing may follow it."""
        if len(self._order.nodes) > 1:
            has_gpus = bool(self._order.gpu_ids) and not self._order.are_gpus_simulated
            self._network = network.variables(self._order.master_addr, has_gpus=has_gpus)
        assert self._confinement is not None
        self._confinement.leave_network()
        crew = self._crew = Crew(
            self._order,
            self._confinement,
            launcher,
            self._watcher,
            self._clock,
            self._environment,
            self._meter,
            self._ready.page if self._ready is not None else None,
        )
        self._minder = Minder(
            self._order, self._credentials, self._share, self._confinement, self._clock, self._log
        )
        last = self._server.open(launcher, self._confinement) or self._warm_up(launcher, crew)
        worlds = self._worlds = Worlds(
            self._order, self._share.stand_ins, self._confinement, self._clock, self._log
        )
        if last is None and self._order.incarnation > 0 and self._renewer is not None:
            self._tell(Phase.PREPARING)
            last = self._regroup(OTHERS_FAILED, None)
        self._folder.begin()
        while last is None:
            began_at = self._clock.monotonic()
            self._start_ranks(crew)
            end = worlds.judged(self._follow(launcher, "a rank", crew), crew.generation)
            if end is ASLEEP:
                last = self._sleep(crew)
                continue
            ran_s = math.inf if self._driller.take_blame() else self._clock.monotonic() - began_at
            may_follow = self._restarts.may_follow(end, ran_s, has_stepped=crew.has_stepped)
            # A log rule has said something about this node, or about trying again: not ours to pass over.
            if self._rules.hits:
                return self._restarts.excluded(end)
            if not may_follow:
                return end
            self._failed = (self._clock.now(), time.monotonic_ns())
            if end is OTHERS_FAILED and self._restarts.is_after_hang:
                crew.lookout.end_for_hang()
            self._log.say(f"{end.message}; asking whether all ranks may start anew where they are")
            failure = None if end is OTHERS_FAILED else self._outcome_of(end)
            last = self._regroup(end, failure) if crew.clear() else end
        return last

    def _sleep(self, crew: Crew) -> Ending | None:
        """End the server, which has nothing to do, and keep all else. None: it may be started again."""
        for process in crew.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        until = self._clock.monotonic() + min(self._order.grace_s, SLEEP_GRACE_S)
        while any(process.status is None for process in crew.ranks) and self._clock.monotonic() < until:
            self._watcher.turn(STOPPING_TURN_S)
        if not crew.clear():
            return Ending(kind=EndKind.LOST, message="the server could not be ended so that it sleeps")
        self._server.tell_ended(is_ended=True)
        reason = None
        while self._server.should_end and reason is None:
            reason = self._reasons.now()
            self._watcher.turn(self._reasons.next_in(TURN_S))
        self._server.tell_ended(is_ended=False)
        return reason

    def _tell_recovery(self, crew: Crew) -> None:
        if self._failed is None:
            return
        recovery = crew.recovery(*self._failed)
        if recovery is not None:
            self._failed = None
            if recovery.generation == 0 and (self._order.epoch == 1 or recovery.stepped_s is None):
                return  # nothing was lost before, or all there is to tell is its start, which is known
            self._log.say(recovered(recovery))
            if self._renewer is not None:
                self._renewer.tell_recovery(recovery)

    def _regroup(self, end: Ending, failure: NodeOutcome | None) -> Ending | None:
        """Wait for the next group. None: it may start; else why there is none."""
        self._have_standby_give_way()
        self._restarts.begin(failure)
        while self._restarts.next(failure) is None:
            reason = self._reasons.now()
            if reason is not None:
                return reason
            if self._restarts.is_refused:
                return end
            self._watcher.turn(self._reasons.next_in(TURN_S))
        self._log.say(f"group {self._restarts.generation.number} of the ranks begins")
        return None

    def _start_ranks(self, crew: Crew) -> None:
        if self._confinement is not None:
            self._confinement.begin_ranks()
            self._confinement.cache.clear_builds()
        self._blamed = None
        crew.form(self._restarts.generation)
        if self._confinement is not None and self._renewer is not None:
            self._meter.start(self._confinement)
        self._running = crew.ranks
        self._started_at = self._started_at or self._clock.now()
        pids = tuple(process.pid for process in self._running)
        cgroups = self._confinement.cgroups if self._confinement is not None else ()
        self._tell(Phase.RUNNING)
        self._server.start()
        with contextlib.suppress(OSError):  # a full disk is no reason to end what runs
            spool.write_started(self._share, spool.Started(at=self._started_at, pids=pids, cgroups=cgroups))

    def _environment(self, local_rank: int | None, generation: Generation) -> dict[str, str]:
        return rank_environment(
            self._order,
            local_rank,
            generation,
            work=self._share.work,
            path=self._path,
            credentials=self._credentials,
            network=self._network,
            service=self._server.variables,
            cache=self._cache,
            start=self._share.stand_ins,
        )

    def _follow(self, launcher: Launcher, what: str, crew: Crew | None = None) -> Ending:
        """Wait until every running process ended well, one ended badly, or there is a reason to stop."""
        while True:
            if crew is not None:
                self._driller.look(crew, self._confinement, launcher, self._watcher)
            failed = self._watcher.first_failed
            hung = crew.lookout.hung if crew is not None else None
            if failed is not None and failed.status is not None:
                self._blamed = failed
                self._over_at = self._clock.monotonic()
                end = self._end_of(failed, failed.status, launcher.failure(), what)
                end = end if hung is None or hung.rank is None else ending.of_hang(end, hung)
                return self._reason_behind(end) or end
            if all(process.status == 0 for process in self._running):
                self._over_at = self._clock.monotonic()
                return ending.SUCCEEDED
            reason = self._reasons.now() or self._server.death
            if reason is not None:
                return reason
            if crew is not None and self._restarts.is_wanted:
                return OTHERS_FAILED
            if hung is not None and hung.rank is None:
                return ending.of_hang_elsewhere(hung, self._order.grace_s)
            if crew is not None and crew.endless_hang is not None:
                return ending.of_endless_hang(crew.endless_hang, self._order.grace_s)
            if crew is not None and self._server.should_end:
                return ASLEEP
            self._server.look()
            if crew is not None and self._worlds is not None:
                split = self._worlds.look(crew.generation)
                if split is not None:
                    return split
                crew.look_after()
                self._look_after_standby(crew)
                self._tell_recovery(crew)
                if self._renewer is not None:
                    self._renewer.progress = crew.progress()
                    self._renewer.tell_signs(crew.signs())
                    self._renewer.world = self._worlds.world
            self._watcher.turn(self._reasons.next_in(TURN_S if crew is None else crew.pause_s))

    def _reason_behind(self, end: Ending) -> Ending | None:
        """What explains that a process ended so, if it was told to. Who sends a signal to all of a job sends
        it to us and to ranks, in any order: what a rank may have died of is waited for before it is blamed.
        Memory that ran out says more, and so does a `setup` that failed by itself.
        """
        died_of_it = ending.is_by(end, signal.SIGTERM)
        if end.kind is EndKind.OUT_OF_MEMORY or (end.kind is EndKind.SETUP_FAILED and not died_of_it):
            return None
        if not died_of_it:
            return self._reasons.signalled()
        until = self._clock.monotonic() + TOGETHER_S
        while (reason := self._reasons.now()) is None and (now := self._clock.monotonic()) < until:
            self._watcher.turn(until - now)
        return reason

    def _look_after_standby(self, crew: Crew) -> None:
        if self._minder is not None and self._zygote is not None:
            self._minder.look(is_time=self._zygote.status is None and crew.has_settled)

    def _have_standby_give_way(self) -> None:
        """Ranks that save may need all of their memory, and until they train again nobody looks at it."""
        if self._minder is not None:
            self._minder.give_way()

    def _end_of(self, process: Process, status: int, failure: str | None, what: str) -> Ending:
        if failure is not None:
            return Ending(kind=EndKind.SETUP_FAILED, message=f"{what} failed: {failure}")
        self._watcher.catch_up(process)
        last_words = process.last_words
        if process.rank is None:
            return ending.of_setup(what, status, last_words)
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        is_oom = self._confinement is not None and self._confinement.has_run_out_of_memory(
            was_killed=was_killed
        )
        end = ending.of_rank(
            process.rank,
            status,
            is_out_of_memory=is_oom,
            grace_s=self._order.grace_s,
            last_words=last_words,
            is_alone=self._order.world_size == 1,
        )
        return ending.of_device(end, last_words)

    def _stop(self, end: Ending) -> None:
        """SIGTERM to whatever still runs, then wait for it, at most the grace. Killing is `_bury`'s."""
        self._have_standby_give_way()
        self._tell(Phase.STOPPING)
        if self._crew is not None:
            self._crew.tell(Request.SAVE if end.kind in ALL_STOP else Request.GO)
        groups = [process.pid for process in self._running if process.status is None]
        if self._crew is not None and end.kind in ALL_STOP:
            groups += self._crew.without_shell()
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM if end.grace_s > 0 else signal.SIGKILL)
                os.killpg(group, signal.SIGCONT)  # one that is stopped, as by a drill, hears nothing
        if self._crew is not None:
            self._crew.send(signal.SIGCONT)  # its workers, too, which may be in sessions of their own
        deadline = self._clock.monotonic() + end.grace_s
        while any(_is_alive(group) for group in groups):
            hurry = self._reasons.now()
            now = self._clock.monotonic()
            if hurry is not None:
                deadline = min(deadline, now + hurry.grace_s)
            if now >= deadline:
                return
            self._watcher.turn(min(STOPPING_TURN_S, deadline - now))

    def _bury(self) -> None:
        """Kill the whole tree, take its last lines, remove what it used. Returns when nothing runs."""
        confinement = self._confinement
        while confinement is not None and not confinement.kill(reap=self._watcher.reap, timeout_s=KILL_S):
            self._watcher.turn(RETRY_S)
            self._reasons.now()  # a keeper that is dead by now is seen to be: this takes as long as it takes
        if self._minder is not None:
            self._minder.end()
        self._server.release()
        self._watcher.drain()
        self._meter.hear()
        shared_memory.give_back(self._order)
        listening.give_back(self._order, os.path.realpath(self._share.home))
        removal.remove(self._share.scratch, timeout_s=SCRATCH_S)
        removal.remove(self._share.stand_ins, timeout_s=SCRATCH_S)

    def _in_hindsight(self, end: Ending) -> Ending:
        """One that saves and ends well when it is told to has not done what it was started for. A signal to
        all may reach us later than ranks, but not much: one that comes while what they left takes its time to
        die finds them done. It is waited for before a failure is told, which may be a rank's way to end when
        it is told to. Nobody waits before a success is, nor before ranks begin anew, which is not the end.
        """
        if end.kind is not EndKind.SUCCEEDED and end.kind not in RANK_FAILED:
            return end
        while (signalled := self._signalled_together()) is None and end.kind in RANK_FAILED:
            left_s = self._over_at + TOGETHER_S - self._clock.monotonic()
            if left_s <= 0:
                break
            self._watcher.turn(left_s)
        return signalled or end

    def _signalled_together(self) -> Ending | None:
        """That a signal came which may have been for what ran last, too."""
        over_s = self._clock.monotonic() - self._over_at
        return self._reasons.signalled(over_s - TOGETHER_S)

    def _outcome(self, end: Ending) -> NodeOutcome:
        outcome = self._outcome_of(end)
        outcome = msgspec.structs.replace(outcome, written=self._folder.lost())
        if self._confinement is not None:
            self._confinement.remove()
        return outcome

    def _outcome_of(self, end: Ending) -> NodeOutcome:
        failed = self._watcher.first_failed or self._blamed
        is_own_fault = end.kind in (
            EndKind.EXITED,
            EndKind.SIGNALED,
            EndKind.OUT_OF_MEMORY,
            EndKind.SETUP_FAILED,
        )
        words = failed.last_words if failed is not None and is_own_fault else ""
        return NodeOutcome(
            attempt_id=self._order.attempt_id,
            epoch=self._order.epoch,
            node=self._order.node,
            kind=end.kind,
            ended_at=self._clock.now(),
            failed_at=failed.ended_at if failed is not None and is_own_fault else None,
            exit_code=end.exit_code,
            signal=end.signal,
            rank=end.rank,
            message=ending.shortened(self._folder.told(end.message, words), words),
            is_hang=end.is_hang,
            rules_hit=tuple(self._rules.hits),
            started_at=self._started_at,
            cpu_s=self._confinement.cpu_seconds() if self._confinement is not None else None,
            restarts=self._restarts.generation.number,
            incarnation=self._order.incarnation,
            is_unasked=end.is_unasked,
            gives_up=self._restarts.gives_up,
            num_early=self._restarts.num_early,
            world=self._worlds.world if self._worlds is not None else None,
        )

    def _report(self, outcome: NodeOutcome) -> None:
        """On disk above all, then to the control plane; a full disk delays the first, not the second."""
        if self._renewer is not None:
            self._renewer.tell(Phase.ENDED, self._started_at, outcome)
        while not (self._log.finish() and self._has_written(outcome)) and not self._reasons.is_bereft:
            removal.remove(self._share.scratch, timeout_s=RETRY_S)  # it may be what fills the disk
            time.sleep(RETRY_S)
        if self._renewer is not None:
            self._renewer.finish(outcome)

    def _has_written(self, outcome: NodeOutcome) -> bool:
        try:
            spool.write_outcome(self._share, outcome)
        except OSError:
            return False
        return True

    def _tell(self, phase: Phase) -> None:
        if self._renewer is not None:
            self._renewer.tell(phase, self._started_at)
            self._renewer.start()


def _only_wake(signum: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has already done the work."""


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
