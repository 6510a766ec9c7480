"""A tiny training run for tests of checkpoints, and real ranks to run it in."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from shoal.runtime.files import checkpoint_storage
from shoal.runtime.rank.checkpoint.background_save import CheckpointStage
from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints
from shoal.runtime.rank.checkpoint.folder_store import FolderStore
from shoal.runtime.rank.sampler import Sampler

Parts = dict[str, Any]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def launch(program: Callable[..., None], world: int, *args: object) -> None:
    """Run `program(rank, *args)` as so many ranks of a gloo group; raises what the first to fail raised."""
    port = free_port()
    # Forked from one process that has imported torch: 3 s of a processor less for each rank.
    multiprocessing.set_forkserver_preload([__name__])
    start_processes(  # type: ignore[no-untyped-call]
        _rank, (world, port, program, args), nprocs=world, start_method="forkserver"
    )


def _rank(rank: int, world: int, port: int, program: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    join_group(rank, world, port)
    program(rank, *args)
    dist.destroy_process_group()


def join_group(rank: int, world: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)


def build(kind: str = "plain", seed: int = 0, *, has_means: bool = False) -> Parts:
    """`has_means`: with a layer that keeps running means, which a forward pass changes."""
    torch.manual_seed(seed)
    norm = torch.nn.BatchNorm1d(17) if has_means else torch.nn.LayerNorm(17)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 17), norm, torch.nn.Tanh(), torch.nn.Linear(17, 4))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        "sampler": Sampler(64, global_batch=8, seed=5),
    }


def train(parts: Parts, begin: int, end: int) -> None:
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(9))
    sampler = parts["sampler"]
    for _ in range(begin, end):
        indices = [index for index, _ in zip(sampler, range(sampler.batch_size), strict=False)]
        sampler.position += sampler.global_batch
        parts["optimizer"].zero_grad()
        parts["model"](data[indices]).square().mean().backward()
        parts["optimizer"].step()
        parts["scheduler"].step()


def full_tensors(parts: Parts) -> dict[str, torch.Tensor]:
    """The model's full tensors, on every rank."""
    options = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = get_model_state_dict(parts["model"], options=options)
    return {key: value.clone() for key, value in state.items()}


def is_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def resume_exactly(rank: int, folder: str) -> None:
    """Each kind: train, save, train on; begin anew from the save: the same weights at the end."""
    for kind in ("ddp", "fsdp"):
        path = f"{folder}/{kind}"
        parts = build(kind)
        with Checkpoints(path) as checkpoints:
            assert checkpoints.load(parts) is None
            train(parts, 0, 3)
            checkpoints.save(parts, 3)
            at_three = full_tensors(parts)
            train(parts, 3, 6)
        if rank == 0:
            torch.save(at_three, f"{folder}/{kind}.pt")
        again = build(kind, seed=1)
        assert Checkpoints(path).load(again) == 3
        assert is_same(full_tensors(again), at_three), kind
        train(again, 3, 6)
        assert is_same(full_tensors(again), full_tensors(parts)), kind
        assert again["sampler"].position == parts["sampler"].position
        assert again["scheduler"].state_dict() == parts["scheduler"].state_dict()


def load_of_one_process(rank: int, folder: str) -> None:
    """What one process has saved, in two ranks that shard it; then all pass over a damaged newest one."""
    parts = build("fsdp", seed=1)
    checkpoints = Checkpoints(f"{folder}/plain")
    assert checkpoints.load(parts) == 3
    expected = torch.load(f"{folder}/plain.pt", weights_only=True)
    assert is_same(full_tensors(parts), expected)
    train(parts, 3, 4)
    checkpoints.save(parts, 4)
    checkpoints.wait()
    dist.barrier()
    if rank == 0:
        (newest,) = Path(folder, "plain").glob("step-000000000004-*")
        victim = max(newest.glob("*.distcp"), key=lambda path: path.name)
        victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    dist.barrier()
    assert Checkpoints(f"{folder}/plain").load(parts) == 3
    assert is_same(full_tensors(parts), expected)


