"""Find the ranks of a node that make no step, log where they stand, and kill those that hold up the others.

The detector knows the ranks by their heartbeats on the rank board, by the work of the task's processes and by
their stacks. It starts and replaces no process. A rank that it kills has failed, which the caller notices as
any other end, and `hang` says why. If no rank here is clearly to blame but there are other nodes, it kills
none: the group is over.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Sequence

import msgspec

from shoal.clock import Clock
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.process import tree
from shoal.runtime.process.watcher import Process, Watcher
from shoal.runtime.rank.board import Heartbeat, RankBoard, RankStatus
from shoal.runtime.supervisor import flight_recorder, hang_snapshot
from shoal.runtime.supervisor.endings import Hang
from shoal.runtime.supervisor.step_pace import BUSY_SHARE, LEAVE_S, RankActivity, StepPace
from shoal.wire import TaskSpec

EARLY = 0.5
"""If there are other nodes, the stacks of idle ranks are taken after this part of the shortest limit. Once
another node has ended the hang, the ranks that waited for it stand elsewhere. The states of processes are
read after this part of the limit for idle ranks at the latest, because a rank that waits for a disk must be
noticed in time.
"""
AGAIN = 2.0
"""The stacks are taken again once the silence is longer by this factor."""
GAP_S = 5.0
"""After a gap of this length between two checks, the machine slept, or it was stopped together with
the ranks.
"""
STATE_CHECK_S = 1.0
"""How often the states of silent processes are read."""


class BoardHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The rank board, and the descriptor by which ranks inherit it."""

    fd: int
    board: RankBoard


