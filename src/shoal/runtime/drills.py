"""Do to this node what a drill asks: kill, stop, cut off, damage. Each order once, and none without an end.

Every act is aimed at this share alone, and what it did is told before anybody can ask.
"""

from __future__ import annotations

import contextlib
import os
import signal

from shoal.clock import Clock
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.crew import Crew
from shoal.runtime.launch import Launcher
from shoal.runtime.logs import LogFile
from shoal.runtime.renewal import Renewer
from shoal.runtime.watch import Process, Watcher
from shoal.wire import DrillAct, Drilled, DrillOrder, Order, Progress

LAST_WORD_S = 1.0
"""How long a supervisor that is about to be lost waits until its last word was heard."""


class Driller:
    """Main thread only."""

    def __init__(self, order: Order, renewer: Renewer | None, clock: Clock, log: LogFile) -> None:
        self._order = order
        self._renewer = renewer
        self._clock = clock
        self._log = log
        self._done: set[tuple[str, DrillAct]] = set()
        self._continue_at: float | None = None
        self._held: int | None = None
        """The group whose ranks stand still for the damage; nobody is to blame for that."""
        self._has_harmed = False
        self._damage: tuple[DrillOrder, Process, float, Progress | None] | None = None

    def look(self, crew: Crew, confinement: Confinement | None, launcher: Launcher, watcher: Watcher) -> None:
        """Do what was asked since the last look, and end what has lasted long enough."""
        self._see_damage(crew, launcher, watcher)
        self._end_hold(crew)
        order = self._renewer.drill if self._renewer is not None else None
        if order is None or (order.drill_id, order.act) in self._done:
            return
        group = crew.generation if order.generation is None else order.generation
        if group > crew.generation:
            return  # its ranks are yet to be started here
        self._done.add((order.drill_id, order.act))
        if group < crew.generation:
            self._pass_over(order, crew)
            return
        self._log.say(f"drill {order.drill_id}: {order.act.replace('_', ' ')}")
        self._act(order, crew, confinement, launcher, watcher)

    def take_blame(self) -> bool:
        """Whether the group that just ended was harmed by a drill: that says nothing about its program."""
        has_harmed, self._has_harmed = self._has_harmed, False
        return has_harmed

    def _act(
        self,
        order: DrillOrder,
        crew: Crew,
        confinement: Confinement | None,
        launcher: Launcher,
        watcher: Watcher,
    ) -> None:
        at, before, told = self._clock.now(), crew.progress(), ""
        match order.act:
            case DrillAct.KILL_RANK | DrillAct.KILL_RANKS:
                told = self._missed(order, has_hit=crew.send(signal.SIGKILL, order.rank))
            case DrillAct.HANG_RANK if before is None:
                told = (
                    "the program has told of no step, as `runtime.train` does: nobody could tell that it "
                    "hangs; nothing was done to it"
                )
            case DrillAct.HANG_RANK:
                told = self._missed(order, has_hit=crew.send(signal.SIGSTOP, order.rank))
                self._continue_at = self._clock.monotonic() + order.for_s
                crew.lookout.forewarn()
            case DrillAct.CUT_OFF if self._renewer is not None:
                self._renewer.cut_off(order.for_s)
            case DrillAct.KILL_NODE if confinement is not None:
                self._be_lost(confinement, _done(order, at, before))
            case DrillAct.KILL_NODE:
                told = f"nobody can say what runs on {self._order.node}: nothing confines it"
            case DrillAct.CORRUPT:
                told = self._begin_damage(order, at, before, crew, launcher, watcher)
        self._has_harmed = not told and order.act is not DrillAct.CUT_OFF
        if told or order.act is not DrillAct.CORRUPT:
            self._tell(_done(order, at, before, refusal=told))

    def _pass_over(self, order: DrillOrder, crew: Crew) -> None:
        """Those it was meant for are gone, and those who follow are not harmed."""
        ended = f"group {order.generation} had ended before {self._order.node} heard of it"
        told = f"{ended}; group {crew.generation} runs now"
        self._log.say(f"drill {order.drill_id}: {order.act.replace('_', ' ')} was not done: {told}")
        # The drill that damages has begun with the damage: a node that is late undoes none of it.
        if order.act is not DrillAct.KILL_RANKS:
            self._tell(_done(order, self._clock.now(), None, refusal=told))

    def _missed(self, order: DrillOrder, *, has_hit: bool) -> str:
        """Of all ranks, those that are gone already are what was wanted."""
        is_missed = not has_hit and order.rank is not None
        return f"rank {order.rank} does not run on {self._order.node}" if is_missed else ""

    def _tell(self, drilled: Drilled, wait_s: float = 0.0) -> None:
        if self._renewer is not None:
            self._renewer.tell_drilled(drilled, wait_s)

    def _be_lost(self, confinement: Confinement, drilled: Drilled) -> None:
        """Die with all that runs here. Nothing is written down: a machine that is lost writes nothing."""
        for pid in confinement.processes() - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._tell(drilled, LAST_WORD_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def _end_hold(self, crew: Crew) -> None:
        """Whoever was stopped and was not ended for it goes on: after its time, and as a member of a later
        group as soon as the damage is done. Those who follow are not killed, so nothing else would end it.
        """
        is_over = self._continue_at is not None and self._clock.monotonic() > self._continue_at
        is_late = self._damage is None and self._held not in (None, crew.generation)
        if is_over or is_late:
            self._let_go(crew)

    def _let_go(self, crew: Crew) -> None:
        self._continue_at = self._held = None
        crew.send(signal.SIGCONT)
        crew.lookout.go_on()

    def _begin_damage(
        self,
        order: DrillOrder,
        at: float,
        before: Progress | None,
        crew: Crew,
        launcher: Launcher,
        watcher: Watcher,
    ) -> str:
        """Have bytes changed by a process of the job's own user: what it may not write stays as it is."""
        directory = self._order.checkpoint_dir
        if directory is None:
            return "the job has no checkpoint directory"
        crew.lookout.pause()
        crew.send(signal.SIGSTOP)
        self._held, self._continue_at = crew.generation, self._clock.monotonic() + order.for_s
        told = (directory, (self._order.attempt_id, self._order.node))
        pid, pipes = launcher.start_function("shoal.runtime.damage", "damage", told, keep=())
        process = Process(pid, None, is_needed=False)
        watcher.add(process, pipes)
        self._damage = (order, process, at, before)
        return ""

    def _see_damage(self, crew: Crew, launcher: Launcher, watcher: Watcher) -> None:
        if self._damage is None:
            return
        order, process, at, before = self._damage
        if process.status is None or not watcher.is_silent(process):
            return
        self._damage = None
        words = process.last_words
        refusal = "" if process.status == 0 else words or launcher.failure() or "it could not be damaged"
        if refusal:
            self._has_harmed = False
            self._let_go(crew)
        self._tell(_done(order, at, before, refusal=refusal, told=words))


def _done(
    order: DrillOrder, at: float, before: Progress | None, *, refusal: str = "", told: str = ""
) -> Drilled:
    return Drilled(
        drill_id=order.drill_id,
        act=order.act,
        at=at,
        step=before.step if before is not None else None,
        step_s=before.step_s if before is not None else None,
        refusal=refusal,
        told=told,
    )
