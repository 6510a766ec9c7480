"""A loop of one's own with Accelerate, on made-up data, with Shoal's tracker.

It resumes from its newest checkpoint by itself. Runs alone and under `accelerate launch`, too.
"""

import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from shoal.runtime.accelerate import ShoalTracker

STEPS = int(os.environ.get("STEPS", "200"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0.02"))
FOLDER = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"))
SAVED = FOLDER / "last.pt"

tracker = ShoalTracker()
accelerator = Accelerator(cpu=True, log_with=tracker)
accelerator.init_trackers("sums")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
first = 0
if SAVED.exists():
    saved = torch.load(SAVED)
    first = saved["step"]
    model.load_state_dict(saved["model"])
print("resumes from step", first, flush=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

for step in range(first + 1, STEPS + 1):
    x = torch.randn(16, 8)
    time.sleep(PAUSE_S)
    loss = (model(x).squeeze(1) - x.sum(1)).pow(2).mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.log({"loss": loss.item()}, step=step)
    tracker.step(step)
    if step % 10 == 0 and accelerator.is_main_process:
        FOLDER.mkdir(exist_ok=True)
        torch.save(
            {"step": step, "model": accelerator.unwrap_model(model).state_dict()}, SAVED.with_suffix(".new")
        )
        SAVED.with_suffix(".new").rename(SAVED)
        tracker.saved(step)
accelerator.end_training()
