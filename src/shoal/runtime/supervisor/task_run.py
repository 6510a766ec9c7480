"""The life of one task: prepare, run the ranks, stop them, leave nothing behind, write the outcome."""

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
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.files import checkpoint_storage, removal, spool
from shoal.runtime.lease.renewal import LeaseRenewer
from shoal.runtime.lease.stop_reasons import NodeAgentWatch, StopReasons
from shoal.runtime.process import network
from shoal.runtime.process.launcher import Launcher, Pipes
from shoal.runtime.process.log import LogFile
from shoal.runtime.process.log_rules import DEVICE_FAULTS, LogRules
from shoal.runtime.process.meter import Meter
from shoal.runtime.process.watcher import Process, Watcher
from shoal.runtime.rank.board import StopRequest
from shoal.runtime.replica import listeners
from shoal.runtime.replica.server import ReplicaServer
from shoal.runtime.standby.monitor import StandbyMonitor
from shoal.runtime.supervisor import endings
from shoal.runtime.supervisor.drills import DrillRunner
from shoal.runtime.supervisor.endings import Ending, describe_recovery
from shoal.runtime.supervisor.environment import (
    DEFAULT_PATH,
    RendezvousRound,
    path_without_stand_ins,
    rank_environment,
    setup_environment,
)
from shoal.runtime.supervisor.preparation import PreparedTask, TaskPreparation, WorkFolder, make_directories
from shoal.runtime.supervisor.rank_group import RankGroup
from shoal.runtime.supervisor.restarts import OTHERS_FAILED, RANK_FAILED, Restarts
from shoal.runtime.supervisor.unfinished_launchers import describe_left_running
from shoal.runtime.supervisor.world_check import WorldCheck
from shoal.runtime.warm import install
from shoal.wire import EndKind, TaskCredentials, TaskOutcome, TaskPhase, TaskSpec

TURN_S = 1.0
STOPPING_TURN_S = 0.03
RETRY_S = 1.0
KILL_S = 2.0
SCRATCH_S = 2.0
"""How long the outcome waits for the ranks' /tmp to be removed; the engine removes what is left."""
SLEEP_GRACE_S = 10.0
"""The grace of a server that is ended so that it sleeps, because nothing waits for it."""
TOGETHER_S = 0.5
"""How far apart a signal to all of a job, such as Slurm's, may reach the supervisor and a rank."""
ASLEEP = Ending(kind=EndKind.STOPPED, message="the server sleeps")
OWN_FAULTS = RANK_FAILED | {EndKind.OUT_OF_MEMORY, EndKind.SETUP_FAILED}
ALL_STOP = frozenset({EndKind.STOPPED, EndKind.TIME_LIMIT})
"""Endings that every node of the attempt has at about the same time, so its ranks can save together."""


