"""The Trainer of Transformers on made-up data, with Shoal's callback: one line more than without.

It resumes from its newest checkpoint by itself, as any Trainer can. Runs alone and under torchrun, too.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from shoal.runtime.transformers import ShoalCallback

STEPS = int(os.environ.get("STEPS", "200"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0.02"))
FOLDER = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"))


class Sums(nn.Module):
    """Learns to add eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(PAUSE_S)
        return {"loss": (self.net(x).squeeze(1) - y).pow(2).mean()}


torch.manual_seed(0)
numbers = torch.randn(512, 8)
trainer = Trainer(
    model=Sums(),
    args=TrainingArguments(
        output_dir=FOLDER,
        max_steps=STEPS,
        per_device_train_batch_size=16,
        logging_steps=5,
        save_steps=10,
        save_total_limit=2,
        use_cpu=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=[{"x": x, "y": x.sum()} for x in numbers],
    callbacks=[ShoalCallback()],
)
found = get_last_checkpoint(FOLDER) if FOLDER.is_dir() else None
print("resumes from", found, flush=True)
trainer.train(resume_from_checkpoint=found)
