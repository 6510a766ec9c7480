"""The distance between what tenants got and what they were entitled to.

Time is cut into slices. In each slice a tenant has a *demand*: the device-time its jobs held plus what its
waiting jobs would have held. The supply is what all tenants held together. A tenant is *entitled* to its part
by weighted max-min: equal parts for equal weights, at most its demand, and what one tenant does not want is
divided among the others. The *error* of a group of tenants is the part of all held device-time that went to
one tenant while another was entitled to it: 0 is fair, and 1 means that all of it went to the wrong tenants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.sim.workload import SimulationOutcome

NUM_SLICES = 1000
"""The most slices. A slice is never shorter than `SLICE_S`, because within minutes nothing divides evenly."""
SLICE_S = 3600.0

Floats = NDArray[np.float64]


class TenantShare(msgspec.Struct, frozen=True):
    """The share of one tenant, in device-seconds."""

    received: float
    entitled: float
    missed: float
    """Entitled to in some slice and not received in that slice. More in another slice does not make up for
    it.
    """

    @property
    def error(self) -> float:
        """The missed part of everything it was entitled to."""
        return self.missed / self.entitled if self.entitled else 0.0


class Fairness(msgspec.Struct, frozen=True):
    error: float
    parts: dict[str, TenantShare]


def fairness(
    outcome: SimulationOutcome, tenants: Sequence[str], weights: Mapping[str, float] | None = None
) -> Fairness:
    """`tenants` names the tenant of each job, by index. A missing weight is 1."""
    names = sorted(set(tenants))
    number = {name: place for place, name in enumerate(names)}
    of_job = np.array([number[name] for name in tenants], dtype=np.int64)
    held, wanted = _held_and_wanted(outcome, of_job, len(names))
    heavy = np.array([(weights or {}).get(name, 1.0) for name in names])
    entitled = max_min(wanted, held.sum(axis=1), heavy)
    total = float(held.sum())
    error = float(np.abs(held - entitled).sum()) / (2 * total) if total else 0.0
    missed = np.maximum(entitled - held, 0.0)
    sums = zip(names, held.sum(axis=0), entitled.sum(axis=0), missed.sum(axis=0), strict=True)
    return Fairness(
        error, {name: TenantShare(float(got), float(due), float(less)) for name, got, due, less in sums}
    )


def max_min(demands: Floats, supply: Floats, weights: Floats) -> Floats:
    """Divide each row of `supply` among its `demands`: weighted max-min, exact.

    In order of demand per weight, each takes its demand or its part of what is left, the smaller of the two.
    """
    order = np.argsort(demands / weights, axis=1, kind="stable")
    received = np.zeros_like(demands)
    left = supply.astype(float).copy()
    weight_left = np.full(len(supply), weights.sum())
    rows = np.arange(len(supply))
    for place in range(demands.shape[1]):
        column = order[:, place]
        part = np.minimum(demands[rows, column], left * weights[column] / weight_left)
        received[rows, column] = part
        left -= part
        weight_left = np.maximum(weight_left - weights[column], 1e-12)
    return received


def _held_and_wanted(
    outcome: SimulationOutcome, of_job: NDArray[np.int64], num_tenants: int
) -> tuple[Floats, Floats]:
    """Device-seconds in each slice (rows) for each tenant (columns): held, and held or waited for."""
    stays = outcome.holdings
    if not len(stays.job):
        return np.zeros((1, num_tenants)), np.zeros((1, num_tenants))
    job = np.array(stays.job)
    devices, begin, end = np.array(stays.devices), np.array(stays.begin), np.array(stays.end)
    submitted = np.array([work_job.submitted_at for work_job in outcome.workload.jobs])[job]
    first, last = float(submitted.min()), float(end.max())
    count = int(np.clip((last - first) // SLICE_S, 1, NUM_SLICES))
    edges = np.linspace(first, last, count + 1)
    held = _spread(begin, end, devices, of_job[job], edges, num_tenants)
    waited_since = np.where(_is_first(job), submitted, _previous_end(job, end))
    return held, held + _spread(waited_since, begin, devices, of_job[job], edges, num_tenants)


def _is_first(job: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a stay is its job's first. Stays are recorded as they end, so those of one job are in order."""
    first = np.zeros(len(job), dtype=bool)
    first[np.unique(job, return_index=True)[1]] = True
    return first


def _previous_end(job: NDArray[np.int64], end: Floats) -> Floats:
    """For each stay the end of its job's previous stay; any value for the first."""
    order = np.argsort(job, kind="stable")
    previous = np.empty_like(end)
    previous[order[1:]] = end[order[:-1]]
    previous[order[0]] = end[order[0]]
    return previous


def _spread(
    begin: Floats, end: Floats, devices: Floats, tenant: NDArray[np.int64], edges: Floats, num_tenants: int
) -> Floats:
    """Device-seconds of intervals in each slice, by integrating the number of held devices up to each edge.

    The integral up to an edge of an interval that began at b is devices * (edge - b), until it ends. So two
    sums over events before each edge are enough, whatever the number of slices an interval spans.
    """
    at = np.concatenate([begin, end])
    change = np.concatenate([devices, -devices])
    tenants_of = np.concatenate([tenant, tenant])
    slot = np.searchsorted(edges, at, side="left")
    shape = (len(edges) + 1, num_tenants)
    rate, offset = np.zeros(shape), np.zeros(shape)
    np.add.at(rate, (slot, tenants_of), change)
    np.add.at(offset, (slot, tenants_of), change * (at - edges[0]))
    upto = np.cumsum(rate, axis=0)[:-1] * (edges - edges[0])[:, None] - np.cumsum(offset, axis=0)[:-1]
    spread: Floats = np.maximum(np.diff(upto, axis=0), 0.0)
    return spread
