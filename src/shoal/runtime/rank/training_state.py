"""The training state that every rank holds, and how ranks without it copy it from a rank that has it.

A state travels as its structure in bytes, and its tensors as they are in memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist


class TensorSlot(NamedTuple):
    """A placeholder for a tensor in the structure, with its number, shape and type."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def send_state(state: object, ranks: list[int]) -> None:
    """Send the state to these ranks, which call `receive_state`."""
    tensors: list[torch.Tensor] = []
    frame = pickle.dumps(_split_tensors(state, tensors))
    head = torch.frombuffer(bytearray(frame), dtype=torch.uint8).to(device())
    size = torch.tensor([head.numel()], dtype=torch.int64, device=device())
    packed = [tensor.to(device()).contiguous() for tensor in tensors]
    for rank in ranks:
        dist.send(size, rank)
        dist.send(head, rank)
        _transfer_all([dist.P2POp(dist.isend, tensor, rank) for tensor in packed])


def receive_state(source: int) -> Any:
    """Receive the state from `source`, a rank of the same job with the same code and user."""
    size = torch.zeros(1, dtype=torch.int64, device=device())
    dist.recv(size, source)
    head = torch.empty(int(size), dtype=torch.uint8, device=device())
    dist.recv(head, source)
    frame = pickle.loads(head.cpu().numpy().tobytes())  # noqa: S301 - from ourselves, see above
    slots = sorted(_slots(frame), key=lambda slot: slot.number)
    tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=device()) for slot in slots]
    _transfer_all([dist.P2POp(dist.irecv, tensor, source) for tensor in tensors])
    return _join_tensors(frame, [t.to(slot.device) for t, slot in zip(tensors, slots, strict=True)])


def _transfer_all(transfers: list[dist.P2POp]) -> None:
    """Transfer all tensors at once. Waiting for each in turn costs a context switch for every tensor."""
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()


def device() -> torch.device:
    """Return the device on which this group's collectives need their tensors."""
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")


def _split_tensors(value: object, tensors: list[torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return TensorSlot(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _split_tensors(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_split_tensors(one, tensors) for one in value]
    return value


def _slots(frame: object) -> list[TensorSlot]:
    if isinstance(frame, TensorSlot):
        return [frame]
    inner = frame.values() if isinstance(frame, dict) else frame if isinstance(frame, list) else ()
    return [slot for one in inner for slot in _slots(one)]


def _join_tensors(frame: object, tensors: list[torch.Tensor]) -> object:
    if isinstance(frame, TensorSlot):
        return tensors[frame.number]
    if isinstance(frame, dict):
        return {key: _join_tensors(one, tensors) for key, one in frame.items()}
    if isinstance(frame, list):
        return [_join_tensors(one, tensors) for one in frame]
    return frame


class Stateful(Protocol):
    """The common interface of modules, optimizers, schedulers and samplers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class TrainingState:
    """The named parts of a training run, and how many steps they contain. The same on every rank."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self.parts = dict(parts)
        self.step = 0
        """Complete steps."""
        self.is_fresh = True
        """Whether no rank has trained yet, so that the first group starts from the initial values."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **{name: part.state_dict() for name, part in self.parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.is_fresh = False
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def synchronize(state: TrainingState) -> str:
    """Bring every rank of the group to the newest step that any rank has. Return the source of the state.

    This is a collective: all ranks call it after they have joined, before the first step.
    """
    steps = _gather_steps(-1 if state.is_fresh else state.step)
    newest = max(steps)
    if newest < 0:
        return "start"
    source, me = steps.index(newest), dist.get_rank()
    behind = [rank for rank, step in enumerate(steps) if step < newest]
    if me == source and behind:
        send_state(state.state_dict(), behind)
    elif me in behind:
        state.load_state_dict(receive_state(source))
    return f"rank {source}" if behind else "here"


def _gather_steps(step: int) -> list[int]:
    mine = torch.tensor([step], dtype=torch.int64, device=device())
    theirs = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return [int(one) for one in theirs]
