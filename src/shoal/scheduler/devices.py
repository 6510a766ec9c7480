"""What a project holds or asks for, and what it is guaranteed and allowed: GPUs and thousandths of CPUs."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.people import Devices
from shoal.scheduler.amounts import Demand, millicpus_needed


class Amount(NamedTuple):
    """Over all nodes together."""

    num_gpus: int
    millicpus: int


class ProjectView(msgspec.Struct, frozen=True, kw_only=True):
    """A project as the scheduler sees it. The fields mean what they mean in `model.people.Project`."""

    name: str
    parent: str | None = None
    quota: Devices | None = None
    limit: Devices | None = None
    borrow: Devices | None = None
    weight: float = 1.0


def asked_by(demand: Demand) -> Amount:
    """The least it can start with."""
    need = demand.need
    return Amount(need.num_gpus * demand.min_nodes, need.millicpus * demand.min_nodes)


def held_by(allocation: Allocation) -> Amount:
    return Amount(
        sum(len(share.gpu_ids) for share in allocation),
        sum(millicpus_needed(share.cpus) for share in allocation),
    )
