"""What a project holds or asks for, and what it is guaranteed and allowed: in thousandths of devices."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.people import Devices
from shoal.scheduler.amounts import MILLI, Amounts, Demand, millicpus_needed


class Amount(NamedTuple):
    """Over all nodes together. A MIG slice counts as one GPU."""

    milligpus: int
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
    """The least it can start with; whole nodes may have more than that, as `taken_whole` tells."""
    need = demand.need
    return Amount(need.num_gpus * need.gpu_milli * demand.min_nodes, need.millicpus * demand.min_nodes)


def taken_whole(whole: Amounts, num_nodes: int) -> Amount:
    """By somebody to whom so many nodes are given that have `whole`, and all of it."""
    return Amount(whole.num_devices * MILLI * num_nodes, whole.millicpus * num_nodes)


def held_by(allocation: Allocation) -> Amount:
    milligpus = millicpus = 0
    for share in allocation:
        milligpus += len(share.gpu_ids) * share.gpu_milli
        millicpus += max(millicpus_needed(share.cpus), share.charged_millicpus)
    return Amount(milligpus, millicpus)
