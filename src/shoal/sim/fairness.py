"""How far what tenants got is from what they were entitled to.

Time is cut into slices. In each, a tenant has a *demand*: the device-time its jobs held plus what its waiting
jobs would have held. What all tenants held together is what there was to divide, and a tenant is *entitled*
to its part by weighted max-min: equal parts for equal weights, nobody more than its demand, what one does not
want divided among the others. The *error* of a group of tenants is the share of all held device-time that
went to one tenant where another was entitled to it: 0 is fair, and 1 is all to the wrong ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.sim.outcome import Outcome

NUM_SLICES = 1000
"""At most; never shorter than `SLICE_S`, because within minutes nothing divides evenly."""
SLICE_S = 3600.0

Floats = NDArray[np.float64]


class Part(msgspec.Struct, frozen=True):
    """Of one tenant, in device-seconds."""

    received: float
    entitled: float
    missed: float
    """Entitled to in some slice and not received then; more in another makes up for nothing."""

    @property
    def error(self) -> float:
        """What it missed, of all it was entitled to."""
        return self.missed / self.entitled if self.entitled else 0.0


class Fairness(msgspec.Struct, frozen=True):
    error: float
    parts: dict[str, Part]


def fairness(
    outcome: Outcome, tenants: Sequence[str], weights: Mapping[str, float] | None = None
) -> Fairness:
    """`tenants` names the tenant of each job, by index; a weight that is not given is 1."""
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
    return Fairness(error, {name: Part(float(got), float(due), float(less)) for name, got, due, less in sums})


def max_min(demands: Floats, supply: Floats, weights: Floats) -> Floats:
    """Each row of `demands` served from its `supply`: weighted max-min, exact.

    In order of demand per weight, each takes its demand or its part of what is left, whichever is less.
    """
    order = np.argsort(demands / weights, axis=1, kind="stable")
    given = np.zeros_like(demands)
    left = supply.astype(float).copy()
    weight_left = np.full(len(supply), weights.sum())
    rows = np.arange(len(supply))
    for place in range(demands.shape[1]):
        column = order[:, place]
        part = np.minimum(demands[rows, column], left * weights[column] / weight_left)
        given[rows, column] = part
        left -= part
        weight_left = np.maximum(weight_left - weights[column], 1e-12)
    return given


def _held_and_wanted(outcome: Outcome, of_job: NDArray[np.int64], num_tenants: int) -> tuple[Floats, Floats]:
    """Device-seconds in each slice (rows) for each tenant (columns): held, and held or waited for."""
    stays = outcome.stays
    if not len(stays.job):
        return np.zeros((1, num_tenants)), np.zeros((1, num_tenants))
    job = np.array(stays.job)
    devices, begin, end = np.array(stays.devices), np.array(stays.begin), np.array(stays.end)
    submitted = np.array([one.submitted_at for one in outcome.workload.jobs])[job]
    first, last = float(submitted.min()), float(end.max())
    count = int(np.clip((last - first) // SLICE_S, 1, NUM_SLICES))
    edges = np.linspace(first, last, count + 1)
    held = _spread(begin, end, devices, of_job[job], edges, num_tenants)
    waited_since = np.where(_is_first(job), submitted, _previous_end(job, end))
    return held, held + _spread(waited_since, begin, devices, of_job[job], edges, num_tenants)


def _is_first(job: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a stay is its job's first. Stays are noted as they end, so those of one job are in order."""
    first = np.zeros(len(job), dtype=bool)
    first[np.unique(job, return_index=True)[1]] = True
    return first


def _previous_end(job: NDArray[np.int64], end: Floats) -> Floats:
    """For each stay the end of its job's stay before it; of the first, anything."""
    order = np.argsort(job, kind="stable")
    previous = np.empty_like(end)
    previous[order[1:]] = end[order[:-1]]
    previous[order[0]] = end[order[0]]
    return previous


def _spread(
    begin: Floats, end: Floats, devices: Floats, tenant: NDArray[np.int64], edges: Floats, num_tenants: int
) -> Floats:
    """Device-seconds of intervals in each slice, by integrating how many devices are held at each edge.

    The integral up to an edge of an interval that began at b is devices * (edge - b), until it ends. So two
    sums over events before each edge are enough, whatever the number of slices an interval spans.
    """
    at = np.concatenate([begin, end])
    change = np.concatenate([devices, -devices])
    whose = np.concatenate([tenant, tenant])
    slot = np.searchsorted(edges, at, side="left")
    shape = (len(edges) + 1, num_tenants)
    rate, offset = np.zeros(shape), np.zeros(shape)
    np.add.at(rate, (slot, whose), change)
    np.add.at(offset, (slot, whose), change * (at - edges[0]))
    upto = np.cumsum(rate, axis=0)[:-1] * (edges - edges[0])[:, None] - np.cumsum(offset, axis=0)[:-1]
    spread: Floats = np.maximum(np.diff(upto, axis=0), 0.0)
    return spread
