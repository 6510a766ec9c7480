"""A group that was given up leaves nothing behind that breaks the next one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shoal.runtime.rank.process_group import leave_group


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0


def form(world_size: int, timeout_s: float) -> None:
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=world_size, timeout=limit)


def name() -> str:
    group = dist.group.WORLD
    assert group is not None
    return group.group_name


def test_group_after_an_unformed_one_has_the_name_that_new_ranks_use() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            form(2, 0.2)  # no other rank comes
        leave_group()
    form(1, 60.0)
    assert name() == "0", "under which all ranks find each other's addresses"


def test_group_after_a_broken_one_has_the_same_name() -> None:
    form(1, 60.0)
    dist.new_group([0])
    leave_group()
    form(1, 60.0)
    assert name() == "0"
