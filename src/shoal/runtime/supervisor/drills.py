"""Do to this node what a drill asks: kill, stop, cut off or damage. Each command runs once, and always ends.

Every act hits only this task. Its result is sent at once.
"""

from __future__ import annotations

import contextlib
import os
import signal

from shoal.clock import Clock
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.lease.renewal import LeaseRenewer
from shoal.runtime.process.launcher import Launcher
from shoal.runtime.process.log import LogFile
from shoal.runtime.process.watcher import Process, Watcher
from shoal.runtime.supervisor.rank_group import RankGroup
from shoal.wire import DrillAct, DrillCommand, DrillResult, Progress, TaskIdentity

LAST_REPORT_S = 1.0
"""How long a supervisor that is about to die with its node waits for its last report to be delivered."""


class DrillRunner:
    """Runs the drills of one task. Main thread only."""

    def __init__(
        self,
        identity: TaskIdentity,
        checkpoint_dir: str | None,
        renewer: LeaseRenewer | None,
        clock: Clock,
        log: LogFile,
    ) -> None:
        self._identity = identity
        self._checkpoint_dir = checkpoint_dir
        self._renewer = renewer
        self._clock = clock
        self._log = log
        self._done: set[tuple[str, DrillAct]] = set()
        self._continue_at: float | None = None
        self._held_round: int | None = None
        """The rendezvous round whose ranks are stopped for the damage, which is not their fault."""
        self._has_harmed = False
        self._damage: tuple[DrillCommand, Process, float, Progress | None] | None = None

    def check(
        self, rank_group: RankGroup, confinement: Confinement | None, launcher: Launcher, watcher: Watcher
    ) -> None:
        """Do what the newest command asks, and end what has lasted long enough."""
        self._check_damage(rank_group, launcher, watcher)
        self._end_hold(rank_group)
        drill_command = self._renewer.drill_command if self._renewer is not None else None
        if drill_command is None or (drill_command.drill_id, drill_command.act) in self._done:
            return
        group = (
            rank_group.rendezvous_round
            if drill_command.rendezvous_round is None
            else drill_command.rendezvous_round
        )
        if group > rank_group.rendezvous_round:
            return  # the ranks of that round are not started here so far
        self._done.add((drill_command.drill_id, drill_command.act))
        if group < rank_group.rendezvous_round:
            self._refuse_late(drill_command, rank_group)
            return
        self._log.add_message(f"drill {drill_command.drill_id}: {drill_command.act.replace('_', ' ')}")
        self._act(drill_command, rank_group, confinement, launcher, watcher)

    def take_harmed(self) -> bool:
        """Whether a drill harmed the group that just ended. Then its end says nothing about its program."""
        has_harmed, self._has_harmed = self._has_harmed, False
        return has_harmed

    def _act(
        self,
        drill_command: DrillCommand,
        rank_group: RankGroup,
        confinement: Confinement | None,
        launcher: Launcher,
        watcher: Watcher,
    ) -> None:
        at, before, refusal = self._clock.now(), rank_group.progress(), ""
        match drill_command.act:
            case DrillAct.KILL_RANK | DrillAct.KILL_RANKS:
                refusal = self._no_such_rank(
                    drill_command, has_hit=rank_group.send(signal.SIGKILL, drill_command.rank)
                )
            case DrillAct.HANG_RANK if before is None:
                refusal = (
                    "the program reports no steps, as `runtime.train` does, so that a hang could not be "
                    "noticed; nothing was done to it"
                )
            case DrillAct.HANG_RANK:
                refusal = self._no_such_rank(
                    drill_command, has_hit=rank_group.send(signal.SIGSTOP, drill_command.rank)
                )
                self._continue_at = self._clock.monotonic() + drill_command.for_s
                rank_group.hang_detector.expect_hang()
            case DrillAct.CUT_OFF if self._renewer is not None:
                self._renewer.go_silent(drill_command.for_s)
            case DrillAct.KILL_NODE if confinement is not None:
                self._die_with_node(confinement, _drill_result(drill_command, at, before))
            case DrillAct.KILL_NODE:
                refusal = f"it cannot be told what runs on {self._identity.node}: nothing confines it"
            case DrillAct.CORRUPT:
                refusal = self._begin_damage(drill_command, at, before, rank_group, launcher, watcher)
        self._has_harmed = not refusal and drill_command.act is not DrillAct.CUT_OFF
        if refusal or drill_command.act is not DrillAct.CORRUPT:
            self._report(_drill_result(drill_command, at, before, refusal=refusal))

    def _refuse_late(self, drill_command: DrillCommand, rank_group: RankGroup) -> None:
        """Refuse: the ranks that it was meant for are gone, and those of a later round must not be harmed."""
        ended = f"group {drill_command.rendezvous_round} had ended before {self._identity.node} heard of it"
        refusal = f"{ended}; group {rank_group.rendezvous_round} runs now"
        self._log.add_message(
            f"drill {drill_command.drill_id}: {drill_command.act.replace('_', ' ')} was not done: {refusal}"
        )
        # A drill that damages started with the damage itself, so a late second command undoes none of it.
        if drill_command.act is not DrillAct.KILL_RANKS:
            self._report(_drill_result(drill_command, self._clock.now(), None, refusal=refusal))

    def _no_such_rank(self, drill_command: DrillCommand, *, has_hit: bool) -> str:
        """Say that the rank does not run here. Empty if the drill kills all ranks: then none is missing."""
        is_missed = not has_hit and drill_command.rank is not None
        return f"rank {drill_command.rank} does not run on {self._identity.node}" if is_missed else ""

    def _report(self, drill_result: DrillResult, wait_s: float = 0.0) -> None:
        if self._renewer is not None:
            self._renewer.report_drill(drill_result, wait_s)

    def _die_with_node(self, confinement: Confinement, drill_result: DrillResult) -> None:
        """Die with everything that runs here, and write nothing, as a machine that is lost writes nothing."""
        for pid in confinement.processes() - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._report(drill_result, LAST_REPORT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def _end_hold(self, rank_group: RankGroup) -> None:
        """Continue stopped ranks that were not killed.

        They continue after their time, or as soon as the damage is done if they belong to a later round by
        then. Ranks of a later round are not killed, so nothing else would end their stop.
        """
        is_over = self._continue_at is not None and self._clock.monotonic() > self._continue_at
        is_late = self._damage is None and self._held_round not in (None, rank_group.rendezvous_round)
        if is_over or is_late:
            self._resume_ranks(rank_group)

    def _resume_ranks(self, rank_group: RankGroup) -> None:
        self._continue_at = self._held_round = None
        rank_group.send(signal.SIGCONT)
        rank_group.hang_detector.resume()

    def _begin_damage(
        self,
        drill_command: DrillCommand,
        at: float,
        before: Progress | None,
        rank_group: RankGroup,
        launcher: Launcher,
        watcher: Watcher,
    ) -> str:
        """Change bytes in a process of the job's own user, which can damage only what that user may write."""
        if self._checkpoint_dir is None:
            return "the job has no checkpoint directory"
        rank_group.hang_detector.pause()
        rank_group.send(signal.SIGSTOP)
        self._held_round, self._continue_at = (
            rank_group.rendezvous_round,
            self._clock.monotonic() + drill_command.for_s,
        )
        arguments = (self._checkpoint_dir, (self._identity.attempt_id, self._identity.node))
        pid, pipes = launcher.start_function(
            "shoal.runtime.supervisor.checkpoint_damage", "damage", arguments, inherited_fds=()
        )
        process = Process(pid, None, is_needed=False)
        watcher.add(process, pipes)
        self._damage = (drill_command, process, at, before)
        return ""

    def _check_damage(self, rank_group: RankGroup, launcher: Launcher, watcher: Watcher) -> None:
        if self._damage is None:
            return
        drill_command, process, at, before = self._damage
        if process.status is None or not watcher.has_closed_output(process):
            return
        self._damage = None
        output = process.output_tail
        refusal = (
            "" if process.status == 0 else output or launcher.start_failure() or "it could not be damaged"
        )
        if refusal:
            self._has_harmed = False
            self._resume_ranks(rank_group)
        self._report(_drill_result(drill_command, at, before, refusal=refusal, detail=output))


def _drill_result(
    drill_command: DrillCommand, at: float, before: Progress | None, *, refusal: str = "", detail: str = ""
) -> DrillResult:
    return DrillResult(
        drill_id=drill_command.drill_id,
        act=drill_command.act,
        at=at,
        step=before.step if before is not None else None,
        step_s=before.step_s if before is not None else None,
        refusal=refusal,
        detail=detail,
    )
