"""DeepSpeed ZeRO: every rank keeps a piece of the optimizer's state and of the gradients.

Shoal gives ranks what DeepSpeed's own launcher gives them, so `deepspeed deepspeed_zero.py` in `run` is this
program as well; no host file and no SSH.
"""

from __future__ import annotations

import os
import sys

import group
import torch
from model import LanguageModel, Shape, batch, loss_of

try:
    import deepspeed
except ImportError:
    sys.exit("deepspeed_zero.py needs DeepSpeed\nhint: pip install torch, then pip install deepspeed")

FOLDER = os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints")
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,  # batches are cut here, not by DeepSpeed
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    device = group.device()
    # On CPUs it would compile a faster way between ranks of one node, for a minute or two. Gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(group.backend())
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shape = Shape()
    torch.manual_seed(0)
    model = LanguageModel(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=SETTINGS)
    engine.load_checkpoint(FOLDER)
    first = engine.global_steps
    print(f"rank {rank} of {ranks} begins after step {first}", flush=True)
    for step in range(first, group.STEPS):
        tokens, following = (part.to(device) for part in batch(shape, step, rank, ranks))
        loss = loss_of(engine(tokens), following)
        engine.backward(loss)
        engine.step()
        if rank == 0:
            group.tell(step, loss.item())
        if group.is_time_to_save(step):
            engine.save_checkpoint(FOLDER, tag=f"step-{step + 1:06d}")
    print(f"weights {group.fingerprint(model)}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
