"""Where a rank computes and how ranks talk: the same program on CPUs and on GPUs."""

from __future__ import annotations

import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = int(os.environ.get("STEPS", "40"))
PACE_S = float(os.environ.get("PACE_S", "0"))
"""Rest after each step: so small a model is trained before one can look."""
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "10"))


def device() -> torch.device:
    """This rank's GPU, shared where there are fewer than ranks; else the CPU, one thread of it."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(mine)
    return mine


def backend() -> str:
    """NCCL wants a GPU for every rank of the node; gloo does with less."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if 0 < ranks <= torch.cuda.device_count() else "gloo"


def join() -> tuple[torch.device, int, int]:
    """Meet the other ranks. This rank's device, its number, and how many there are."""
    mine = device()
    dist.init_process_group(backend())
    torch.manual_seed(0)
    return mine, dist.get_rank(), dist.get_world_size()


def tell(step: int, loss: float) -> None:
    print(f"step {step + 1:3d} of {STEPS}  loss {loss:.4f}", flush=True)
    time.sleep(PACE_S)


def is_time_to_save(step: int) -> bool:
    return (step + 1) % SAVE_EVERY == 0 or step + 1 == STEPS


def fingerprint(model: nn.Module) -> str:
    """Equal for equal weights, bit by bit. A collective where weights are spread over ranks."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        digest.update(name.encode() + whole.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
