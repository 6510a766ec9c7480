"""Find the ranks of a node that do not move, keep where they stood, and kill those who hold up the others.

It knows the ranks by their word on the board, by the work of the share's processes and by their stacks. It
starts and replaces nobody: whom it kills has failed, which its owner sees as any other end; `hung` says why.
Where nobody here shows to be the one, but there are other nodes, it kills nobody: the group is over.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Sequence

import msgspec

from shoal.clock import Clock
from shoal.runtime import flight_recorder, scene, tree
from shoal.runtime.board import Beat, Board, Standing
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.ending import Hang
from shoal.runtime.hangs import BUSY_SHARE, LEAVE_S, Doing, Pace
from shoal.runtime.watch import Process, Watcher
from shoal.wire import Order

EARLY = 0.5
"""Of the shortest limit: where there are other nodes, ranks that are idle are looked at by then. Once another
node has ended what hangs, those who waited for it stand elsewhere. Of the limit of those who do nothing: the
states of processes are looked at from then on, at the latest. Who waits for a disk must have been seen to.
"""
AGAIN = 2.0
"""A silence so many times as long as at the last look at the stacks is worth another one."""
GAP_S = 5.0
"""Nobody looked for so long: the machine slept, or we were stopped ourselves, and the ranks with us."""
GLANCE_S = 1.0
"""How often the states of silent processes are looked at."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """The board, and the descriptor by which ranks have it."""

    fd: int
    board: Board


class Lookout:
    """Main thread only. `begin` with each group; then look as often as you like: nothing is done twice."""

    def __init__(
        self,
        order: Order,
        confinement: Confinement,
        watcher: Watcher,
        clock: Clock,
        page: Page,
        work: str,
    ) -> None:
        self._order = order
        self._confinement = confinement
        self._watcher = watcher
        self._clock = clock
        self._page = page
        self._work = work
        self._ranks: Sequence[Process] = ()
        self._generation, self._began_at = 0, 0.0
        self._pace = Pace()
        self._looked_at = -math.inf
        self._is_spare_settled = True
        """Whether it has been seen to wait: until then what it uses is mistaken for work of the ranks."""
        self._scene: scene.Scene | None = None
        self._early: scene.Scene | None = None
        self._seen_after_s = 0.0
        """How long the silence was when the scene was seen."""
        self._recorders: set[int] = set()
        """Ranks that were asked for their last NCCL calls at the newest look."""
        self._halted: frozenset[int] = frozenset()
        """Slots of ranks that were stopped when their states were looked at last."""
        self._stopped: frozenset[int] = frozenset()
        """Of those, who was at the look before, too: who looks into a process may stop it for a moment."""
        self._glanced_at = -math.inf
        self._inside_s = 0.0
        """For how long, so far, silent processes waited inside of the kernel: for a disk, which is work."""
        self._is_paused = self._is_forewarned = self._is_between = False
        """`_is_between`: at the last look a rank had no step to make."""
        self._began_work_s = 0.0
        self._is_judged_here = self._is_judged_elsewhere = self._has_hung = False
        """Whether the group before this one ended for a hang, by the pace of this node or by another's word;
        and whether another one says so of this one.
        """
        self._stuck: list[Process] = []
        """Of this group, those that were told of."""
        self.hung: Hang | None = None
        """Why this group is over, if it is for a hang that was seen here."""
        self.killed_at = 0.0
        """When that was, if a rank of this node was killed for it."""

    @property
    def has_begun(self) -> bool:
        """Whether the group has made a step that was seen."""
        return self._pace.step >= 0

    def begin(self, ranks: Sequence[Process], generation: int) -> None:
        """These are the ranks now. What is known of the pace of those before stays known."""
        self._is_judged_here, self._is_judged_elsewhere = self.hung is not None, self._has_hung
        self._halted = self._stopped = frozenset()
        self._has_hung, self._stuck, self._is_forewarned, self._is_between = False, [], False, False
        self._ranks, self._generation = ranks, generation
        self._pace.begin(is_after_hang=self._is_judged_here or self._is_judged_elsewhere)
        self._scene = self._early = self.hung = None
        self.wait_again()

    def pause(self) -> None:
        """The ranks are about to be stopped by us: until `go_on` whoever does not move is not to blame."""
        self._is_paused = True

    def go_on(self) -> None:
        """They move again: time counts from now on. Without a pause before it changes nothing."""
        if self._is_paused:
            self._is_paused = False
            self._pace.begin()
            self.wait_again()

    def forewarn(self) -> None:
        """A drill stops a rank: who is ended for that did hang, and nothing is learned from it."""
        self._is_forewarned = True

    def expect_spare(self) -> None:
        """One has been started, and works until it waits."""
        self._is_spare_settled = False

    def look(self, *, has_spare_settled: bool) -> None:
        """End what hangs: those who hold up the others, if it shows; else every rank of the only node, and on
        one of several the group alone: the others may know better, and who does not leave it is stuck.

        Of ranks that have all joined the group. Blocks for two seconds at most, where they are silent.
        """
        now, worked_s = self._attend()
        if self._is_paused or worked_s is None or self.hung is not None:
            return
        beats = self._beats()
        if self._is_at_its_end(beats):
            self._pace.rest(now, worked_s)
            return
        is_done = any(beat.standing is Standing.DONE for beat in beats)
        self._keep_pace(now, worked_s, beats, is_done=is_done)
        if has_spare_settled and not self._is_spare_settled:
            self._is_spare_settled = True
            self._pace.disregard(now, worked_s)
        if not is_done and self._is_early_look_due(now, worked_s):
            self._early = self._look_at_all()
        silent_s = now - self._pace.since
        if silent_s > min(self._pace.limit_s(Doing.STOPPED), EARLY * self._pace.limit_s(Doing.NOTHING)):
            worked_s += self._glance(now)
        else:
            self._halted = self._stopped = frozenset()
        doing = self._verdict(now, worked_s)
        if doing is Doing.STOPPED or (doing is not None and not is_done):
            self._judge(doing, silent_s, beats)
        self._looked_at = self._clock.monotonic()  # it may have blocked

    def _keep_pace(self, now: float, worked_s: float, beats: list[Beat], *, is_done: bool) -> None:
        """What one does that has no step to make, a validation between two epochs say, is no step of any."""
        step = min(beat.step for beat in beats)
        if self._is_between and not (is_done and step == self._pace.step):
            self._pace.rest(now, worked_s)
        self._is_between = is_done
        self._pace.look(now, step, worked_s, has_stepped=all(beat.stepped_ns for beat in beats))

    def _attend(self) -> tuple[float, float | None]:
        """The time, and what was worked so far; None: nobody can tell just now, and nobody is judged.

        Where nobody has looked for a while, all have their time from now on.
        """
        now, counted_s = self._clock.monotonic(), self._confinement.work_seconds()
        if counted_s is None:
            return now, None
        worked_s = counted_s + self._inside_s
        if now - self._looked_at > GAP_S:
            self._pace.rest(now, worked_s)
            self._began_at, self._began_work_s = now, worked_s
        self._looked_at = now
        return now, worked_s

    def _is_at_its_end(self, beats: list[Beat]) -> bool:
        """Whether a rank here is past its training: what it and the others do after that is no step."""
        return any(beat.standing is Standing.GONE for beat in beats) or any(
            process.status == 0 and beat.is_in(self._generation)  # else it ended before, and is replaced
            for process, beat in zip(self._ranks, beats, strict=True)
        )

    def _verdict(self, now: float, worked_s: float) -> Doing | None:
        """What the ranks do, where the silence is too long for it."""
        doing = self._pace.verdict(now, worked_s, is_stopped=bool(self._stopped))
        if doing is Doing.NOTHING and self._halted:  # that is why
            is_late = now - self._pace.since > self._pace.limit_s(Doing.STOPPED)
            return Doing.STOPPED if is_late else None
        return doing

    def _is_early_look_due(self, now: float, worked_s: float) -> bool:
        if len(self._order.nodes) == 1 or self._is_of_now(self._early):
            return False
        is_early = now - self._pace.since > EARLY * self._pace.limit_s(Doing.STOPPED)
        return is_early and self._pace.is_idle(now, worked_s)

    def _glance(self, now: float) -> float:
        """See which ranks are stopped; returns for how long, since the last glance, one was in the kernel."""
        if now - self._glanced_at < GLANCE_S and not self._halted:
            return 0.0
        found = self._confinement.processes()
        halted = self._halted_of(found)
        self._stopped, self._halted = halted & self._halted, halted
        inside_s = min(GLANCE_S, now - self._glanced_at) if tree.are_inside(found) else 0.0
        self._glanced_at = now
        self._inside_s += inside_s
        return inside_s

    def _judge(self, doing: Doing, silent_s: float, beats: list[Beat]) -> None:
        """The silence is too long for what they do: see where all stand, and end it unless somebody moved."""
        seen = self._scene
        is_stale = doing is Doing.STOPPED or silent_s > AGAIN * self._seen_after_s
        if seen is None or is_stale or not self._is_of_now(seen):
            seen = self._scene = self._look_at_all()
            self._seen_after_s = silent_s
            if self._have_moved(doing, beats):
                self._scene = None
                return
        has_others = len(self._order.nodes) > 1
        if seen.is_elsewhere and (has_others or seen.is_saving):
            # Its own node sees who hangs, too, and ends it alone: those who wait here may live on.
            if silent_s <= max(self._pace.limit_s(Doing.WAITING), *(beat.timeout_s for beat in beats)):
                return
            doing = Doing.WAITING if doing is Doing.NOTHING else doing
        if doing is not Doing.STOPPED or not self._is_forewarned:
            self._pace.doubt(doing, self._pace.limit_s(doing))
        self._end(seen, silent_s, is_elsewhere=has_others and seen.is_elsewhere)

    def _have_moved(self, doing: Doing, beats: list[Beat]) -> bool:
        """Whether one of the last has given a sign of life since, or nobody is stopped any more."""
        last, newer = min(beat.step for beat in beats), self._beats()
        if any(was.step == last and was != beat for was, beat in zip(beats, newer, strict=True)):
            return True
        if self._is_at_its_end(newer):
            return True
        return doing is Doing.STOPPED and not self._halted_of(self._confinement.processes())

    def stuck(self) -> list[Process]:
        """Ranks that have not come out of an earlier group in time, and never will: each is told of once.

        One that was in it may be in the middle of a step, whose length the pace tells, unless that group
        hung by our own pace, or somebody stopped it; one that is done may save for the last time. One that
        was still coming to it looks for a newer group ten times a second, unless it is inside of torch, which
        forms a group without looking up and waits for a lost peer until the time-out.
        """
        now, worked_s = self._attend()
        waited_s = now - self._began_at
        if self._is_paused or worked_s is None or waited_s <= LEAVE_S:
            return []
        behind = [one for one in self._ranks if self._beat(one).is_behind(self._generation)]
        if not behind:
            return []
        worked_s += self._glance(now)
        is_at_work = worked_s - self._began_work_s > BUSY_SHARE * waited_s
        doing = Doing.WORK if is_at_work else Doing.NOTHING
        tasks = {one: self._task(one, doing) for one in behind if one not in self._stuck}
        found = [one for one, task in tasks.items() if waited_s > self._leave_s(task)]
        if found:
            self._keep(self._look_at_all())
            self._stuck += found
            for task in {task for one in found if (task := tasks[one]) is not None}:
                self._pace.doubt(task, self._leave_s(task))
            self._looked_at = self._clock.monotonic()
        return found

    def wait_again(self) -> None:
        """Somebody new is among the ranks: all have their time to come to the group, from now on."""
        self._looked_at = -math.inf

    def _task(self, process: Process, doing: Doing) -> Doing | None:
        """What it may have to finish before it comes out of the group before; None: nothing."""
        standing = self._beat(process).standing
        if process.status is not None or process.slot in self._stopped:
            return None
        if standing is Standing.DONE:
            return Doing.WORK
        return doing if standing is Standing.JOINED and not self._is_judged_here else None

    def _leave_s(self, task: Doing | None) -> float:
        """How long that may take."""
        return LEAVE_S if task is None else self._pace.leave_s(task, is_hang=self._is_judged_elsewhere)

    def end_for_hang(self) -> None:
        """Another node ends the group for a hang: where the ranks of this one stood, into the log.

        Of what was seen before: now they have left the group, and the next one waits for this node.
        """
        self._has_hung = True
        seen = next((one for one in (self._scene, self._early) if self._is_of_now(one)), None)
        if seen is not None:
            self._keep(seen)

    def _end(self, seen: scene.Scene, silent_s: float, *, is_elsewhere: bool) -> None:
        self._keep(seen)
        told = self._pace.told(silent_s)
        if is_elsewhere:
            self.hung = Hang(told=told)
            return  # who comes out of the group was not the one, and keeps what it has
        for process in seen.culprits:
            process.is_doomed = True
            kill_group(process)
        for pid in seen.stopped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.hung, self.killed_at = seen.hang(told), self._clock.monotonic()

    def _beat(self, process: Process) -> Beat:
        return self._page.board.beat(process.slot)

    def _beats(self) -> list[Beat]:
        return [self._beat(process) for process in self._ranks]

    def _is_of_now(self, seen: scene.Scene | None) -> bool:
        return seen is not None and seen.step == self._pace.step

    def _look_at_all(self) -> scene.Scene:
        """Where every rank of the node stands. Blocks for two seconds at most."""
        numbers = [process.rank for process in self._ranks if process.rank is not None]
        self._recorders = flight_recorder.ask(self._work, numbers)
        found, page, path = self._confinement.processes(), self._page, self._confinement.path
        return scene.look(self._ranks, page.board, page.fd, found, path, is_inside=self._are_ranks_inside)

    def _halted_of(self, found: set[int]) -> frozenset[int]:
        return scene.halted(self._ranks, self._page.board, found, is_inside=self._are_ranks_inside)

    @property
    def _are_ranks_inside(self) -> bool:
        return self._confinement.sandbox is not None

    def _keep(self, seen: scene.Scene) -> None:
        """What was seen, into the log. Blocks while ranks on NCCL write, a second at most."""
        for process, stacks in seen.stacks:
            self._watcher.keep(process.rank, stacks.text)
        kept = flight_recorder.keep(self._work, self._recorders, os.path.dirname(self._work))
        for rank, path in kept.items():
            self._watcher.keep(rank, f"its last NCCL calls: {path} on {self._order.node}")


def kill_group(process: Process) -> None:
    """It and what it started, as far as that stayed with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
