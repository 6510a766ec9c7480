"""Find the ranks of a node that do not move, keep where they stood, and kill those who hold up the others.

It knows the ranks by their word on the board, by the processor time of the share and by their stacks. It
starts and replaces nobody: whom it kills has failed, which its owner sees as any other end; `hung` says why.
Where nobody here shows to be the one, but there are other nodes, it kills nobody: the group is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

import msgspec

from shoal.clock import Clock
from shoal.runtime import flight_recorder, scene
from shoal.runtime.board import Beat, Board, Standing
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.ending import Hang
from shoal.runtime.hangs import BUSY_SHARE, LEAVE_S, Pace
from shoal.runtime.watch import Process, Watcher
from shoal.wire import Order

ELSEWHERE = 2.0
"""A node whose ranks all wait for others leaves a hang to another node until so many times the limit."""
EARLY = 0.5
"""Of the limit: where there are other nodes, the ranks are looked at by then. Once another node has ended
what hangs, those who waited for it stand elsewhere.
"""


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
        self._is_spare_settled = True
        """Whether it has been seen to wait: until then what it uses is mistaken for work of the ranks."""
        self._scene: scene.Scene | None = None
        self._early: scene.Scene | None = None
        self._recorders: set[int] = set()
        """Ranks that were asked for their last NCCL calls at the newest look."""
        self._is_paused = False
        self._began_cpu_s = 0.0
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
        self._has_hung, self._stuck = False, []
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

    def expect_spare(self) -> None:
        """One has been started, and works until it waits."""
        self._is_spare_settled = False

    def look(self, *, has_spare_settled: bool) -> None:
        """End what hangs: those who hold up the others, if it shows; else every rank of the only node, and on
        one of several the group alone: the others may know better, and who does not leave it is stuck.

        Of ranks that have all joined the group. Blocks for two seconds at most, where they are silent.
        """
        now, cpu_s = self._clock.monotonic(), self._confinement.work_seconds()
        if self._is_paused:
            return
        beats = [self._beat(process) for process in self._ranks]
        has_stepped = all(beat.stepped_ns for beat in beats)
        self._pace.look(now, min(beat.step for beat in beats), cpu_s, has_stepped=has_stepped)
        if has_spare_settled and not self._is_spare_settled:
            self._is_spare_settled = True
            self._pace.disregard(now, cpu_s)
        has_others = len(self._order.nodes) > 1
        if has_others and not self._is_of_now(self._early) and self._pace.silent_s(now, cpu_s, EARLY):
            self._early = self._look_at_all()
        silent_s = self._pace.silent_s(now, cpu_s)
        if silent_s is None or self.hung is not None:
            return
        if self._scene is None or not self._is_of_now(self._scene):
            self._scene = self._look_at_all()
        is_elsewhere = has_others and self._scene.is_elsewhere
        if is_elsewhere and silent_s < ELSEWHERE * self._pace.limit_s(now, cpu_s):
            return  # its own node sees it too, and ends it alone: those who wait here may live on
        self._end(self._scene, silent_s, is_elsewhere=is_elsewhere)

    def stuck(self) -> list[Process]:
        """Ranks that have not come out of an earlier group in time, and never will: each is told of once.

        One that was in it may be in the middle of a step, whose length the pace tells, unless that group
        hung: by our own pace, or by another node's while nobody works here either. One that was still coming
        to it looks for a newer group ten times a second, unless it is inside of torch, which forms a group
        without looking up and waits for a lost peer until the time-out.
        """
        waited_s = self._clock.monotonic() - self._began_at
        if self._is_paused or waited_s <= LEAVE_S:
            return []
        found = [one for one in self._ranks if one not in self._stuck and self._is_late(one, waited_s)]
        if found:
            self._keep(self._look_at_all())
            self._stuck += found
        return found

    def wait_again(self) -> None:
        """Somebody new is among the ranks: to come to the group, all have their time from now on."""
        self._began_at, self._began_cpu_s = self._clock.monotonic(), self._confinement.work_seconds()

    def _is_late(self, process: Process, waited_s: float) -> bool:
        beat = self._beat(process)
        if not beat.is_behind(self._generation):
            return False
        may_be_at_a_step = beat.standing is Standing.JOINED and not self._is_judged_here
        return waited_s > (self._step_s(waited_s) if may_be_at_a_step else LEAVE_S)

    def _step_s(self, waited_s: float) -> float:
        """How long it may take to come out of a step of the group before. Another node may wait while a rank
        of this one works, at an evaluation say, and call that a hang sooner than we would.
        """
        if not self._is_judged_elsewhere:
            return self._pace.leave_s()
        worked_s = self._confinement.work_seconds() - self._began_cpu_s
        return LEAVE_S if worked_s <= BUSY_SHARE * waited_s else self._pace.busy_s()

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
        self.hung, self.killed_at = seen.hang(told), self._clock.monotonic()
        for pid in seen.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in seen.culprits:
            process.is_doomed = True
            kill_group(process)

    def _beat(self, process: Process) -> Beat:
        return self._page.board.beat(process.slot)

    def _is_of_now(self, seen: scene.Scene | None) -> bool:
        return seen is not None and seen.step == self._pace.step

    def _look_at_all(self) -> scene.Scene:
        """Where every rank of the node stands. Blocks for two seconds at most."""
        numbers = [process.rank for process in self._ranks if process.rank is not None]
        self._recorders = flight_recorder.ask(self._work, numbers)
        found = self._confinement.processes()
        return scene.look(self._ranks, self._page.board, self._page.fd, found, self._confinement.path)

    def _keep(self, seen: scene.Scene) -> None:
        """What was seen, into the log. Blocks while ranks on NCCL write, a second at most."""
        for process, stacks in seen.stacks:
            self._watcher.keep(process.rank, stacks.text)
        kept = flight_recorder.keep(self._work, self._recorders, os.path.dirname(self._work))
        for rank, path in kept.items():
            self._watcher.keep(rank, f"its last NCCL calls: {path} on {self._order.node}")


def kill_group(process: Process) -> None:
    """It and what it started, as far as that stayed with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
