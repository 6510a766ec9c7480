"""A GPT, trained on random tokens: bare, or inside `runtime.train`. Prints one line of JSON with its rate.

    program.py bare|runtime small|350m STEPS

`350m` has 354 million parameters and runs in bf16 on a GPU; `small` is for a CPU.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from shoal import runtime

SIZES = {
    "small": {"layers": 4, "width": 256, "heads": 4, "vocabulary": 2048, "length": 128, "batch": 8},
    "350m": {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 50304, "length": 1024, "batch": 16},
}
WARM_UP = 10
H200_FLOPS = 989e12
"""Dense bf16, by the data sheet."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mixed(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        grown: torch.Tensor = self.back(functional.gelu(self.wide(self.norms[1](x))))
        return x + grown


class Gpt(nn.Module):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.words = nn.Embedding(size["vocabulary"], size["width"])
        self.places = nn.Embedding(size["length"], size["width"])
        self.blocks = nn.Sequential(*(Block(size["width"], size["heads"]) for _ in range(size["layers"])))
        self.norm = nn.LayerNorm(size["width"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.words.weight)


class Trainer:
    """One model on one device, and how long each of its steps took."""

    def __init__(self, size: dict[str, int], device: torch.device) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.model = Gpt(size).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        shape = (size["batch"], size["length"] + 1)
        self.batch = torch.randint(size["vocabulary"], shape, device=device)
        self.seconds: list[float] = []

    def train(self, steps: Iterable[int]) -> None:
        replica = DistributedDataParallel(self.model)
        began = time.perf_counter()
        for _ in steps:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = replica(self.batch[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten())
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds.append(now - began)
            began = now


def main() -> None:
    how, size, steps = sys.argv[1], SIZES[sys.argv[2]], int(sys.argv[3])
    device = torch.device("cuda" if sys.argv[2] == "350m" else "cpu")
    torch.set_num_threads(1)
    trainer = Trainer(size, device)
    if how == "runtime":
        runtime.train(
            lambda run: trainer.train(run.steps(steps)),
            {"model": trainer.model, "optimizer": trainer.optimizer},
        )
    else:
        for name, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29611"),
        ):
            os.environ.setdefault(name, value)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        trainer.train(range(steps))
        dist.destroy_process_group()
    report(trainer)


def report(trainer: Trainer) -> None:
    step_s = statistics.median(trainer.seconds[WARM_UP:])
    tokens = trainer.size["batch"] * trainer.size["length"]
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    rate = tokens / step_s
    attention = 12 * trainer.size["layers"] * trainer.size["width"] * trainer.size["length"]
    facts = {"step_s": step_s, "tokens_per_s": rate, "parameters": parameters}
    facts["mfu"] = rate * (6 * parameters + attention) / H200_FLOPS
    print("RATE", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