class TaskRun:
    """One run of a task. `run` returns when the outcome is on disk and nothing of the task runs any more."""

    def __init__(
        self,
        task: spool.SpoolTask,
        task_spec: TaskSpec,
        credentials: TaskCredentials,
        clock: Clock,
        born_at: float,
        prepared: PreparedTask | None = None,
        agent_watch: NodeAgentWatch | None = None,
    ) -> None:
        """`prepared`: by a standby, for this task. `agent_watch`: set if a node agent forked us."""
        self._agent_watch = agent_watch
        self._prepared = prepared
        self._task = task
        self._task_spec = task_spec
        self._identity, self._grace_s = task_spec.identity, task_spec.resources.grace_s
        self._credentials = credentials
        self._clock = clock
        self._path = os.environ.get("SHOAL_PATH") or DEFAULT_PATH
        wake, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._renewer: LeaseRenewer | None = None
        ranks, resources = task_spec.ranks, task_spec.resources
        self._meter = prepared.meter if prepared is not None else Meter(ranks, resources, clock)
        if task_spec.lease.control_url is not None:
            # Without credentials no reply counts, and the fence ends the task. A supervisor that may be
            # replaced must never keep running only because a credential was forgotten.
            server_file = os.environ.get("SHOAL_SERVER_FILE")
            self._renewer = LeaseRenewer(
                task_spec, credentials, server_file, clock, self._wake_w, born_at, self._meter
            )
        self._stop_reasons = StopReasons(task, task_spec, clock, self._renewer, agent_watch)
        self._log = LogFile(task.log, task_spec.resources.max_log_bytes, clock)
        device_rules = DEVICE_FAULTS if task_spec.resources.has_real_gpus else ()
        self._rules = LogRules((*task_spec.program.log_rules, *device_rules))
        self._watcher = Watcher(self._log, self._rules, wake, clock)
        self._confinement: Confinement | None = None
        self._cache: str | None = None
        self._world_check: WorldCheck | None = None
        self._running: list[Process] = []
        self._rank_group: RankGroup | None = None
        self._phase = TaskPhase.PREPARING
        self._started_at: float | None = None
        self._folder = WorkFolder(task_spec, task)
        self._restarts = Restarts(task_spec.identity, task_spec.ranks, self._renewer)
        self._network: dict[str, str] = {}
        self._zygote: Process | None = None
        self._standby_monitor: StandbyMonitor | None = None
        self._server = ReplicaServer(task_spec, credentials, task.home, clock, self._watcher, self._renewer)
        saves = task_spec.folders.checkpoint_dir
        self._drill_runner = DrillRunner(task_spec.identity, saves, self._renewer, clock, self._log)
        self._failed: tuple[float, int] | None = (clock.now(), time.monotonic_ns())
        """When the earlier group failed here, or we started, until the recovery of this group is reported."""
        self._blamed: Process | None = None
        """The first process of the newest group that failed, also after that group is cleared away."""
        self._ranks_ended_at = -math.inf
        """When the last ranks were seen to have ended by themselves, well or not, by the monotonic clock."""

    def run(self) -> None:
        """Run the task to its end. Only what cannot be caught keeps it from writing an outcome."""
        self._install_signal_handlers()
        try:
            end = self._run_to_ending()
        except ShoalError as error:
            end = self._stop_reasons.signalled() or Ending(kind=EndKind.SETUP_FAILED, message=error.message)
        except Exception as error:  # noqa: BLE001 - after any error, nothing may keep running without us
            sys.excepthook(*sys.exc_info())  # importing the traceback module would cost every start 2 ms
            end = Ending(kind=EndKind.LOST, message=f"the supervisor failed: {type(error).__name__}: {error}")
        self._reap()
        self._report(self._outcome(self._reconsider(end)))
        if self._confinement is not None:
            self._confinement.cache.trim()

    def _install_signal_handlers(self) -> None:
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, _only_wake)
        signal.signal(signal.SIGTERM, self._stop_reasons.on_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if self._agent_watch is not None:
            self._agent_watch.start()

    def _run_to_ending(self) -> Ending:
        launcher = self._confine()
        end = self._stop_reasons.current() or self._prepare_work_folder(launcher) or self._run_ranks(launcher)
        if end.kind is not EndKind.SUCCEEDED:
            self._stop(end)
        elif self._rank_group is not None:
            left = describe_left_running(self._rank_group.leftover_pids, self._clock, self._watcher.poll)
            if left is not None:
                self._log.add_message(left)
                end = self._judge_leftovers(end, self._rank_group.rendezvous_round)
        return end

    def _judge_leftovers(self, end: Ending, rendezvous_round: int) -> Ending:
        """Return the ending of ranks that ended well and left something running."""
        unfinished = (
            self._world_check.unfinished_launcher(rendezvous_round, self._watcher.poll)
            if self._world_check is not None
            else None
        )
        if unfinished is None:
            return end
        self._stop(unfinished)
        return unfinished

    def _confine(self) -> Launcher:
        if self._prepared is not None:
            self._confinement = self._prepared.confinement
            self._path, self._cache = self._confinement.path, self._confinement.cache.directory
            self._prepared.settle(self._task_spec)
            return self._prepared.launcher
        confinement = self._confinement = Confinement(self._task_spec, self._task, self._path)
        self._path, self._cache = confinement.path, confinement.cache.directory
        make_directories(self._task, confinement.uid)
        listeners.make_socket_folder(self._task_spec, os.path.realpath(self._task.home), confinement.uid)
        confinement.prepare()
        return Launcher(confinement, self._task.work)

    def _prepare_work_folder(self, launcher: Launcher) -> Ending | None:
        if self._prepared is not None:
            return None
        setup = setup_environment(
            self._task_spec,
            work=self._task.work,
            path=self._path,
            credentials=self._credentials,
            cache=self._cache,
        )
        preparation = TaskPreparation(
            self._task_spec,
            self._task,
            launcher,
            lambda step, child: self._run_before_ranks(launcher, step, child),
        )
        return preparation.unpack() or preparation.link_checkpoint() or preparation.set_up(setup)

    def _run_before_ranks(
        self, launcher: Launcher, step: str, started: tuple[int, Pipes], *, is_quick: bool = False
    ) -> Ending | None:
        """Wait for a process that comes before the ranks. None: it went well.

        `is_quick`: the ranks start within milliseconds, so no renewal is sent for this.
        """
        process = Process(started[0], None)
        self._watcher.add(process, started[1])
        self._running = [process]
        if not is_quick:
            self._report_phase(TaskPhase.PREPARING)
        end = self._wait_for_ending(launcher, step)
        return None if end.kind is EndKind.SUCCEEDED else end

    def _warm_up(self, launcher: Launcher, rank_group: RankGroup) -> Ending | None:
        """Prepare a zygote if the ranks may be started again, so that later starts cost no imports."""
        task_spec = self._task_spec
        if self._prepared is not None:
            self._adopt_zygote(self._prepared.zygote)
            return None
        can_sleep = task_spec.program.probe is not None and task_spec.program.probe.can_sleep
        may_begin_again = task_spec.ranks.max_restarts > 0 or can_sleep
        is_warm = may_begin_again and install.is_python(task_spec.program.run)
        zygote = self._environment(None, self._restarts.rendezvous) if is_warm else None
        arguments = (self._task.stand_ins, path_without_stand_ins(task_spec.program.env, self._path), zygote)
        module, step = "shoal.runtime.warm.install", "preparing the stand-ins for launchers"
        installing = launcher.start_function(module, "install", arguments, inherited_fds=())
        end = self._run_before_ranks(launcher, step, installing, is_quick=True)
        if end is not None or zygote is None:
            return end
        script = install.zygote_script(self._task.stand_ins, self._task.work, task_spec.program.run)
        self._adopt_zygote(launcher.start_script(script, zygote, inherited_fds=rank_group.inherited_fds))
        return None

    def _adopt_zygote(self, started: tuple[int, Pipes]) -> None:
        """Have this zygote fork the ranks."""
        self._zygote = Process(started[0], None, is_needed=False)
        self._watcher.add(self._zygote, started[1])
        self._watcher.hold_output(self._zygote)  # modules imported while the ranks train may print

    def _run_ranks(self, launcher: Launcher) -> Ending:
        """Run one rank group after another, until one ends well or none may follow."""
        if len(self._task_spec.ranks.nodes) > 1:
            master_addr, has_gpus = self._task_spec.ranks.master_addr, self._task_spec.resources.has_real_gpus
            self._network = network.network_variables(master_addr, has_gpus=has_gpus)
        assert self._confinement is not None
        self._confinement.leave_network()
        rank_group = self._rank_group = RankGroup(
            self._task_spec,
            self._confinement,
            launcher,
            self._watcher,
            self._clock,
            self._environment,
            self._meter,
            self._prepared.board if self._prepared is not None else None,
        )
        self._standby_monitor = StandbyMonitor(
            self._task_spec, self._credentials, self._task, self._confinement, self._clock, self._log
        )
        last = self._server.open(launcher, self._confinement) or self._warm_up(launcher, rank_group)
        world_check = self._world_check = WorldCheck(
            self._task_spec, self._task.stand_ins, self._confinement, self._clock, self._log
        )
        if last is None and self._identity.replacement > 0 and self._renewer is not None:
            self._report_phase(TaskPhase.PREPARING)
            last = self._wait_for_next_group(OTHERS_FAILED, None)
        self._folder.mark_start()
        while last is None:
            began_at = self._clock.monotonic()
            self._start_ranks(rank_group)
            end = world_check.judge(
                self._wait_for_ending(launcher, "a rank", rank_group), rank_group.rendezvous_round
            )
            if end is ASLEEP:
                last = self._sleep(rank_group)
                continue
            ran_s = math.inf if self._drill_runner.take_harmed() else self._clock.monotonic() - began_at
            may_follow = self._restarts.may_follow(end, ran_s, has_stepped=rank_group.has_stepped)
            # A log rule decides about this node, or about another attempt, and must not be passed over.
            if self._rules.hits:
                return self._restarts.excluded(end)
            if not may_follow:
                return end
            self._failed = (self._clock.now(), time.monotonic_ns())
            if end is OTHERS_FAILED and self._restarts.is_after_hang:
                rank_group.hang_detector.log_remote_hang()
            self._log.add_message(f"{end.message}; asking whether all ranks may start again in place")
            failure = None if end is OTHERS_FAILED else self._outcome_of(end)
            last = self._wait_for_next_group(end, failure) if rank_group.clear() else end
        return last

    def _sleep(self, rank_group: RankGroup) -> Ending | None:
        """End the server, which is idle, and keep all else. None: it may be started again."""
        for process in rank_group.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        until = self._clock.monotonic() + min(self._grace_s, SLEEP_GRACE_S)
        while any(process.status is None for process in rank_group.ranks) and self._clock.monotonic() < until:
            self._watcher.poll(STOPPING_TURN_S)
        if not rank_group.clear():
            return Ending(kind=EndKind.LOST, message="the server could not be ended so that it sleeps")
        self._server.set_ended(is_ended=True)
        reason = None
        while self._server.should_end and reason is None:
            reason = self._stop_reasons.current()
            self._watcher.poll(self._stop_reasons.next_in(TURN_S))
        self._server.set_ended(is_ended=False)
        return reason

    def _report_recovery(self, rank_group: RankGroup) -> None:
        if self._failed is None:
            return
        recovery = rank_group.recovery(*self._failed)
        if recovery is not None:
            self._failed = None
            if recovery.rendezvous_round == 0 and (self._identity.epoch == 1 or recovery.stepped_s is None):
                return  # there was no failure before, or only the start could be reported, which is known
            self._log.add_message(describe_recovery(recovery))
            if self._renewer is not None:
                self._renewer.report_recovery(recovery)

    def _wait_for_next_group(self, end: Ending, failure: TaskOutcome | None) -> Ending | None:
        """Wait for the next group. None: it may start. Otherwise why there is none."""
        self._release_standby()
        self._restarts.begin(failure)
        while self._restarts.next(failure) is None:
            reason = self._stop_reasons.current()
            if reason is not None:
                return reason
            if self._restarts.is_refused:
                return end
            self._watcher.poll(self._stop_reasons.next_in(TURN_S))
        self._log.add_message(f"group {self._restarts.rendezvous.number} of the ranks begins")
        return None

    def _start_ranks(self, rank_group: RankGroup) -> None:
        if self._confinement is not None:
            self._confinement.begin_ranks()
            self._confinement.cache.remove_stale_locks()
        self._blamed = None
        rank_group.form(self._restarts.rendezvous)
        if self._confinement is not None and self._renewer is not None:
            self._meter.start(self._confinement)
        self._running = rank_group.ranks
        self._started_at = self._started_at or self._clock.now()
        pids = tuple(process.pid for process in self._running)
        cgroups = self._confinement.cgroups if self._confinement is not None else ()
        self._report_phase(TaskPhase.RUNNING)
        self._server.start()
        with contextlib.suppress(OSError):  # a full disk is no reason to end running ranks
            spool.write_started(
                self._task, spool.RanksStarted(at=self._started_at, pids=pids, cgroups=cgroups)
            )

    def _environment(self, local_rank: int | None, rendezvous: RendezvousRound) -> dict[str, str]:
        return rank_environment(
            self._task_spec,
            local_rank,
            rendezvous,
            work=self._task.work,
            path=self._path,
            credentials=self._credentials,
            network=self._network,
            service=self._server.variables,
            cache=self._cache,
            stand_ins=self._task.stand_ins,
        )

    def _wait_for_ending(self, launcher: Launcher, step: str, rank_group: RankGroup | None = None) -> Ending:
        """Wait until every running process ended well, one failed, or there is a reason to stop."""
        while True:
            if rank_group is not None:
                self._drill_runner.check(rank_group, self._confinement, launcher, self._watcher)
            failed = self._watcher.first_failed
            hung = rank_group.hang_detector.hang if rank_group is not None else None
            if failed is not None and failed.status is not None:
                self._blamed = failed
                self._ranks_ended_at = self._clock.monotonic()
                end = self._ending_of(failed, failed.status, launcher.start_failure(), step)
                end = end if hung is None or hung.rank is None else endings.of_hang(end, hung)
                return self._stop_reason_behind(end) or end
            if all(process.status == 0 for process in self._running):
                self._ranks_ended_at = self._clock.monotonic()
                return endings.SUCCEEDED
            reason = self._stop_reasons.current() or self._server.failure
            if reason is not None:
                return reason
            if rank_group is not None and self._restarts.is_wanted:
                return OTHERS_FAILED
            if hung is not None and hung.rank is None:
                return endings.of_hang_elsewhere(hung, self._grace_s)
            if rank_group is not None and rank_group.unkillable_hang is not None:
                return endings.of_endless_hang(rank_group.unkillable_hang, self._grace_s)
            if rank_group is not None and self._server.should_end:
                return ASLEEP
            self._server.check_sidecar()
            if rank_group is not None and self._world_check is not None:
                split = self._world_check.check(rank_group.rendezvous_round)
                if split is not None:
                    return split
                rank_group.check()
                self._check_standby(rank_group)
                self._report_recovery(rank_group)
                if self._renewer is not None:
                    self._renewer.progress = rank_group.progress()
                    self._renewer.report_signs(rank_group.signs())
                    self._renewer.world = self._world_check.world
            self._watcher.poll(
                self._stop_reasons.next_in(TURN_S if rank_group is None else rank_group.poll_interval_s)
            )

    def _stop_reason_behind(self, end: Ending) -> Ending | None:
        """Return the stop that explains this ending, if there is one.

        A signal to all of a job reaches us and the ranks in any order, so wait for one that a rank may have
        died of. Out of memory explains more than a signal, and so does a `setup` that failed by itself.
        """
        died_of_it = endings.is_by_signal(end, signal.SIGTERM)
        if end.kind is EndKind.OUT_OF_MEMORY or (end.kind is EndKind.SETUP_FAILED and not died_of_it):
            return None
        if not died_of_it:
            return self._stop_reasons.signalled()
        until = self._clock.monotonic() + TOGETHER_S
        while (reason := self._stop_reasons.current()) is None and (now := self._clock.monotonic()) < until:
            self._watcher.poll(until - now)
        return reason

    def _check_standby(self, rank_group: RankGroup) -> None:
        if self._standby_monitor is not None and self._zygote is not None:
            self._standby_monitor.poll(is_time=self._zygote.status is None and rank_group.has_settled)

    def _release_standby(self) -> None:
        """Take the standby's memory: ranks that save may need it, and until they train again nothing
        checks.
        """
        if self._standby_monitor is not None:
            self._standby_monitor.yield_memory()

    def _ending_of(self, process: Process, status: int, failure: str | None, step: str) -> Ending:
        if failure is not None:
            return Ending(kind=EndKind.SETUP_FAILED, message=f"{step} failed: {failure}")
        self._watcher.drain_process(process)
        last_words = process.output_tail
        if process.rank is None:
            return endings.of_setup(step, status, last_words)
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        is_oom = self._confinement is not None and self._confinement.has_run_out_of_memory(
            was_killed=was_killed
        )
        end = endings.of_rank(
            process.rank,
            status,
            is_out_of_memory=is_oom,
            grace_s=self._grace_s,
            output_tail=last_words,
            is_alone=self._task_spec.ranks.world_size == 1,
        )
        return endings.of_device(end, last_words)

    def _stop(self, end: Ending) -> None:
        """Send SIGTERM to all that runs, then wait for at most the grace. `_reap` kills the rest."""
        self._release_standby()
        self._report_phase(TaskPhase.STOPPING)
        if self._rank_group is not None:
            self._rank_group.set_stop_request(StopRequest.SAVE if end.kind in ALL_STOP else StopRequest.EXIT)
        groups = [process.pid for process in self._running if process.status is None]
        if self._rank_group is not None and end.kind in ALL_STOP:
            groups += self._rank_group.groups_without_shell()
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM if end.grace_s > 0 else signal.SIGKILL)
                os.killpg(group, signal.SIGCONT)  # a stopped process, as by a drill, handles no signal
        if self._rank_group is not None:
            self._rank_group.send(signal.SIGCONT)  # also its workers, which may be in sessions of their own
        deadline = self._clock.monotonic() + end.grace_s
        while any(_is_alive(group) for group in groups):
            hurry = self._stop_reasons.current()
            now = self._clock.monotonic()
            if hurry is not None:
                deadline = min(deadline, now + hurry.grace_s)
            if now >= deadline:
                return
            self._watcher.poll(min(STOPPING_TURN_S, deadline - now))

    def _reap(self) -> None:
        """Kill the whole tree, read its last lines, remove what it used. Returns when nothing runs."""
        confinement = self._confinement
        while confinement is not None and not confinement.kill(reap=self._watcher.reap, timeout_s=KILL_S):
            self._watcher.poll(RETRY_S)
            self._stop_reasons.current()  # notices the death of a node agent, however long this takes
        if self._standby_monitor is not None:
            self._standby_monitor.stop()
        self._server.release()
        self._watcher.drain()
        self._meter.receive()
        checkpoint_storage.remove_memory_folder(self._task_spec.identity, self._task_spec.isolation.uid)
        listeners.remove_socket_folder(self._task_spec, os.path.realpath(self._task.home))
        removal.remove(self._task.scratch, timeout_s=SCRATCH_S)
        removal.remove(self._task.stand_ins, timeout_s=SCRATCH_S)

    def _reconsider(self, end: Ending) -> Ending:
        """Return the ending, or the stop that explains it.

        A program that saves and ends well when told to has not done its work. A signal to all of a job may
        reach us a little later than the ranks. If it comes while leftovers die, the ranks had already ended.
        Only a failure waits for such a signal; a success and a restart in place do not.
        """
        if end.kind is not EndKind.SUCCEEDED and end.kind not in RANK_FAILED:
            return end
        while (signalled := self._signalled_together()) is None and end.kind in RANK_FAILED:
            left_s = self._ranks_ended_at + TOGETHER_S - self._clock.monotonic()
            if left_s <= 0:
                break
            self._watcher.poll(left_s)
        return signalled or end

    def _signalled_together(self) -> Ending | None:
        """Return the stop by a signal that may have reached the last ranks as well."""
        over_s = self._clock.monotonic() - self._ranks_ended_at
        return self._stop_reasons.signalled(over_s - TOGETHER_S)

    def _outcome(self, end: Ending) -> TaskOutcome:
        outcome = self._outcome_of(end)
        outcome = msgspec.structs.replace(outcome, written_files=self._folder.lost_files())
        if self._confinement is not None:
            self._confinement.remove()
        return outcome

    def _outcome_of(self, end: Ending) -> TaskOutcome:
        failed = self._watcher.first_failed or self._blamed
        is_own_fault = end.kind in OWN_FAULTS
        output = failed.output_tail if failed is not None and is_own_fault else ""
        return TaskOutcome(
            attempt_id=self._identity.attempt_id,
            epoch=self._identity.epoch,
            node=self._identity.node,
            kind=end.kind,
            ended_at=self._clock.now(),
            failed_at=failed.ended_at if failed is not None and is_own_fault else None,
            exit_code=end.exit_code,
            signal=end.signal,
            rank=end.rank,
            message=endings.outcome_message(self._folder.explain_missing(end.message, output), output),
            is_hang=end.is_hang,
            rules_hit=tuple(self._rules.hits),
            started_at=self._started_at,
            cpu_s=self._confinement.cpu_seconds() if self._confinement is not None else None,
            restarts=self._restarts.rendezvous.number,
            replacement=self._identity.replacement,
            is_external_stop=end.is_external_stop,
            gives_up=self._restarts.gives_up,
            num_early=self._restarts.num_early,
            world=self._world_check.world if self._world_check is not None else None,
        )

    def _report(self, outcome: TaskOutcome) -> None:
        """Write the outcome to disk, then send it. A full disk delays the file, but not the message."""
        if self._renewer is not None:
            self._renewer.report_phase(TaskPhase.ENDED, self._started_at, outcome)
        while (
            not (self._log.finish() and self._has_written(outcome)) and not self._stop_reasons.has_lost_agent
        ):
            removal.remove(self._task.scratch, timeout_s=RETRY_S)  # it may be what fills the disk
            time.sleep(RETRY_S)
        if self._renewer is not None:
            self._renewer.finish(outcome)

    def _has_written(self, outcome: TaskOutcome) -> bool:
        try:
            spool.write_outcome(self._task, outcome)
        except OSError:
            return False
        return True

    def _report_phase(self, phase: TaskPhase) -> None:
        if self._renewer is not None:
            self._renewer.report_phase(phase, self._started_at)
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
