"""Checkpoints of a model that is spread over ranks: every rank writes its part, and any layout reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

FOLDER = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"))
WHOLE = ".metadata"
"""Written last: a folder without it is half a checkpoint."""


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A collective: every rank calls it, after the same step."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=FOLDER / f"step-{step + 1:06d}")


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read the newest whole checkpoint, if there is one. How many steps are in it. A collective."""
    found: list[Any] = [max((path.parent for path in FOLDER.glob(f"step-*/{WHOLE}")), default=None)]
    dist.broadcast_object_list(found)  # all read the same one, whatever the others see at this moment
    newest = found[0]
    if newest is None:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(newest.name.removeprefix("step-"))
