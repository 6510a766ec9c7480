"""The program that every contestant runs: a data-parallel network whose every step writes a line to a file.

    job.py plain|resilient STEPS FILE

`plain` is what people write for torchrun: it saves every tenth step and loads what it finds. `resilient`
hands its parts to `shoal.runtime`. The network and the batches are the same.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal import runtime

WIDTH, DEPTH, STEP_S, SAVE_EVERY = 1024, 4, 0.05, 10
BORN = time.time_ns()
"""Distinguishes processes with equal pids, each in a namespace of its own."""


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [m for _ in range(DEPTH) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def one_step(replica: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    batch = torch.Generator().manual_seed(step * 1000 + rank)
    optimizer.zero_grad()
    loss = replica(torch.randn(16, WIDTH, generator=batch)).pow(2).mean()
    loss.backward()
    optimizer.step()
    time.sleep(STEP_S)


def note(fd: int, step: int, rank: int) -> None:
    os.write(fd, f"{time.time():.6f} {os.getpid()} {BORN} {rank} {step}\n".encode())


def plain(steps: int, fd: int, saved: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = network()
    first = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    replica = DistributedDataParallel(model)
    for step in range(first, steps):
        one_step(replica, optimizer, step, rank)
        note(fd, step, rank)
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            part = saved.with_suffix(".part")
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(whole, part)
            part.replace(saved)
    dist.destroy_process_group()


def resilient(steps: int, fd: int) -> None:
    model, optimizer = network()

    def program(run: runtime.Run) -> None:
        replica = DistributedDataParallel(model)
        for step in run.steps(steps):
            one_step(replica, optimizer, step, run.rank)
            note(fd, step, run.rank)

    runtime.train(program, {"model": model, "optimizer": optimizer})


def main() -> None:
    how, steps, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    if how == "plain":
        plain(steps, fd, path.with_suffix(".pt"))
    else:
        resilient(steps, fd)


if __name__ == "__main__":
    main()
