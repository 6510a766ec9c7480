"""The ranks of one node: started, replaced one by one where the others can go on without them, or all anew.

Those that say where they are on the board outlive the loss of a peer: they are told of the next group and
join it in place. For such programs one more process waits on each node, as far as it can get without being a
rank.
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
from shoal.runtime import metrics, stacks, tree
from shoal.runtime.board import VARIABLE, Board, Place, Request, Standing
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.ending import BY_SIGNAL, Hang, describe
from shoal.runtime.environment import Generation
from shoal.runtime.launch import Launcher
from shoal.runtime.lookout import Lookout, Page, kill_group
from shoal.runtime.meter import Meter
from shoal.runtime.watch import Process, Watcher
from shoal.wire import Order, Progress, Recovery, Signs

TURN_S, LOOK_S = 0.03, 0.25
SPARE_SHARE = 1.5
"""How much of a rank's memory must be left before a spare is started."""
SPARE_AGAIN_S = 60.0
"""How long after one that could not be started the next is tried."""
SILENT_S = 60.0
"""A program that has said nothing by then is one that does not use `shoal.runtime`."""
SOON_S, SETTLED_S = 2.0, 10.0
"""How long after its start a group that makes steps, or does not tell, is past it."""
GONE_S = 5.0
"""How long what was killed may take to be gone."""
HUNG_GONE_S = 60.0
"""The same, of a rank that hung: much memory, and a kernel on a GPU that does not end, take most of it."""
WORKED_S = 0.05
"""Processor time, of all that runs here, that shows that the ranks of a group run."""
HELD_S = 1.0
"""How long what was stopped may take to stand still."""
NUM_SEEN = 40
"""Looks, about ten seconds: the first steps of a group are slower than those that follow."""

Environments = Callable[[int | None, Generation], dict[str, str]]
"""The environment of a local rank; None: of a spare."""


