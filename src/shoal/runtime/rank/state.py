"""Everything a step changes, held by each replica: copied from one that has it to one that has not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shoal.runtime.rank import copying


class Stateful(Protocol):
    """What modules, optimizers, schedulers and samplers have in common."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class State:
    """Named parts of a training run, and how many steps are in them. The same on every rank."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self.parts = dict(parts)
        self.step = 0
        """Complete steps."""
        self.is_fresh = True
        """Nothing was trained into it, here or anywhere: the first group starts from what it was built as."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **{name: part.state_dict() for name, part in self.parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.is_fresh = False
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def level(state: State) -> str:
    """Bring every rank of the group to the newest step that any of them has. Returns where it came from.

    A collective: all ranks call it when they have joined, before the first step.
    """
    steps = _told_by_all(-1 if state.is_fresh else state.step)
    newest = max(steps)
    if newest < 0:
        return "start"
    source, me = steps.index(newest), dist.get_rank()
    behind = [rank for rank, step in enumerate(steps) if step < newest]
    if me == source and behind:
        copying.send(state.state_dict(), behind)
    elif me in behind:
        state.load_state_dict(copying.receive(source))
    return f"rank {source}" if behind else "here"


def _told_by_all(step: int) -> list[int]:
    mine = torch.tensor([step], dtype=torch.int64, device=copying.device())
    theirs = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return [int(one) for one in theirs]
