"""Run a training function in one group after the other, in the same process, until it is done."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints
from shoal.runtime.rank.leaving import leave
from shoal.runtime.rank.member import Member, until_open
from shoal.runtime.rank.state import State, Stateful, level

SEED_STRIDE = 1_000_003


class Run:
    """One group, as the training function sees it."""

    def __init__(
        self, member: Member, state: State, seed: int, checkpoints: Checkpoints | None = None
    ) -> None:
        self._member = member
        self._state = state
        self._seed = seed
        self._checkpoints = checkpoints
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
        """
        while self._state.step < total:
            seed_all(self._seed, self._state.step, self.rank)
            yield self._state.step
            self._state.step += 1
            self._state.is_fresh = False
            self._member.at_step(self._state.step)
            if self._checkpoints is not None and self._checkpoints.is_due(self._state.step):
                self._checkpoints.save(self._state.parts, self._state.step)


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
    error of this rank's own is raised.
    """
    member, state = Member(), State(parts)
    while True:
        place = member.next()
        try:
            if place.generation > 0:
                until_open(place)
            dist.init_process_group(
                backend or ("nccl" if torch.cuda.is_available() else "gloo"),
                timeout=timedelta(seconds=timeout_s),
            )
            member.joined()
            source = level(state)
            if state.is_fresh and checkpoints is not None and (step := checkpoints.load(parts)) is not None:
                state.step, state.is_fresh, source = step, False, "a checkpoint"
            if place.generation > 0:
                sys.stderr.write(f"shoal: group {place.generation}, step {state.step} from {source}\n")
            program(Run(member, state, seed, checkpoints))
            if checkpoints is not None:
                checkpoints.wait()
        except Exception:
            leave()
            if not member.is_group_over():
                raise
        else:
            dist.destroy_process_group()
            return


def seed_all(seed: int, step: int, rank: int) -> None:
    """Make what comes next at random a function of these three."""
    number = ((seed * SEED_STRIDE + step) * SEED_STRIDE + rank) % (1 << 63)
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % (1 << 32))