class Crew:
    """Main thread only. `ranks` are the processes of the current group, in rank order."""

    def __init__(
        self,
        order: Order,
        confinement: Confinement,
        launcher: Launcher,
        watcher: Watcher,
        clock: Clock,
        environments: Environments,
        meter: Meter,
        page: tuple[int, Board] | None = None,
    ) -> None:
        """`page`: a board that a zygote which is there already has inherited."""
        self._order = order
        self._confinement = confinement
        self._launcher = launcher
        self._watcher = watcher
        self._clock = clock
        self._environments = environments
        self._meter = meter
        self._board_fd, self._board = page if page is not None else Board.make()
        self._generation = Generation()
        self._formed_at, self._formed_ns = 0.0, 0
        self._signs = Signs(generation=0, started_at=0.0)
        self._worked_before_s: float | None = None
        self._spare: Process | None = None
        self._spare_not_before = 0.0
        self._survivors: list[Process] = []
        self._last_step = self._spares = self._steps_heard = 0
        self._seen: deque[tuple[int, int]] = deque(maxlen=NUM_SEEN)
        """Steps, and when they were complete, at the last looks."""
        self.lookout = Lookout(
            order, confinement, watcher, clock, Page(fd=self._board_fd, board=self._board), launcher.work
        )
        self.ranks: list[Process] = []

    @property
    def kept_fds(self) -> tuple[int, ...]:
        """What a rank, and whoever starts one, inherits."""
        return (self._board_fd, self._meter.fd)

    @property
    def generation(self) -> int:
        """Which group the ranks are."""
        return self._generation.number

    def form(self, generation: Generation) -> None:
        """Have every rank of this node in this group: survivors are told, the others are started."""
        newest = max((self._board.beat(p.slot).step for p in self.ranks), default=0)
        # Who was lost while a group formed took its steps with it: they count as lost all the same.
        self._last_step = newest if self._has_told_step else max(self._last_step, newest)
        self._survivors, self._generation = self.ranks, generation
        self._formed_at, self._formed_ns = self._clock.monotonic(), time.monotonic_ns()
        self._signs = Signs(generation=generation.number, started_at=self._clock.now())
        self._worked_before_s = self._confinement.cpu_seconds()
        self._steps_heard = self._meter.steps_heard
        self._seen.clear()
        self.ranks, self._spares = [], 0
        for local_rank in range(self._order.ranks_per_node):
            old = self._survivors[local_rank] if self._survivors else None
            if old is not None and old.status is None:
                self._assign(old, local_rank)
            else:
                old = self._fill(local_rank)
            self.ranks.append(old)
        self.lookout.begin(self.ranks, generation.number)

    def _fill(self, local_rank: int) -> Process:
        """One that waits, or a new one, for a place that nobody has."""
        process = self._take_spare()
        if process is None:
            process = self._start(local_rank, self._place(local_rank))
        else:
            self._spares += 1
        self._assign(process, local_rank)
        return process

    def _assign(self, process: Process, local_rank: int) -> None:
        place = self._place(local_rank)
        process.rank, process.is_needed, process.held = place.rank, True, None
        process.spoke_at = None
        self._board.assign(process.slot, place)

    def recovery(self, failed_at: float, failed_ns: int) -> Recovery | None:
        """How this node got into the group, once it has made a step or is known not to tell of any."""
        beats = [self._board.beat(process.slot) for process in self.ranks]
        formed = Recovery(
            generation=self._generation.number,
            node=self._order.node,
            failed_at=failed_at,
            kept=sum(process in self._survivors for process in self.ranks),
            spares=self._spares,
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
        """Whether a rank of this group said that it made a step in it, or logged something of one."""
        return self._has_told_step or self._meter.steps_heard > self._steps_heard

    @property
    def has_settled(self) -> bool:
        """Whether the group is past its start, as far as anybody can tell."""
        formed_s = self._clock.monotonic() - self._formed_at
        return formed_s > SETTLED_S or (formed_s > SOON_S and self._have_all_stepped())

    def progress(self) -> Progress | None:
        """How far the ranks are; None: not every one has made a step in this group, or they do not say."""
        beats = [self._board.beat(process.slot) for process in self.ranks]
        last = min(beats, key=lambda beat: beat.step, default=None)
        if last is None or not self._have_all_stepped():
            return None
        self._seen.append((last.step, last.at_ns))
        first_step, first_ns = self._seen[0]
        steps = last.step - first_step
        return Progress(
            generation=self._generation.number,
            step=last.step,
            at=self._clock.now() - (time.monotonic_ns() - last.at_ns) / 1e9,
            step_s=(last.at_ns - first_ns) / steps / 1e9 if steps > 0 else None,
        )

    def signs(self) -> Signs:
        """What the group shows of itself. Costs one look at a counter until it has used a processor."""
        found = self._signs
        if found.worked_at is None and self._worked_before_s is not None:
            worked_s = self._confinement.cpu_seconds()
            if worked_s is not None and worked_s - self._worked_before_s > WORKED_S:
                found = msgspec.structs.replace(found, worked_at=self._clock.now())
        if found.printed_at is None:
            spoken = [one.spoke_at for one in self.ranks if one.spoke_at is not None]
            found = msgspec.structs.replace(found, printed_at=min(spoken, default=None))
        self._signs = found
        return found

    def send(self, number: signal.Signals, rank: int | None = None) -> bool:
        """A signal to the rank, or to every one of the node. False: none of them runs here."""
        chosen = [p for p in self.ranks if p.status is None and rank in (None, p.rank)]
        for process in chosen:
            process.is_doomed = process.is_doomed or number == signal.SIGKILL
            self._signal(process, number)
        return bool(chosen)

    def _signal(self, process: Process, number: signal.Signals) -> set[int]:
        """A signal to all that is of it; returns whom it was sent to."""
        own = self._own(process, self._confinement.processes())
        _send(own, number)
        return own

    def _own(self, process: Process, found: set[int]) -> set[int]:
        """All that is of it, of those that are there."""
        # A rank that was forked has a session of its own: what it writes to tells whose it is, or its word.
        own = tree.writing_to(found, self._watcher.pipes_of(process))
        if process.status is None:
            own.add(process.pid)
        if process.status != 0:  # of who ended well nothing is left, and its number may be another's
            inner, is_inside = self._board.beat(process.slot).pid, self._confinement.sandbox is not None
            own.update(stacks.own_pids([inner], found, is_inside=is_inside).values())
        return own

    def clear(self) -> bool:
        """The group is over. Who has left it for good is killed, and everybody if one that lives cannot join
        another.

        False: something of it may still live, and no other may begin beside it.
        """
        self._watcher.forget(self.ranks)
        living = [one for one in self.ranks if one.status is None and not one.is_doomed]
        living = [one for one in living if self._board.beat(one.slot).standing is not Standing.GONE]
        if not all(self._can_go_on(process) for process in living):
            living = []
        return self._end([process for process in self.ranks if process not in living])

    def _end(self, processes: list[Process]) -> bool:
        """Kill them. False: something of them may still live, or nobody can look."""
        could_look = tree.can_look()
        sessions = tree.sessions(self._confinement.processes())
        left: dict[int, int] = {}
        for process in processes:
            own = self._whole(process, sessions)
            left |= tree.living(own)
            if process.status is None or process.pid in {sessions.get(pid) for pid in own}:
                kill_group(process)
            _send(own, signal.SIGKILL)
        until = self._clock.monotonic() + GONE_S
        while not (self._are_over(processes) and _are_gone(left)):
            if self._clock.monotonic() > until:
                return False
            self._watcher.turn(TURN_S)
        return could_look

    def _whole(self, process: Process, sessions: dict[int, int]) -> set[int]:
        """It with its session, and that of a rank forked for it, which may write to nothing of ours. Of one
        that is dead, what it left behind: while there is any, nobody else has its number.
        """
        own = self._own(process, set(sessions))
        began = own if process.pid in sessions else own | {process.pid}
        return own | {pid for pid, session in sessions.items() if session in began}

    def left_behind(self) -> set[int]:
        """The living processes of the group's ranks."""
        sessions = tree.sessions(self._confinement.processes())
        found = (self._whole(process, sessions) for process in self.ranks)
        return set(tree.living(set().union(*found)))

    def _are_over(self, processes: list[Process]) -> bool:
        return all(one.status is not None and self._watcher.is_silent(one) for one in processes)

    def _replace(self, held: dict[Process, set[int]]) -> None:
        """They never came to this group, whose others still wait for them: those who can take their places.

        Nothing has failed in the group, so none has to follow it. One that does not die fails it.
        """
        if not held:
            return
        for process, own in held.items():
            why = "has not left the group before in time: it is killed and"
            if process.status is not None:
                why = "ended before it came to this group: it is"
            self._watcher.say(f"rank {process.rank} {why} replaced")
            process.is_needed, process.is_doomed = False, True
            _send(own, signal.SIGKILL)  # whoever was stopped cannot end by itself
        if not self._end(list(held)):
            self._watcher.blame(next((one for one in held if one.status is not None), next(iter(held))))
            return
        for process in held:
            local_rank = self.ranks.index(process)
            self.ranks[local_rank] = self._fill(local_rank)
        self.lookout.wait_again()

    def _hold(self, process: Process) -> set[int] | None:
        """Stop it where it is: all that is of it, which is nobody if it has ended. None: it has come to the
        group meanwhile, and goes on.

        A rank says which group it is in before it meets anybody there. So one that is stopped and has not
        said so has not been counted among them, and will not be: two of one number would break the group.
        """
        own = self._signal(process, signal.SIGSTOP)
        until = self._clock.monotonic() + HELD_S
        while not tree.is_still(own) and self._clock.monotonic() < until:
            time.sleep(tree.PATIENCE_S)
        if self._board.beat(process.slot).is_behind(self._generation.number):
            return own
        _send(own, signal.SIGCONT)
        return None

    def tell(self, request: Request) -> None:
        """What the request to stop means that ranks get next, or have got from others."""
        self._board.tell(request)

    def without_shell(self) -> list[int]:
        """Process groups whose leader died of SIGTERM, as a shell does at once, and whose others live: who
        sends one to all of a job takes from a program its shell, not its time to save.
        """
        by_it = (-signal.SIGTERM, BY_SIGNAL + signal.SIGTERM)
        ended = [(one.pid, one.status) for one in self.ranks if one.status is not None]
        dead = {pid for pid, status in ended if os.waitstatus_to_exitcode(status) in by_it}
        # While there is anybody in its session nobody else has its number.
        return list(dead & set(tree.sessions(self._confinement.processes()).values())) if dead else []

    def look_after(self) -> None:
        """Have a spare ready once the ranks are of the kind that can use one; have those that hang ended."""
        if self._order.max_restarts == 0:
            return
        if self._spare is not None and self._spare.status is not None:
            self._bury_spare(self._spare, self._spare.status)
        joined = [self._has_joined(process) for process in self.ranks]
        if self._spare is None and self._is_time_for_spare() and self._has_room_for_spare():
            self._start_spare()
        if self._generation.number > 0:
            self._replace({one: own for one in self._stuck() if (own := self._hold(one)) is not None})
        if all(joined):
            with contextlib.suppress(OSError):  # as `_stuck`
                self.lookout.look(has_spare_settled=self._has_settled(self._spare))

    def _start_spare(self) -> None:
        """Have one wait. Where no process or no descriptor is to be had, later: the ranks are well."""
        if self._clock.monotonic() < self._spare_not_before:
            return
        try:
            self._spare = self._start(None, None)
            self._watcher.hold(self._spare)
        except OSError as error:
            self._spare_not_before = self._clock.monotonic() + SPARE_AGAIN_S
            self._watcher.say(f"no spare could be started, and it is tried again: {error}")
        else:
            self.lookout.expect_spare()

    def _bury_spare(self, spare: Process, status: int) -> None:
        """One that ended before it was needed. What it wrote tells why; the next one may do better later."""
        self._spare, self._spare_not_before = None, self._clock.monotonic() + SPARE_AGAIN_S
        if status != 0:
            self._watcher.show(spare)
        self._watcher.say(
            f"the spare process of this node {describe(status)} while it waited to become a rank; the next "
            f"one is started in {SPARE_AGAIN_S:g} s. Until then a lost rank is started from the beginning"
        )

    def _stuck(self) -> list[Process]:
        """Whom the lookout finds. Where it cannot see, without a descriptor say, it looks again later."""
        with contextlib.suppress(OSError):
            return self.lookout.stuck()
        return []

    def _has_room_for_spare(self) -> bool:
        """A spare builds what a rank builds. On GPUs that is memory a rank may need: none waits there."""
        has_gpus = bool(self._order.gpu_ids) and not self._order.are_gpus_simulated
        share = SPARE_SHARE / self._order.ranks_per_node
        return not has_gpus and self._confinement.has_memory_for(share)

    @property
    def endless_hang(self) -> Hang | None:
        """What a rank was killed for that is not gone in time: it is stuck in the kernel, most likely."""
        hung = self.lookout.hung
        if hung is None or hung.rank is None:
            return None
        return hung if self._clock.monotonic() > self.lookout.killed_at + HUNG_GONE_S else None

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        return LOOK_S if self.lookout.has_begun else TURN_S * 30

    def _can_go_on(self, process: Process) -> bool:
        beat = self._board.beat(process.slot)
        return beat.standing is not Standing.UNKNOWN and not beat.is_bound

    def _has_joined(self, process: Process) -> bool:
        return self._board.beat(process.slot).is_in(self._generation.number)

    def _is_time_for_spare(self) -> bool:
        """Beside the first group as soon as it is there. After a loss its peers go first: a spare on its way
        would take from them the time that the next step waits for.
        """
        if any(self._board.beat(process.slot).is_bound for process in self.ranks):
            return False  # a spare would run the program, which takes it for a rank
        is_first = self._generation.number == 0
        return all(map(self._has_joined, self.ranks)) if is_first else self._have_all_stepped()

    @property
    def _has_told_step(self) -> bool:
        beats = [self._board.beat(process.slot) for process in self.ranks]
        return any(beat.generation == self._generation.number and beat.stepped_ns for beat in beats)

    def _have_all_stepped(self) -> bool:
        """In this group."""
        beats = [self._board.beat(process.slot) for process in self.ranks]
        return all(map(self._has_joined, self.ranks)) and all(beat.stepped_ns for beat in beats)

    def _place(self, local_rank: int) -> Place:
        return Place(
            generation=self._generation.number,
            rank=self._order.node_rank * self._order.ranks_per_node + local_rank,
            local_rank=local_rank,
            master_port=self._generation.master_port,
        )

    def _take_spare(self) -> Process | None:
        spare = self._spare
        if spare is None or not self._has_settled(spare):
            return None
        self._spare = None
        return spare

    def _has_settled(self, spare: Process | None) -> bool:
        """It waits, and can be a rank at once."""
        if spare is None or spare.status is not None:
            return False
        return self._board.beat(spare.slot).standing is Standing.WAITING

    def _start(self, local_rank: int | None, place: Place | None) -> Process:
        slot = self._free_slot()
        self._board.clear(slot)
        if place is not None:
            self._board.assign(slot, place)
        environment = self._environments(local_rank, self._generation)
        environment[VARIABLE] = f"{self._board_fd}:{slot}"
        environment[metrics.VARIABLE] = self._meter.variable
        pid, pipes = self._launcher.start_script(self._order.run, environment, keep=self.kept_fds)
        process = Process(pid, place.rank if place is not None else None, is_needed=place is not None)
        process.slot = slot
        self._watcher.add(process, pipes)
        return process

    def _free_slot(self) -> int:
        # While a group is formed, those of the last one that are still to be told have theirs.
        taken = {process.slot for process in (*self.ranks, *self._survivors) if process.status is None}
        if self._spare is not None:
            taken.add(self._spare.slot)
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _are_gone(left: dict[int, int]) -> bool:
    """Whether none of these lives, by when each began. To who cannot look, nothing is gone."""
    return left.items().isdisjoint(tree.living(left).items()) and tree.can_look()
