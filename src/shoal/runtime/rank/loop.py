"""Run a training function in one rank group after another, in the same process, until it returns."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.runtime.metrics import metric_channel
from shoal.runtime.rank.arguments import check_parts, whole_number
from shoal.runtime.rank.board import RankAssignment
from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints
from shoal.runtime.rank.graceful_stop import GracefulExit, GracefulStop
from shoal.runtime.rank.membership import RankMembership
from shoal.runtime.rank.process_group import connections, leave_group, rendezvous, watch_groups
from shoal.runtime.rank.timing import StepTiming, instrument_torch
from shoal.runtime.rank.training_state import Stateful, TrainingState, synchronize

SEED_STRIDE = 1_000_003


class Run:
    """The training function's view of one rank group."""

    def __init__(
        self,
        membership: RankMembership,
        state: TrainingState,
        seed: int,
        graceful_stop: GracefulStop,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self._membership = membership
        self._state = state
        self._seed = seed
        self._checkpoints = checkpoints
        self._graceful_stop = graceful_stop
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])

    @property
    def step(self) -> int:
        """How many steps are complete."""
        return self._state.step

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps, from 0 to `total` - 1.

        A step is complete when the program asks for the next one. Until then a failure of any rank undoes it.
        The random numbers of a step depend only on its number, the rank and the seed, so a repeated step
        draws the same ones. If the job has checkpoints and is asked to stop (SIGTERM), all ranks save after
        the same step, and this raises `GracefulExit`, a `SystemExit`.
        """
        return self._steps(whole_number("total", total, 0))

    def _steps(self, total: int) -> Iterator[int]:
        if self._state.step < total:
            self._membership.resume_steps()  # an earlier call may have reached the end of fewer steps
        timing = StepTiming(
            should_report=self.rank == 0, world_size=self.world_size, stalled_s=self._stalled_s
        )
        while self._state.step < total:
            metric_channel().step = step = self._state.step
            seed_all(self._seed, step, self.rank)
            yield step
            self._state.step += 1
            self._state.is_fresh = False
            self._membership.record_step(self._state.step)
            if self._checkpoints is not None:
                self._save(self._checkpoints)
            timing.lap(step, self._stalled_s)
        self._membership.mark_done()

    @property
    def _stalled_s(self) -> float:
        return 0.0 if self._checkpoints is None else self._checkpoints.stalled_s

    def _save(self, checkpoints: Checkpoints) -> None:
        step = self._state.step
        is_last = self._graceful_stop.is_stop_step(step)
        if is_last or checkpoints.is_due(step):
            checkpoints.save(self._state.parts, step)
        if is_last:
            self._membership.mark_done()
            if checkpoints.wait() != step:
                raise RuntimeError(f"step {step} could not be saved before the end")
            raise GracefulExit


def train(
    program: Callable[[Run], None],
    parts: Mapping[str, Stateful],
    *,
    backend: str | None = None,
    checkpoints: Checkpoints | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> None:
    """Join the group, call `program`, leave. If a peer is lost, join the next group and call `program` again.

    `parts` is everything that a step changes: the model, the optimizer, the scheduler. Every rank holds all
    of it. A rank that replaces a lost one copies the parts from another rank, so no step is lost. If no rank
    has them, as after a retry of the job, they come from `checkpoints`, which are saved whenever a save is
    due. An error in this rank is raised. Wrong arguments raise `TypeError` before the rank joins a group.
    """
    _check(program, parts, checkpoints)
    instrument_torch()
    watch_groups()
    member, state = RankMembership(), TrainingState(parts)
    member.set_timeout(timeout_s)
    connections.cut_older(member.newest_round)
    graceful_stop = GracefulStop(member)
    if checkpoints is not None:
        graceful_stop.listen()
    print_error = sys.excepthook
    while True:
        place = member.wait_for_round()
        try:
            _join(member, place, backend, timeout_s)
            member.mark_joined()
            source = synchronize(state)
            if not state.is_fresh and checkpoints is not None:
                checkpoints.resume(state.step)
            if state.is_fresh and checkpoints is not None and (step := checkpoints.load(parts)) is not None:
                state.step, state.is_fresh, source = step, False, "a checkpoint"
            if place.rendezvous_round > 0:
                sys.stderr.write(f"shoal: group {place.rendezvous_round}, step {state.step} from {source}\n")
            graceful_stop.enter(state.step)
            program(Run(member, state, seed, graceful_stop, checkpoints))
            member.mark_done()
            if checkpoints is not None:
                checkpoints.wait()
        except GracefulExit:
            _leave_together(graceful_stop)
            raise
        except Exception as error:
            graceful_stop.give_up(error)
            leave_group()
            if not member.is_group_over(error):
                raise
            sys.excepthook = print_error  # torch wraps it again with each group to name the rank
        else:
            _leave_together(graceful_stop)
            member.mark_gone()
            return


def _check(program: object, parts: object, checkpoints: object) -> None:
    if not callable(program):
        raise TypeError(f"the program is {program!r:.60}; pass a function that takes a `Run`")
    check_parts(parts)
    if not isinstance(checkpoints, Checkpoints | None):
        raise TypeError(f"checkpoints={checkpoints!r:.60}; pass `runtime.Checkpoints(...)`")


def _join(membership: RankMembership, place: RankAssignment, backend: str | None, timeout_s: float) -> None:
    """Form the torch group: as the supervisor has assigned, or outside of Shoal from torchrun's variables."""
    connections.begin(place.rendezvous_round)
    ours: dict[str, Any] = {}
    if membership.has_supervisor:
        with connections.recording():
            ours = {"store": rendezvous(membership, place, timeout_s), "rank": place.rank}
        ours["world_size"] = int(os.environ["WORLD_SIZE"])
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **ours)


def _leave_together(graceful_stop: GracefulStop) -> None:
    """Leave a group that all other ranks leave, too, so that no reference to it is left at exit."""
    graceful_stop.leave()
    dist.destroy_process_group()


def seed_all(seed: int, step: int, rank: int) -> None:
    """Seed all random generators from these three numbers."""
    number = ((seed * SEED_STRIDE + step) * SEED_STRIDE + rank) % (1 << 63)
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % (1 << 32))