def go_on_in_another_group(rank: int, folder: str, port: int) -> None:
    """The group breaks with a save under way; the same processes form the next one, and save again."""
    os.environ["SHOAL_EPOCH"], os.environ["SHOAL_RENDEZVOUS_ROUND"] = "1", "0"
    parts, checkpoints = build("ddp"), Checkpoints(folder)
    checkpoints.load(parts)
    train(parts, 0, 1)
    checkpoints.save(parts, 1)
    checkpoints.wait()
    checkpoints.save(parts, 2)
    dist.destroy_process_group()
    os.environ["SHOAL_RENDEZVOUS_ROUND"] = "1"
    join_group(rank, 2, port)
    again = build("ddp", seed=1)
    assert checkpoints.load(again) in {1, 2}
    checkpoints.save(again, 3)
    assert checkpoints.wait() == 3
    names = FolderStore(folder, keep=3).names()
    assert (names[0].step, names[0].fence.rendezvous_round) == (3, 1)


def save_where_one_rank_cannot(rank: int, folder: str) -> None:
    """One rank has no memory left for a save: nobody waits for it, and the next save is whole."""
    parts, checkpoints = build("ddp"), Checkpoints(folder)
    checkpoints.load(parts)
    train(parts, 0, 1)
    copy = CheckpointStage.copy
    if rank == 1:
        CheckpointStage.copy = _fail_copy  # type: ignore[method-assign, assignment]
    checkpoints.save(parts, 1)
    assert checkpoints.wait() is None
    CheckpointStage.copy = copy  # type: ignore[method-assign]
    checkpoints.save(parts, 1)
    assert checkpoints.wait() == 1


def _fail_copy(*_: object) -> None:
    raise MemoryError("no memory for a copy")


def lose_a_node(rank: int, home: str, kind: str, per_node: int, lost: int) -> None:
    """Two nodes save to each other's memory; one node and the disk are lost; all load."""
    node, local = divmod(rank, per_node)
    os.environ.update(WORLD_SIZE=str(2 * per_node), LOCAL_WORLD_SIZE=str(per_node))
    os.environ.update(LOCAL_RANK=str(local), GROUP_RANK=str(node))
    os.environ.update(SHOAL_ATTEMPT_ID=f"att_{kind}", SHOAL_NODE=f"n{node}")
    checkpoint_storage.MEMORY = home
    disk = Path(home) / "disk"
    parts, checkpoints = build(kind), Checkpoints(str(disk), memory=True)
    for step in (1, 2):
        train(parts, step - 1, step)
        checkpoints.save(parts, step)
    assert checkpoints.wait() == 2
    memory = Path(checkpoint_storage.memory_folder(os.getuid(), f"att_{kind}", f"n{node}"))
    assert [path.name for path in memory.glob("step-*")] == ["step-000000000002-1-0"]
    dist.barrier()
    if local == 0 and node == lost:
        shutil.rmtree(memory)
        memory.mkdir()
    if rank == 0:
        shutil.rmtree(disk)
    dist.barrier()
    again, later = build(kind, seed=1), Checkpoints(str(disk), memory=True)
    assert later.load(again) == 2
    assert is_same(full_tensors(again), full_tensors(parts))
    dist.barrier()
    assert not list(memory.glob(".reading-*"))
    train(again, 2, 3)
    later.save(again, 3)
    assert later.wait() == 3


def lose_both_nodes(rank: int, home: str) -> None:
    """Nothing is left in memory, and one file of what is on disk is damaged in the newest: the one before."""
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", GROUP_RANK=str(rank))
    os.environ.update(SHOAL_ATTEMPT_ID="att_both", SHOAL_NODE=f"n{rank}")
    checkpoint_storage.MEMORY = home
    parts, checkpoints = build("fsdp"), Checkpoints(f"{home}/disk", memory=True)
    train(parts, 0, 1)
    checkpoints.save(parts, 1)
    assert checkpoints.wait() == 1
    memory = Path(checkpoint_storage.memory_folder(os.getuid(), "att_both", f"n{rank}"))
    for shard in memory.glob("step-*/__1_*.distcp"):
        shard.write_bytes(b"x")
    dist.barrier()
    again = build("fsdp", seed=1)
    assert Checkpoints(f"{home}/disk", memory=True).load(again) == 1
    assert is_same(full_tensors(again), full_tensors(parts))