class HangDetector:
    """Finds hangs. Main thread only. Call `begin` with each group, and `check` as often as you like."""

    def __init__(
        self,
        task_spec: TaskSpec,
        confinement: Confinement,
        watcher: Watcher,
        clock: Clock,
        board: BoardHandle,
        work: str,
    ) -> None:
        self._task_spec = task_spec
        self._confinement = confinement
        self._watcher = watcher
        self._clock = clock
        self._board = board
        self._work = work
        self._ranks: Sequence[Process] = ()
        self._rendezvous_round, self._began_at = 0, 0.0
        self._pace = StepPace()
        self._checked_at = -math.inf
        self._is_spare_settled = True
        """Whether the spare waits. Before that, its work would be mistaken for work of the ranks."""
        self._snapshot: hang_snapshot.HangSnapshot | None = None
        self._early_snapshot: hang_snapshot.HangSnapshot | None = None
        self._snapshot_after_s = 0.0
        """The length of the silence when the snapshot was taken."""
        self._recorders: set[int] = set()
        """Ranks that the newest snapshot asked for their last NCCL calls."""
        self._stopped_slots: frozenset[int] = frozenset()
        """Slots of ranks that were stopped at the last check of states."""
        self._stopped: frozenset[int] = frozenset()
        """Those of them that were stopped at the check before, too. A debugger may stop a process for
        a moment.
        """
        self._states_checked_at = -math.inf
        self._in_kernel_s = 0.0
        """How long silent processes have waited in the kernel so far: for a disk, which counts as work."""
        self._is_paused = self._is_forewarned = self._is_between = False
        """`_is_between`: at the last check a rank had no step to make."""
        self._began_work_s = 0.0
        self._is_judged_here = self._is_judged_elsewhere = self._has_hung = False
        """Whether the group before this one ended for a hang, found by this node's pace or reported by
        another node, and whether another node reports a hang of this group.
        """
        self._reported_stuck: list[Process] = []
        """Stuck ranks of this group that `stuck_ranks` has returned."""
        self.hang: Hang | None = None
        """Why this group is over, if a hang was found here."""
        self.killed_at = 0.0
        """When a rank of this node was killed for it."""

    @property
    def has_begun(self) -> bool:
        """Whether a step of this group was seen."""
        return self._pace.step >= 0

    def begin(self, ranks: Sequence[Process], rendezvous_round: int) -> None:
        """Watch these ranks from now on. The pace of earlier groups is remembered."""
        self._is_judged_here, self._is_judged_elsewhere = self.hang is not None, self._has_hung
        self._stopped_slots = self._stopped = frozenset()
        self._has_hung, self._reported_stuck, self._is_forewarned, self._is_between = False, [], False, False
        self._ranks, self._rendezvous_round = ranks, rendezvous_round
        self._pace.begin(is_after_hang=self._is_judged_here or self._is_judged_elsewhere)
        self._snapshot = self._early_snapshot = self.hang = None
        self.restart_clock()

    def pause(self) -> None:
        """Stop judging, because the supervisor itself is about to stop the ranks, until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Judge again, and count time from now on. Without a pause before, this changes nothing."""
        if self._is_paused:
            self._is_paused = False
            self._pace.begin()
            self.restart_clock()

    def expect_hang(self) -> None:
        """Expect a drill to stop a rank: that rank does hang, so nothing is learned from its end."""
        self._is_forewarned = True

    def expect_spare(self) -> None:
        """Note that a spare was started, which works until it waits."""
        self._is_spare_settled = False

    def check(self, *, has_spare_settled: bool) -> None:
        """End a hang of ranks that have all joined the group. Blocks for at most two seconds if they are
        silent.

        If it shows which ranks hold up the others, those are killed. If not, every rank is killed on the only
        node of a job. On one of several nodes only the group ends, because another node may know the culprit,
        and a rank that does not leave the group is stuck.
        """
        now, worked_s = self._measure_work()
        if self._is_paused or worked_s is None or self.hang is not None:
            return
        beats = self._heartbeats()
        if self._is_at_its_end(beats):
            self._pace.restart_clock(now, worked_s)
            return
        is_done = any(beat.status is RankStatus.DONE for beat in beats)
        self._record_pace(now, worked_s, beats, is_done=is_done)
        if has_spare_settled and not self._is_spare_settled:
            self._is_spare_settled = True
            self._pace.ignore_work(now, worked_s)
        if not is_done and self._is_early_look_due(now, worked_s):
            self._early_snapshot = self._take_snapshot()
        silent_s = now - self._pace.since
        if silent_s > min(
            self._pace.limit_s(RankActivity.STOPPED), EARLY * self._pace.limit_s(RankActivity.NOTHING)
        ):
            worked_s += self._check_states(now)
        else:
            self._stopped_slots = self._stopped = frozenset()
        doing = self._verdict(now, worked_s)
        if doing is RankActivity.STOPPED or (doing is not None and not is_done):
            self._decide(doing, silent_s, beats)
        self._checked_at = self._clock.monotonic()  # the check may have blocked

    def _record_pace(
        self, now: float, worked_s: float, heartbeats: list[Heartbeat], *, is_done: bool
    ) -> None:
        """Record the pace. Work of a rank without a step to make, for example a validation, is part
        of no step.
        """
        step = min(beat.step for beat in heartbeats)
        if self._is_between and not (is_done and step == self._pace.step):
            self._pace.restart_clock(now, worked_s)
        self._is_between = is_done
        self._pace.record(now, step, worked_s, has_stepped=all(beat.stepped_ns for beat in heartbeats))

    def _measure_work(self) -> tuple[float, float | None]:
        """Return the time, and the work done so far. None: that cannot be read now, so no rank is judged.

        After a gap without checks, the time of every rank counts from now on.
        """
        now, counted_s = self._clock.monotonic(), self._confinement.work_seconds()
        if counted_s is None:
            return now, None
        worked_s = counted_s + self._in_kernel_s
        if now - self._checked_at > GAP_S:
            self._pace.restart_clock(now, worked_s)
            self._began_at, self._began_work_s = now, worked_s
        self._checked_at = now
        return now, worked_s

    def _is_at_its_end(self, heartbeats: list[Heartbeat]) -> bool:
        """Whether a rank here is past its training. What ranks do after that is no step."""
        return any(beat.status is RankStatus.GONE for beat in heartbeats) or any(
            process.status == 0
            and beat.is_in(self._rendezvous_round)  # otherwise it ended earlier and is replaced
            for process, beat in zip(self._ranks, heartbeats, strict=True)
        )

    def _verdict(self, now: float, worked_s: float) -> RankActivity | None:
        """Return what the ranks do if the silence is too long for that."""
        doing = self._pace.verdict(now, worked_s, is_stopped=bool(self._stopped))
        if doing is RankActivity.NOTHING and self._stopped_slots:  # the stopped rank explains the idleness
            is_late = now - self._pace.since > self._pace.limit_s(RankActivity.STOPPED)
            return RankActivity.STOPPED if is_late else None
        return doing

    def _is_early_look_due(self, now: float, worked_s: float) -> bool:
        if len(self._task_spec.ranks.nodes) == 1 or self._is_current(self._early_snapshot):
            return False
        is_early = now - self._pace.since > EARLY * self._pace.limit_s(RankActivity.STOPPED)
        return is_early and self._pace.is_idle(now, worked_s)

    def _check_states(self, now: float) -> float:
        """Find the stopped ranks. Return how long, since the last check, a process waited in the kernel."""
        if now - self._states_checked_at < STATE_CHECK_S and not self._stopped_slots:
            return 0.0
        pids = self._confinement.processes()
        halted = self._find_stopped(pids)
        self._stopped, self._stopped_slots = halted & self._stopped_slots, halted
        inside_s = min(STATE_CHECK_S, now - self._states_checked_at) if tree.is_any_in_kernel(pids) else 0.0
        self._states_checked_at = now
        self._in_kernel_s += inside_s
        return inside_s

    def _decide(self, activity: RankActivity, silent_s: float, heartbeats: list[Heartbeat]) -> None:
        """Take a snapshot, because the silence is too long, and end the hang unless a rank has moved."""
        seen = self._snapshot
        is_stale = activity is RankActivity.STOPPED or silent_s > AGAIN * self._snapshot_after_s
        if seen is None or is_stale or not self._is_current(seen):
            seen = self._snapshot = self._take_snapshot()
            self._snapshot_after_s = silent_s
            if self._have_moved(activity, heartbeats):
                self._snapshot = None
                return
        has_others = len(self._task_spec.ranks.nodes) > 1
        if seen.waits_for_others and (has_others or seen.is_saving):
            # The culprit's own node also sees the hang and ends it. The ranks that wait here may live on.
            if silent_s <= max(
                self._pace.limit_s(RankActivity.WAITING), *(beat.timeout_s for beat in heartbeats)
            ):
                return
            activity = RankActivity.WAITING if activity is RankActivity.NOTHING else activity
        if activity is not RankActivity.STOPPED or not self._is_forewarned:
            self._pace.extend_limit(activity, self._pace.limit_s(activity))
        self._end(seen, silent_s, is_elsewhere=has_others and seen.waits_for_others)

    def _have_moved(self, activity: RankActivity, heartbeats: list[Heartbeat]) -> bool:
        """Whether a rank at the lowest step has given a sign of life since, or no rank is stopped any
        more.
        """
        last, newer = min(beat.step for beat in heartbeats), self._heartbeats()
        if any(was.step == last and was != beat for was, beat in zip(heartbeats, newer, strict=True)):
            return True
        if self._is_at_its_end(newer):
            return True
        return activity is RankActivity.STOPPED and not self._find_stopped(self._confinement.processes())

    def stuck_ranks(self) -> list[Process]:
        """Return ranks that did not come out of an earlier group in time, each of them once.

        A rank that was in that group may be in the middle of a step, whose length the pace tells, unless that
        group hung by our own pace or the rank is stopped. A rank that is done may be saving for the last
        time. A rank that had not joined that group looks for a newer one ten times a second, unless it is
        inside torch, which forms a group without looking up and waits for a lost peer until a timeout.
        """
        now, worked_s = self._measure_work()
        waited_s = now - self._began_at
        if self._is_paused or worked_s is None or waited_s <= LEAVE_S:
            return []
        behind = [
            process for process in self._ranks if self._heartbeat(process).is_behind(self._rendezvous_round)
        ]
        if not behind:
            return []
        worked_s += self._check_states(now)
        is_at_work = worked_s - self._began_work_s > BUSY_SHARE * waited_s
        doing = RankActivity.WORK if is_at_work else RankActivity.NOTHING
        tasks = {
            process: self._unfinished_activity(process, doing)
            for process in behind
            if process not in self._reported_stuck
        }
        stuck = [process for process, task in tasks.items() if waited_s > self._leave_s(task)]
        if stuck:
            self._log_snapshot(self._take_snapshot())
            self._reported_stuck += stuck
            for task in {task for process in stuck if (task := tasks[process]) is not None}:
                self._pace.extend_limit(task, self._leave_s(task))
            self._checked_at = self._clock.monotonic()
        return stuck

    def restart_clock(self) -> None:
        """Give every rank its whole time to join the group from now on, because there is a new one
        among them.
        """
        self._checked_at = -math.inf

    def _unfinished_activity(self, process: Process, activity: RankActivity) -> RankActivity | None:
        """Return what the rank may have to finish before it leaves the earlier group. None: nothing."""
        status = self._heartbeat(process).status
        if process.status is not None or process.slot in self._stopped:
            return None
        if status is RankStatus.DONE:
            return RankActivity.WORK
        return activity if status is RankStatus.JOINED and not self._is_judged_here else None

    def _leave_s(self, activity: RankActivity | None) -> float:
        """Return how long that may take."""
        return (
            LEAVE_S if activity is None else self._pace.leave_s(activity, is_hang=self._is_judged_elsewhere)
        )

    def log_remote_hang(self) -> None:
        """Log where the ranks of this node stood, because another node ends the group for a hang.

        The snapshot is an earlier one. By now the ranks have left the group, and the next group waits for us.
        """
        self._has_hung = True
        seen = next(
            (snapshot for snapshot in (self._snapshot, self._early_snapshot) if self._is_current(snapshot)),
            None,
        )
        if seen is not None:
            self._log_snapshot(seen)

    def _end(self, snapshot: hang_snapshot.HangSnapshot, silent_s: float, *, is_elsewhere: bool) -> None:
        self._log_snapshot(snapshot)
        description = self._pace.describe_silence(silent_s)
        if is_elsewhere:
            self.hang = Hang(description=description)
            return  # a rank that leaves the group did not cause the hang, and keeps its state
        for process in snapshot.culprits:
            process.was_killed = True
            kill_group(process)
        for pid in snapshot.stopped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.hang, self.killed_at = snapshot.hang(description), self._clock.monotonic()

    def _heartbeat(self, process: Process) -> Heartbeat:
        return self._board.board.heartbeat(process.slot)

    def _heartbeats(self) -> list[Heartbeat]:
        return [self._heartbeat(process) for process in self._ranks]

    def _is_current(self, snapshot: hang_snapshot.HangSnapshot | None) -> bool:
        return snapshot is not None and snapshot.step == self._pace.step

    def _take_snapshot(self) -> hang_snapshot.HangSnapshot:
        """Take a snapshot of every rank of the node. Blocks for at most two seconds."""
        numbers = [process.rank for process in self._ranks if process.rank is not None]
        self._recorders = flight_recorder.request_records(self._work, numbers)
        pids, board, path = self._confinement.processes(), self._board, self._confinement.path
        return hang_snapshot.take_snapshot(
            self._ranks, board.board, board.fd, pids, path, has_own_namespace=self._has_own_namespace
        )

    def _find_stopped(self, pids: set[int]) -> frozenset[int]:
        return hang_snapshot.stopped_slots(
            self._ranks, self._board.board, pids, has_own_namespace=self._has_own_namespace
        )

    @property
    def _has_own_namespace(self) -> bool:
        return self._confinement.sandbox is not None

    def _log_snapshot(self, snapshot: hang_snapshot.HangSnapshot) -> None:
        """Log the snapshot. Blocks while ranks on NCCL write their records, for at most a second."""
        for process, stacks in snapshot.stacks:
            self._watcher.log_stacks(process.rank, stacks.text)
        kept = flight_recorder.collect_records(self._work, self._recorders, os.path.dirname(self._work))
        for rank, path in kept.items():
            self._watcher.log_stacks(rank, f"its last NCCL calls: {path} on {self._task_spec.identity.node}")


def kill_group(process: Process) -> None:
    """Kill the process and what it started, unless that left its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
