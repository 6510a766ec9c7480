"""The ranks of one node: start them, and replace a lost one alone if the others can go on, otherwise all.

Ranks that send heartbeats on the rank board outlive the loss of a peer. The board tells them the next group,
and they join it in place. For such programs one more process, the spare, waits on each node, as far along as
it can get without being a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from shoal.clock import Clock
from shoal.runtime import metrics
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.process import tree
from shoal.runtime.process.launcher import Launcher
from shoal.runtime.process.meter import Meter
from shoal.runtime.process.watcher import Process, Watcher
from shoal.runtime.rank.board import BOARD_VARIABLE, RankAssignment, RankBoard, RankStatus, StopRequest
from shoal.runtime.supervisor import hang_snapshot
from shoal.runtime.supervisor.endings import BY_SIGNAL, Hang, describe
from shoal.runtime.supervisor.environment import RendezvousRound
from shoal.runtime.supervisor.hang_detector import BoardHandle, HangDetector, kill_group
from shoal.wire import ActivitySigns, Progress, Recovery, TaskSpec

TURN_S, LOOK_S = 0.03, 0.25
SPARE_SHARE = 1.5
"""How much free memory a spare needs, in units of one rank's memory."""
SPARE_AGAIN_S = 60.0
"""The pause before the next attempt to start a spare."""
SILENT_S = 60.0
"""A program that has sent nothing by then does not use `shoal.runtime`."""
SOON_S, SETTLED_S = 2.0, 10.0
"""How long after its start a group is settled: one that makes steps, and one that reports none."""
GONE_S = 5.0
"""How long killed processes may take to be gone."""
HUNG_GONE_S = 60.0
"""The same for a rank that hung. Large memory and a GPU kernel that does not end take most of this time."""
WORKED_S = 0.05
"""CPU time of all processes of the task which shows that the ranks of a group run."""
HELD_S = 1.0
"""How long stopped processes may take to stand still."""
NUM_SEEN = 40
"""Number of looks, about ten seconds: the first steps of a group are slower than later ones."""

Environments = Callable[[int | None, RendezvousRound], dict[str, str]]
"""Returns the environment of a local rank, or for None that of a spare."""


