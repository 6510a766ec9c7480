"""DDP with `shoal.runtime`: a rank that is lost is replaced, and no step is. Runs under torchrun as well.

Every rank holds the whole model and takes its part of each batch. When a peer dies, `train` calls its
function again in the next group, with what the survivors have.
"""

from __future__ import annotations

import os
from pathlib import Path

import group
import torch
from model import LanguageModel, Shape, batch, loss_of
from torch.nn.parallel import DistributedDataParallel

from shoal import runtime

SAVED = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", ".")) / "ddp.pt"


class Begin:
    """After which step this attempt began: part of the state, because a rank that comes later must know."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    device = group.device()
    torch.manual_seed(0)
    model = LanguageModel(Shape()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin = Begin()
    parts = {"model": model, "optimizer": optimizer, "begin": begin}
    if SAVED.exists():
        for name, state in torch.load(SAVED, map_location=device, weights_only=True).items():
            parts[name].load_state_dict(state)

    def train(run: runtime.Run) -> None:
        print(f"rank {run.rank} of {run.world_size} begins after step {begin.step}", flush=True)
        replica = DistributedDataParallel(model)
        for done in run.steps(group.STEPS - begin.step):
            step = begin.step + done
            tokens, following = (part.to(device) for part in batch(Shape(), step, run.rank, run.world_size))
            loss = loss_of(replica(tokens), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run.rank == 0:
                group.tell(step, loss.item())
            if run.rank == 0 and group.is_time_to_save(step):
                save(parts, step)
        print(f"weights {group.fingerprint(model)}", flush=True)

    runtime.train(train, parts, backend=group.backend())


def save(parts: dict[str, torch.nn.Module | torch.optim.Optimizer | Begin], step: int) -> None:
    """Whole or not at all: a kill in the middle leaves the one before."""
    states = {name: part.state_dict() for name, part in parts.items()}
    unfinished = SAVED.with_suffix(".unfinished")
    torch.save({**states, "begin": {"step": step + 1}}, unfinished)
    unfinished.replace(SAVED)


if __name__ == "__main__":
    main()
