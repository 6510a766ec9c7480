"""Run a training function in one group after the other, in the same process, until it is done."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.runtime.arguments import check_parts, whole
from shoal.runtime.board import Place
from shoal.runtime.metrics import voice
from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints
from shoal.runtime.rank.farewell import Farewell, Gone
from shoal.runtime.rank.leaving import leave
from shoal.runtime.rank.lines import lines, watch_groups
from shoal.runtime.rank.meeting import meet
from shoal.runtime.rank.member import Member
from shoal.runtime.rank.state import State, Stateful, level
from shoal.runtime.rank.timing import Timing, watch

SEED_STRIDE = 1_000_003


class Run:
    """One group, as the training function sees it."""

    def __init__(
        self,
        member: Member,
        state: State,
        seed: int,
        farewell: Farewell,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self._member = member
        self._state = state
        self._seed = seed
        self._checkpoints = checkpoints
        self._farewell = farewell
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])

    @property
    def step(self) -> int:
        """How many steps are complete."""
        return self._state.step

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps still to do, from 0 to `total` - 1.

        A step is complete when the next one is asked for: up to then a failure anywhere undoes it. What a
        step draws at random depends on its number, the rank and the seed alone: done again, it is the same.
        Where there are checkpoints and everybody is asked to stop (SIGTERM), all ranks save after the same
        step and `Gone`, a `SystemExit`, is raised here.
        """
        return self._steps(whole("total", total, 0))

    def _steps(self, total: int) -> Iterator[int]:
        if self._state.step < total:
            self._member.goes_on()  # it may have come to the end of fewer steps before
        timing = Timing(is_told=self.rank == 0, world_size=self.world_size, stalled_s=self._stalled_s)
        while self._state.step < total:
            voice().step = step = self._state.step
            seed_all(self._seed, step, self.rank)
            yield step
            self._state.step += 1
            self._state.is_fresh = False
            self._member.at_step(self._state.step)
            if self._checkpoints is not None:
                self._save(self._checkpoints)
            timing.lap(step, self._stalled_s)
        self._member.is_done()

    @property
    def _stalled_s(self) -> float:
        return 0.0 if self._checkpoints is None else self._checkpoints.stalled_s

    def _save(self, checkpoints: Checkpoints) -> None:
        step = self._state.step
        is_last = self._farewell.is_time(step)
        if is_last or checkpoints.is_due(step):
            checkpoints.save(self._state.parts, step)
        if is_last:
            self._member.is_done()
            if checkpoints.wait() != step:
                raise RuntimeError(f"step {step} could not be saved before the end")
            raise Gone


def train(
    program: Callable[[Run], None],
    parts: Mapping[str, Stateful],
    *,
    backend: str | None = None,
    checkpoints: Checkpoints | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> None:
    """Join the group, call `program`, leave; when a peer is lost, join the next group and call it again.

    `parts` is everything a step changes, held whole by every rank: the model, the optimizer, the scheduler.
    A rank that replaces a lost one gets them from a rank that has them, so no step is lost. Where no rank has
    them, as when a job is tried again, they come from `checkpoints`, which are saved whenever one is due. An
    error of this rank's own is raised; a `TypeError` about the arguments, before anybody is joined.
    """
    _check(program, parts, checkpoints)
    watch()
    watch_groups()
    member, state = Member(), State(parts)
    member.waits_for(timeout_s)
    lines.follow(member.newest)
    farewell = Farewell(member)
    if checkpoints is not None:
        farewell.listen()
    print_error = sys.excepthook
    while True:
        place = member.next()
        try:
            _join(member, place, backend, timeout_s)
            member.joined()
            source = level(state)
            if not state.is_fresh and checkpoints is not None:
                checkpoints.resume(state.step)
            if state.is_fresh and checkpoints is not None and (step := checkpoints.load(parts)) is not None:
                state.step, state.is_fresh, source = step, False, "a checkpoint"
            if place.generation > 0:
                sys.stderr.write(f"shoal: group {place.generation}, step {state.step} from {source}\n")
            farewell.enter(state.step)
            program(Run(member, state, seed, farewell, checkpoints))
            member.is_done()
            if checkpoints is not None:
                checkpoints.wait()
        except Gone:
            _end(farewell)
            raise
        except Exception as error:
            farewell.give_up(error)
            leave()
            if not member.is_group_over(error):
                raise
            sys.excepthook = print_error  # with each group torch has it name the rank once more
        else:
            _end(farewell)
            member.is_gone()
            return


def _check(program: object, parts: object, checkpoints: object) -> None:
    if not callable(program):
        raise TypeError(f"the program is {program!r:.60}; pass a function that takes a `Run`")
    check_parts(parts)
    if not isinstance(checkpoints, Checkpoints | None):
        raise TypeError(f"checkpoints={checkpoints!r:.60}; pass `runtime.Checkpoints(...)`")


def _join(member: Member, place: Place, backend: str | None, timeout_s: float) -> None:
    """Outside of Shoal as torchrun's environment says; else where and as whom our supervisor says."""
    lines.begin(place.generation)
    ours: dict[str, Any] = {}
    if member.has_supervisor:
        with lines.noted():
            ours = {"store": meet(member, place, timeout_s), "rank": place.rank}
        ours["world_size"] = int(os.environ["WORLD_SIZE"])
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **ours)


def _end(farewell: Farewell) -> None:
    """Leave a group that all others leave too. Nobody may refer to it at the end of the process."""
    farewell.leave()
    dist.destroy_process_group()


def seed_all(seed: int, step: int, rank: int) -> None:
    """Make what comes next at random a function of these three."""
    number = ((seed * SEED_STRIDE + step) * SEED_STRIDE + rank) % (1 << 63)
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % (1 << 32))
