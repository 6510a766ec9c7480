"""The same training with Ray Train. Arguments: the head's address, a folder to save in, the trace, the steps.

Elastic between one and two workers, as on two nodes of which one may be lost. It saves every tenth step, as
the others do, and resumes from the last save.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model

from benchmarks.recovery.job import SAVE_EVERY, network, note, one_step

FILE = "last.pt"


def work(config: dict[str, Any]) -> None:
    fd = os.open(config["trace"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    rank = train.get_context().get_world_rank()
    model, optimizer = network()
    first, saved = 0, train.get_checkpoint()
    if saved is not None:
        with saved.as_directory() as folder:
            state = torch.load(os.path.join(folder, FILE), weights_only=True)  # noqa: PTH118
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    replica = prepare_model(model)
    for step in range(first, config["steps"]):
        one_step(replica, optimizer, step, rank)
        note(fd, step, rank)
        if (step + 1) % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    whole = {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step + 1,
                    }
                    torch.save(whole, os.path.join(folder, FILE))  # noqa: PTH118
                kept = train.Checkpoint.from_directory(folder) if rank == 0 else None
                train.report({"step": step + 1}, checkpoint=kept)


def main() -> None:
    address, storage, trace, steps = sys.argv[1:]
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    ray.init(address=address, _node_ip_address=address.partition(":")[0], runtime_env={"env_vars": variables})
    TorchTrainer(
        work,
        train_loop_config={"trace": trace, "steps": int(steps)},
        scaling_config=train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 4}),
        run_config=train.RunConfig(
            storage_path=storage,
            name="elastic",
            failure_config=train.FailureConfig(max_failures=-1),
            checkpoint_config=train.CheckpointConfig(num_to_keep=3),
        ),
    ).fit()


if __name__ == "__main__":
    main()
