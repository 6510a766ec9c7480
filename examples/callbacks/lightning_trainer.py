"""The Trainer of Lightning on made-up data, with Shoal's callback: one line more than without.

It resumes from its newest checkpoint by itself. Runs alone and under torchrun, too.
"""

import os
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.runtime.lightning import ShoalCallback

STEPS = int(os.environ.get("STEPS", "200"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0.02"))
FOLDER = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"))


class Sums(lightning.LightningModule):
    """Learns to add eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        time.sleep(PAUSE_S)
        loss = (self.net(x).squeeze(1) - y).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
numbers = torch.randn(512, 8)
last = FOLDER / "last.ckpt"
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
    max_steps=STEPS,
    log_every_n_steps=5,
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(FOLDER, every_n_train_steps=10, save_last=True), ShoalCallback()],
)
found = last if last.exists() else None
print("resumes from", found, flush=True)
trainer.fit(Sums(), DataLoader(TensorDataset(numbers, numbers.sum(1)), batch_size=16), ckpt_path=found)
