"""How long a save holds training up: `torch.save`, and Shoal's checkpoints, in turns in one run.

    python -m benchmarks.checkpoint_stall [--gigabytes 0.75] [--rounds 5] [--device cuda]

A save's stall is what the training thread waits for it: in the call, and before the next optimizer step. The
state is a model with Adam's moments; between a save and the step after it, work that takes about as long as a
forward and a backward pass would.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measure import table
from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints

LAYERS = 8


def build(gigabytes: float, device: str) -> dict[str, Any]:
    """A model and an optimizer that together hold this much: parameters and two moments, four bytes each."""
    width = int((gigabytes * 1e9 / 12 / LAYERS) ** 0.5)
    layers = [torch.nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {"model": model, "optimizer": optimizer}


def passes(parts: dict[str, Any]) -> None:
    """Run a forward and a backward pass."""
    width = parts["model"][0].in_features
    data = torch.randn(64, width, device=parts["model"][0].weight.device)
    parts["optimizer"].zero_grad()
    parts["model"](data).square().mean().backward()
    if data.is_cuda:
        torch.cuda.synchronize()


@dataclass
class Save:
    stall_s: float
    passes_s: float
    """The passes after the save. While a save is under way, they share the machine with it."""
    committed_s: float


def with_torch_save(parts: dict[str, Any], path: Path) -> Save:
    began = time.perf_counter()
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    stalled = time.perf_counter()
    passes(parts)
    passed = time.perf_counter()
    parts["optimizer"].step()
    return Save(stall_s=stalled - began, passes_s=passed - stalled, committed_s=stalled - began)


def with_checkpoints(parts: dict[str, Any], checkpoints: Checkpoints, step: int) -> Save:
    began = time.perf_counter()
    checkpoints.save(parts, step)
    called = time.perf_counter()
    passes(parts)
    passed = time.perf_counter()
    checkpoints.staged()
    stall_s = called - began + time.perf_counter() - passed
    parts["optimizer"].step()
    checkpoints.wait()
    return Save(stall_s=stall_s, passes_s=passed - called, committed_s=time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=0.75)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    parts = build(options.gigabytes, options.device)
    passes(parts)
    parts["optimizer"].step()
    cache = Path.cwd() / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stall-", dir=cache) as folder:
        checkpoints = Checkpoints(f"{folder}/shoal", keep=1)
        plain, ours = [], []
        for number in range(options.rounds):
            plain.append(with_torch_save(parts, Path(folder, "plain.pt")))
            ours.append(with_checkpoints(parts, checkpoints, number + 1))
    # The first save allocates the memory that all others reuse.
    rows = {"torch.save": plain, "shoal, first save": ours[:1], "shoal, after that": ours[1:]}
    title = f"{options.gigabytes:g} GB on {options.device}: seconds that training waits for a save, medians"
    print(show(title, {name: saves for name, saves in rows.items() if saves}))


def show(title: str, rows: dict[str, list[Save]]) -> str:
    base = median(timing.stall_s for timing in rows["torch.save"])
    lines = []
    for name, saves in rows.items():
        stall = median(timing.stall_s for timing in saves)
        after, done = (
            median(timing.passes_s for timing in saves),
            median(timing.committed_s for timing in saves),
        )
        lines.append(
            [name, str(len(saves)), f"{stall:.4f}", f"{stall / base:.4f}x", f"{after:.3f}", f"{done:.2f}"]
        )
    header = ["", "saves", "stall", "of torch.save", "passes after it", "until written"]
    return table(
        title, header, lines, ["Shoal's are synced to disk with a hash of every file; torch.save's are not."]
    )


if __name__ == "__main__":
    main()