class RankGroup:
    """The ranks of the current group, in rank order in `ranks`. Main thread only."""

    def __init__(
        self,
        task_spec: TaskSpec,
        confinement: Confinement,
        launcher: Launcher,
        watcher: Watcher,
        clock: Clock,
        environments: Environments,
        meter: Meter,
        board: tuple[int, RankBoard] | None = None,
    ) -> None:
        """`board`: a board that a running zygote has inherited already."""
        self._task_spec = task_spec
        self._confinement = confinement
        self._launcher = launcher
        self._watcher = watcher
        self._clock = clock
        self._environments = environments
        self._meter = meter
        self._board_fd, self._board = board if board is not None else RankBoard.create()
        self._rendezvous = RendezvousRound()
        self._formed_at, self._formed_ns = 0.0, 0
        self._signs = ActivitySigns(rendezvous_round=0, started_at=0.0)
        self._worked_before_s: float | None = None
        self._spare: Process | None = None
        self._spare_not_before = 0.0
        self._survivors: list[Process] = []
        self._last_step = self._spares = self._steps_logged = 0
        self._seen: deque[tuple[int, int]] = deque(maxlen=NUM_SEEN)
        """Steps and when they were complete, at the last looks."""
        self.hang_detector = HangDetector(
            task_spec,
            confinement,
            watcher,
            clock,
            BoardHandle(fd=self._board_fd, board=self._board),
            launcher.work,
        )
        self.ranks: list[Process] = []

    @property
    def inherited_fds(self) -> tuple[int, ...]:
        """Descriptors that ranks, and processes that start ranks, inherit."""
        return (self._board_fd, self._meter.fd)

    @property
    def rendezvous_round(self) -> int:
        """The rendezvous round of the ranks."""
        return self._rendezvous.number

    def form(self, rendezvous: RendezvousRound) -> None:
        """Put every rank of this node into this group. Survivors learn of it, the others are started."""
        newest = max((self._board.heartbeat(p.slot).step for p in self.ranks), default=0)
        # Steps of a rank that was lost while a group formed are lost with it, so they still count as lost.
        self._last_step = newest if self._has_reported_step else max(self._last_step, newest)
        self._survivors, self._rendezvous = self.ranks, rendezvous
        self._formed_at, self._formed_ns = self._clock.monotonic(), time.monotonic_ns()
        self._signs = ActivitySigns(rendezvous_round=rendezvous.number, started_at=self._clock.now())
        self._worked_before_s = self._confinement.cpu_seconds()
        self._steps_logged = self._meter.steps_logged
        self._seen.clear()
        self.ranks, self._spares = [], 0
        for local_rank in range(self._task_spec.ranks.ranks_per_node):
            old = self._survivors[local_rank] if self._survivors else None
            if old is not None and old.status is None:
                self._assign(old, local_rank)
            else:
                old = self._fill(local_rank)
            self.ranks.append(old)
        self.hang_detector.begin(self.ranks, rendezvous.number)

    def _fill(self, local_rank: int) -> Process:
        """Return the spare or a new process for a place without a rank."""
        process = self._take_spare()
        if process is None:
            process = self._start(local_rank, self._assignment(local_rank))
        else:
            self._spares += 1
        self._assign(process, local_rank)
        return process

    def _assign(self, process: Process, local_rank: int) -> None:
        place = self._assignment(local_rank)
        process.rank, process.is_needed, process.held_lines = place.rank, True, None
        process.first_output_at = None
        self._board.assign(process.slot, place)

    def recovery(self, failed_at: float, failed_ns: int) -> Recovery | None:
        """Return how this node joined the group, once it has made a step or is known to report none."""
        beats = [self._board.heartbeat(process.slot) for process in self.ranks]
        formed = Recovery(
            rendezvous_round=self._rendezvous.number,
            node=self._task_spec.identity.node,
            failed_at=failed_at,
            surviving_ranks=sum(process in self._survivors for process in self.ranks),
            spare_ranks=self._spares,
            formed_s=(self._formed_ns - failed_ns) / 1e9,
        )
        if all(self._has_joined(process) for process in self.ranks):
            if not all(beat.stepped_ns for beat in beats):
                return None
            first_step = min(beat.first_step for beat in beats)
            return msgspec.structs.replace(
                formed,
                joined_s=(max(beat.joined_ns for beat in beats) - failed_ns) / 1e9,
                stepped_s=(max(beat.stepped_ns for beat in beats) - failed_ns) / 1e9,
                steps_lost=max(0, self._last_step - first_step + 1) if self._survivors else None,
                first_step=first_step,
            )
        is_late = self._clock.monotonic() > self._formed_at + SILENT_S
        return formed if is_late else None

    @property
    def has_stepped(self) -> bool:
        """Whether a rank of this group reported a step in it, or logged a value for one."""
        return self._has_reported_step or self._meter.steps_logged > self._steps_logged

    @property
    def has_settled(self) -> bool:
        """Whether the group is past its start, as far as can be told."""
        formed_s = self._clock.monotonic() - self._formed_at
        return formed_s > SETTLED_S or (formed_s > SOON_S and self._have_all_stepped())

    def progress(self) -> Progress | None:
        """Return the progress. None: not every rank has made a step in this group, or they report none."""
        beats = [self._board.heartbeat(process.slot) for process in self.ranks]
        last = min(beats, key=lambda beat: beat.step, default=None)
        if last is None or not self._have_all_stepped():
            return None
        self._seen.append((last.step, last.at_ns))
        first_step, first_ns = self._seen[0]
        steps = last.step - first_step
        return Progress(
            rendezvous_round=self._rendezvous.number,
            step=last.step,
            at=self._clock.now() - (time.monotonic_ns() - last.at_ns) / 1e9,
            step_s=(last.at_ns - first_ns) / steps / 1e9 if steps > 0 else None,
        )

    def signs(self) -> ActivitySigns:
        """Return the group's signs of activity. Reads one counter until the group has used a CPU."""
        signs = self._signs
        if signs.worked_at is None and self._worked_before_s is not None:
            worked_s = self._confinement.cpu_seconds()
            if worked_s is not None and worked_s - self._worked_before_s > WORKED_S:
                signs = msgspec.structs.replace(signs, worked_at=self._clock.now())
        if signs.printed_at is None:
            first_outputs = [
                process.first_output_at for process in self.ranks if process.first_output_at is not None
            ]
            signs = msgspec.structs.replace(signs, printed_at=min(first_outputs, default=None))
        self._signs = signs
        return signs

    def send(self, number: signal.Signals, rank: int | None = None) -> bool:
        """Send a signal to the rank, or to every rank of the node. False: none of them runs here."""
        chosen = [p for p in self.ranks if p.status is None and rank in (None, p.rank)]
        for process in chosen:
            process.was_killed = process.was_killed or number == signal.SIGKILL
            self._signal(process, number)
        return bool(chosen)

    def _signal(self, process: Process, number: signal.Signals) -> set[int]:
        """Send a signal to all processes of the rank, and return their pids."""
        pids = self._pids_of(process, self._confinement.processes())
        _send(pids, number)
        return pids

    def _pids_of(self, process: Process, pids: set[int]) -> set[int]:
        """Return those of `pids` that belong to the rank."""
        # A forked rank has a session of its own. The pipes that it writes to, or its heartbeat, identify it.
        writers = tree.writing_to(pids, self._watcher.pipe_inodes(process))
        if process.status is None:
            writers.add(process.pid)
        if process.status != 0:  # a rank that ended well left nothing, and its pid may be in use again
            inner, is_inside = self._board.heartbeat(process.slot).pid, self._confinement.sandbox is not None
            writers.update(hang_snapshot.host_pids([inner], pids, has_own_namespace=is_inside).values())
        return writers

    def clear(self) -> bool:
        """End the group. Kill ranks that left it for good, and all ranks if a living one cannot join another.

        False: something of the group may still live, so no other group may start beside it.
        """
        self._watcher.forget(self.ranks)
        living = [rank for rank in self.ranks if rank.status is None and not rank.was_killed]
        living = [rank for rank in living if self._board.heartbeat(rank.slot).status is not RankStatus.GONE]
        if not all(self._can_rejoin(process) for process in living):
            living = []
        return self._kill([process for process in self.ranks if process not in living])

    def _kill(self, processes: list[Process]) -> bool:
        """Kill the ranks. False: something of them may still live, or that cannot be read."""
        could_look = tree.can_read_proc()
        sessions = tree.session_ids(self._confinement.processes())
        left: dict[int, int] = {}
        for process in processes:
            pids = self._pids_with_sessions(process, sessions)
            left |= tree.start_ticks_of(pids)
            if process.status is None or process.pid in {sessions.get(pid) for pid in pids}:
                kill_group(process)
            _send(pids, signal.SIGKILL)
        until = self._clock.monotonic() + GONE_S
        while not (self._are_over(processes) and _are_gone(left)):
            if self._clock.monotonic() > until:
                return False
            self._watcher.poll(TURN_S)
        return could_look

    def _pids_with_sessions(self, process: Process, sessions: dict[int, int]) -> set[int]:
        """Return the pids of the rank, of its session, and of the session of a rank forked for it.

        A forked rank may write to none of our pipes. Of a dead rank this returns what it left: while that
        lives, no new process gets its pid.
        """
        pids_of_rank = self._pids_of(process, set(sessions))
        began = pids_of_rank if process.pid in sessions else pids_of_rank | {process.pid}
        return pids_of_rank | {pid for pid, session in sessions.items() if session in began}

    def leftover_pids(self) -> set[int]:
        """The living processes of the group's ranks."""
        sessions = tree.session_ids(self._confinement.processes())
        pids_of_ranks = (self._pids_with_sessions(process, sessions) for process in self.ranks)
        return set(tree.start_ticks_of(set().union(*pids_of_ranks)))

    def _are_over(self, processes: list[Process]) -> bool:
        return all(
            process.status is not None and self._watcher.has_closed_output(process) for process in processes
        )

    def _replace(self, held: dict[Process, set[int]]) -> None:
        """Give the places of ranks that never came to this group to others, because the group waits for them.

        Nothing has failed in the group, so no other group has to follow it. A rank that does not die fails
        it.
        """
        if not held:
            return
        for process, pids in held.items():
            why = "has not left the group before in time: it is killed and"
            if process.status is not None:
                why = "ended before it came to this group: it is"
            self._watcher.log_message(f"rank {process.rank} {why} replaced")
            process.is_needed, process.was_killed = False, True
            _send(pids, signal.SIGKILL)  # a stopped process cannot end by itself
        if not self._kill(list(held)):
            self._watcher.blame(
                next((process for process in held if process.status is not None), next(iter(held)))
            )
            return
        for process in held:
            local_rank = self.ranks.index(process)
            self.ranks[local_rank] = self._fill(local_rank)
        self.hang_detector.restart_clock()

    def _stop_if_behind(self, process: Process) -> set[int] | None:
        """Stop all processes of the rank and return their pids. None: it has come to the group, and
        continues.

        Empty if the rank has ended. A rank writes which group it is in before it meets another rank there. So
        a stopped rank that has not written so does not count as present, and never will. Two ranks with one
        number would break the group.
        """
        pids = self._signal(process, signal.SIGSTOP)
        until = self._clock.monotonic() + HELD_S
        while not tree.are_all_stopped(pids) and self._clock.monotonic() < until:
            time.sleep(tree.PATIENCE_S)
        if self._board.heartbeat(process.slot).is_behind(self._rendezvous.number):
            return pids
        _send(pids, signal.SIGCONT)
        return None

    def set_stop_request(self, request: StopRequest) -> None:
        """Set what the next signal to stop means for the ranks, or one that they already got from outside."""
        self._board.set_stop_request(request)

    def groups_without_shell(self) -> list[int]:
        """Return process groups whose leader died of SIGTERM, as a shell does at once, and whose others live.

        A SIGTERM to all processes of a job ends the shell of a program, but must not end its time to save.
        """
        by_it = (-signal.SIGTERM, BY_SIGNAL + signal.SIGTERM)
        ended = [(process.pid, process.status) for process in self.ranks if process.status is not None]
        dead = {pid for pid, status in ended if os.waitstatus_to_exitcode(status) in by_it}
        # While a process is in the session, no new process gets the leader's pid.
        return list(dead & set(tree.session_ids(self._confinement.processes()).values())) if dead else []

    def check(self) -> None:
        """Keep a spare ready if the ranks can use one, and have hanging ranks ended."""
        if self._task_spec.ranks.max_restarts == 0:
            return
        if self._spare is not None and self._spare.status is not None:
            self._discard_spare(self._spare, self._spare.status)
        joined = [self._has_joined(process) for process in self.ranks]
        if self._spare is None and self._is_time_for_spare() and self._has_room_for_spare():
            self._start_spare()
        if self._rendezvous.number > 0:
            self._replace(
                {
                    process: pids
                    for process in self._stuck_ranks()
                    if (pids := self._stop_if_behind(process)) is not None
                }
            )
        if all(joined):
            with contextlib.suppress(OSError):  # as in `_stuck_ranks`
                self.hang_detector.check(has_spare_settled=self._has_settled(self._spare))

    def _start_spare(self) -> None:
        """Start a spare. If there is no process or descriptor for it, try again later: the ranks are well."""
        if self._clock.monotonic() < self._spare_not_before:
            return
        try:
            self._spare = self._start(None, None)
            self._watcher.hold_output(self._spare)
        except OSError as error:
            self._spare_not_before = self._clock.monotonic() + SPARE_AGAIN_S
            self._watcher.log_message(f"no spare could be started, and it is tried again: {error}")
        else:
            self.hang_detector.expect_spare()

    def _discard_spare(self, spare: Process, status: int) -> None:
        """Drop a spare that ended before it was needed. Its output tells why, and a later one may do
        better.
        """
        self._spare, self._spare_not_before = None, self._clock.monotonic() + SPARE_AGAIN_S
        if status != 0:
            self._watcher.log_held_output(spare)
        self._watcher.log_message(
            f"the spare process of this node {describe(status)} while it waited to become a rank; the next "
            f"one is started in {SPARE_AGAIN_S:g} s. Until then a lost rank is started from the beginning"
        )

    def _stuck_ranks(self) -> list[Process]:
        """Return stuck ranks. If the detector cannot look, for want of a descriptor, it looks again later."""
        with contextlib.suppress(OSError):
            return self.hang_detector.stuck_ranks()
        return []

    def _has_room_for_spare(self) -> bool:
        """Whether a spare has room. It builds what a rank builds, so on GPUs no spare waits."""
        has_gpus = self._task_spec.resources.has_real_gpus
        num_rank_memories = SPARE_SHARE / self._task_spec.ranks.ranks_per_node
        return not has_gpus and self._confinement.has_memory_for(num_rank_memories)

    @property
    def unkillable_hang(self) -> Hang | None:
        """The hang of a killed rank that is not gone in time, most likely because it is stuck in the
        kernel.
        """
        hung = self.hang_detector.hang
        if hung is None or hung.rank is None:
            return None
        return hung if self._clock.monotonic() > self.hang_detector.killed_at + HUNG_GONE_S else None

    @property
    def poll_interval_s(self) -> float:
        """How long to wait before the next look."""
        return LOOK_S if self.hang_detector.has_begun else TURN_S * 30

    def _can_rejoin(self, process: Process) -> bool:
        beat = self._board.heartbeat(process.slot)
        return beat.status is not RankStatus.UNKNOWN and not beat.is_bound_to_round

    def _has_joined(self, process: Process) -> bool:
        return self._board.heartbeat(process.slot).is_in(self._rendezvous.number)

    def _is_time_for_spare(self) -> bool:
        """Whether to start a spare: with the first group at once, later only once the ranks have made steps.

        After a loss the peers go first. A spare that starts would take CPU time that the next step needs.
        """
        if any(self._board.heartbeat(process.slot).is_bound_to_round for process in self.ranks):
            return False  # a spare would run the whole program, which takes it for a rank
        is_first = self._rendezvous.number == 0
        return all(map(self._has_joined, self.ranks)) if is_first else self._have_all_stepped()

    @property
    def _has_reported_step(self) -> bool:
        beats = [self._board.heartbeat(process.slot) for process in self.ranks]
        return any(beat.rendezvous_round == self._rendezvous.number and beat.stepped_ns for beat in beats)

    def _have_all_stepped(self) -> bool:
        """Whether all ranks have made a step in this group."""
        beats = [self._board.heartbeat(process.slot) for process in self.ranks]
        return all(map(self._has_joined, self.ranks)) and all(beat.stepped_ns for beat in beats)

    def _assignment(self, local_rank: int) -> RankAssignment:
        return RankAssignment(
            rendezvous_round=self._rendezvous.number,
            rank=self._task_spec.ranks.node_rank * self._task_spec.ranks.ranks_per_node + local_rank,
            local_rank=local_rank,
            master_port=self._rendezvous.master_port,
        )

    def _take_spare(self) -> Process | None:
        spare = self._spare
        if spare is None or not self._has_settled(spare):
            return None
        self._spare = None
        return spare

    def _has_settled(self, spare: Process | None) -> bool:
        """Whether the spare waits, and can be a rank at once."""
        if spare is None or spare.status is not None:
            return False
        return self._board.heartbeat(spare.slot).status is RankStatus.WAITING

    def _start(self, local_rank: int | None, assignment: RankAssignment | None) -> Process:
        slot = self._free_slot()
        self._board.clear(slot)
        if assignment is not None:
            self._board.assign(slot, assignment)
        environment = self._environments(local_rank, self._rendezvous)
        environment[BOARD_VARIABLE] = f"{self._board_fd}:{slot}"
        environment[metrics.METRICS_VARIABLE] = self._meter.variable
        pid, pipes = self._launcher.start_script(
            self._task_spec.program.run, environment, inherited_fds=self.inherited_fds
        )
        process = Process(
            pid, assignment.rank if assignment is not None else None, is_needed=assignment is not None
        )
        process.slot = slot
        self._watcher.add(process, pipes)
        return process

    def _free_slot(self) -> int:
        # While a group forms, ranks of the last one that do not know of it hold their slots.
        taken = {process.slot for process in (*self.ranks, *self._survivors) if process.status is None}
        if self._spare is not None:
            taken.add(self._spare.slot)
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _are_gone(left: dict[int, int]) -> bool:
    """Whether none of these processes lives, by pid and start time. False if that cannot be read."""
    return left.items().isdisjoint(tree.start_ticks_of(left).items()) and tree.can_read_proc()
