"""Everything a step changes, held by each replica: copied from one that has it to one that has not."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Stateful(Protocol):
    """What modules, optimizers, schedulers and samplers have in common."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class State:
    """Named parts of a training run, and how many steps are in them. The same on every rank."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = dict(parts)
        self.step = 0
        """Complete steps."""
        self.is_fresh = True
        """Nothing was trained into it, here or anywhere: the first group starts from what it was built as."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **{name: part.state_dict() for name, part in self._parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.is_fresh = False
        for name, part in self._parts.items():
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
    if me == source:
        _send(state, behind)
    elif me in behind:
        _receive(state, source)
    return f"rank {source}" if behind else "here"


def _told_by_all(step: int) -> list[int]:
    mine = torch.tensor([step], dtype=torch.int64, device=_device())
    theirs = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return [int(one) for one in theirs]


def _send(state: State, ranks: list[int]) -> None:
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(_device())
    size = torch.tensor([data.numel()], dtype=torch.int64, device=_device())
    for rank in ranks:
        dist.send(size, rank)
        dist.send(data, rank)


def _receive(state: State, source: int) -> None:
    size = torch.zeros(1, dtype=torch.int64, device=_device())
    dist.recv(size, source)
    data = torch.empty(int(size), dtype=torch.uint8, device=_device())
    dist.recv(data, source)
    # Sent by a rank of this very job: its own code, its own user.
    state.load_state_dict(torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=True))


def _device() -> torch.device:
    """Where this group's collectives want their tensors."""
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
