"""Which rank writes what several of them hold alike. Pure.

The parts of a training run as named tensors, whatever the parallelism, and back.

Models and their optimizers by the names of parameters, which no wrapper and no sharding changes; anything
else as one small piece of bytes, the same on every rank.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from shoal.runtime.rank.training_state import Stateful


def assign_owners(held: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The rank that writes each key, given the bytes of each key on each rank: about as many for each.

    What is said to have no bytes is written by the first that holds it. Every rank that computes this from
    the same input gets the same answer.
    """
    holders: dict[str, list[int]] = {}
    for rank, keys in enumerate(held):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    loads = [0] * len(held)
    owners = {}
    for key in sorted(holders, key=lambda key: (-held[holders[key][0]][key], key)):
        first = holders[key][0]
        owner = min(holders[key], key=lambda rank: (loads[rank], rank)) if held[first][key] else first
        owners[key] = owner
        loads[owner] += held[owner][key]
    return owners


MODEL, OPTIMIZER, OTHER = "model/", "optimizer/", "other/"
GROUPS = "param_groups."
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

FlatState = dict[str, Any]


def capture(parts: Mapping[str, Stateful]) -> FlatState:
    """Everything in the parts by a flat name. Tensors are the parts' own; the rest are copies."""
    root, optimizers, others = _by_kind(parts)
    state = {MODEL + key: value for key, value in get_model_state_dict(root).items()}
    for name, optimizer in optimizers.items():
        whole = get_optimizer_state_dict(root, optimizer, options=FLAT)
        state |= {f"{OPTIMIZER}{name}/{key}": value for key, value in _pack_settings(whole).items()}
    return state | {OTHER + name: _encode(part.state_dict()) for name, part in others.items()}


def copy_buffers(parts: Mapping[str, Stateful], state: FlatState) -> FlatState:
    """`state` with copies of the tensors that a forward pass may change: running means and the like."""
    trained = _trained(parts)
    return {
        key: value.detach().clone() if _is_buffer(key, value, trained) else value
        for key, value in state.items()
    }


def restore(parts: Mapping[str, Stateful], state: FlatState) -> None:
    """Put back what `capture` took, after its tensors were filled and its bytes replaced."""
    root, optimizers, others = _by_kind(parts)
    set_model_state_dict(root, _below(MODEL, state))
    for name, optimizer in optimizers.items():
        whole = _unpack_settings(_below(f"{OPTIMIZER}{name}/", state))
        set_optimizer_state_dict(root, optimizer, whole, options=FLAT)
    for name, part in others.items():
        part.load_state_dict(_decode(state[OTHER + name]))


def optimizers_of(parts: Mapping[str, Stateful]) -> list[torch.optim.Optimizer]:
    return [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]


def replicated_bytes(parts: Mapping[str, Stateful], state: FlatState) -> dict[str, int]:
    """What several ranks hold alike, with its size. Shards of a DTensor are each rank's own.

    Buffers and bytes count nothing, so that the first rank's are taken: as DDP does, whose ranks' running
    means differ until it overwrites them with those of rank 0.
    """
    trained = _trained(parts)
    return {
        key: value.nbytes if isinstance(value, torch.Tensor) and not _is_buffer(key, value, trained) else 0
        for key, value in state.items()
        if not isinstance(value, DTensor)
    }


def _by_kind(
    parts: Mapping[str, Stateful],
) -> tuple[torch.nn.Module, dict[str, torch.optim.Optimizer], dict[str, Stateful]]:
    """The models under one root, the optimizers of their parameters, and all else."""
    root = torch.nn.ModuleDict({name: p for name, p in parts.items() if isinstance(p, torch.nn.Module)})
    parameter_ids = {id(one) for one in root.parameters()}
    optimizers, others = {}, {}
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer) and parameter_ids.issuperset(map(id, _parameters(part))):
            optimizers[name] = part
        elif not isinstance(part, torch.nn.Module):
            others[name] = part
    return root, optimizers, others


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])


def _pack_settings(whole: FlatState) -> FlatState:
    """With the settings of each parameter in one piece: a piece costs more to write than a number."""
    packed: FlatState = {}
    settings: dict[str, FlatState] = {}
    for key, value in whole.items():
        if key.startswith(GROUPS) and not isinstance(value, torch.Tensor):
            owner, _, setting = key.rpartition(".")
            settings.setdefault(owner, {})[setting] = value
        else:
            packed[key] = value
    return packed | {owner: _encode(values) for owner, values in settings.items()}


def _unpack_settings(packed: FlatState) -> FlatState:
    whole: FlatState = {}
    for key, value in packed.items():
        if key.startswith(GROUPS) and isinstance(value, bytes):
            whole |= {f"{key}.{setting}": one for setting, one in _decode(value).items()}
        else:
            whole[key] = value
    return whole


def _below(prefix: str, state: FlatState) -> FlatState:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _trained(parts: Mapping[str, Stateful]) -> set[int]:
    """Where the parameters lie in memory."""
    return {_memory(one) for one in _by_kind(parts)[0].parameters()}


def _is_buffer(key: str, value: Any, trained: set[int]) -> bool:
    return key.startswith(MODEL) and isinstance(value, torch.Tensor) and _memory(value) not in trained


def _memory(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _encode(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _decode(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
