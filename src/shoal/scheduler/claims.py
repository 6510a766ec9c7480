"""Nodes that are spoken for from some moment on, and who may still use them before or beside that.

A claim of a waiting job is its promise: whoever starts on a claimed node must be gone in time by its own
limit, or fit beside what the claim will take, of the nodes and of their racks' power. So nobody who starts
delays it. A window that was declared claims whole nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import Amounts, Need, less
from shoal.scheduler.capacity import Capacity
from shoal.scheduler.fit import fits
from shoal.scheduler.power import Power, Watts
from shoal.scheduler.snapshot import Candidate
from shoal.scheduler.types import Promise
from shoal.scheduler.windows import Numbers, Windows

NOBODY: frozenset[str] = frozenset()


class Bars(NamedTuple):
    """Claims that do not admit a job, by their place in `Claims.all`, and windows that are shut to it."""

    closed: Numbers
    shut: Numbers


class Draw(NamedTuple):
    """What a claim will draw in capped racks, and what these have left beside it then."""

    watts: Watts
    spare: dict[str, int]


class Claim:
    """`spare`: on each claimed node, what is left beside it once it is served; None when `at` is unknown."""

    def __init__(
        self,
        head: Candidate,
        at: float,
        spare: Mapping[str, Amounts | None],
        stopping: tuple[str, ...] = (),
        draw: Draw | None = None,
    ) -> None:
        self.head = head
        self.stopping = stopping
        """Attempts that give way to it, or leave anyway, and are not gone."""
        self.at = at
        """Infinity: nobody knows when, so nobody is gone in time."""
        self.spare = dict(spare)
        self._promise: Promise | None = None
        self.draw = draw or Draw({}, {})

    @property
    def promise(self) -> Promise:
        """What its job is told; whose nodes it names does not change."""
        if self._promise is None:
            at, nodes = None if self.at == inf else self.at, tuple(sorted(self.spare))
            self._promise = Promise(
                attempt_id=self.head.attempt_id, job_id=self.head.job_id, at=at, nodes=nodes
            )
        return self._promise

    def admits(self, ends_at: float) -> bool:
        """Whether somebody who ends then at the latest may use its nodes until then."""
        return ends_at <= self.at < inf


class Claims:
    """Those of one cycle, in the order they were made, and the windows."""

    def __init__(self, capacity: Capacity, windows: Windows, power: Power) -> None:
        self._capacity = capacity
        self._windows = windows
        self._power = power
        self.all: list[Claim] = []
        self.nodes: set[str] = set()
        """Claimed by anybody."""
        self._barred: dict[tuple[Need, Bars], frozenset[str]] = {}

    def add(self, claim: Claim) -> None:
        self.all.append(claim)
        self.nodes.update(claim.spare)

    def watts(self) -> Counter[str]:
        """What all of them will draw in capped racks."""
        kept: Counter[str] = Counter()
        for claim in self.all:
            kept.update(claim.draw.watts)
        return kept

    def power_left(self, bars: Bars) -> dict[str, int]:
        """What racks may draw more now without delaying one of those claims."""
        left = self._power.left()
        for number in bars.closed:
            for rack, spare in self.all[number].draw.spare.items():
                left[rack] = min(left[rack], spare)
        return left

    def bars(self, project: str, now: float, ends_at: float) -> Bars:
        """What is in the way of a job of the project that would start now and may last until `ends_at`."""
        closed: Numbers = ()
        if self.all:
            closed = tuple([number for number, claim in enumerate(self.all) if not claim.admits(ends_at)])
        return Bars(closed, self._windows.shut(project, now, ends_at) if self._windows.all else ())

    def barred(self, need: Need, bars: Bars) -> frozenset[str]:
        """Nodes on which a start would delay one of those claims or meet one of those windows."""
        closed, shut = bars
        if not closed:
            return self._windows.nodes_of(shut) if shut else NOBODY
        key = need, bars
        found = self._barred.get(key)
        if found is None:
            found = self._barred[key] = self._windows.nodes_of(shut).union(
                name
                for number in closed
                for name, spare in self.all[number].spare.items()
                if spare is None or not self._fits_beside(need, name, spare, self.all[number])
            )
        return found

    def _fits_beside(self, need: Need, name: str, spare: Amounts, claim: Claim) -> bool:
        """Never where it could be given GPUs of the one kind, of several there, that the claim is for."""
        node, kept = self._capacity.nodes[name], claim.head.request.gpus
        takes_any = need.num_gpus > 0 and need.gpu_kind is None
        if takes_any and kept is not None and kept.kind is not None and len(node.whole.gpus) > 1:
            return False
        return fits(need, node.whole, spare)

    @property
    def first_at(self) -> float:
        """Whoever ends before is admitted by all; infinity without claims."""
        return min([claim.at if claim.at < inf else -inf for claim in self.all], default=inf)

    def most_free(self) -> tuple[int, int, int]:
        """At most so many thousandths of CPUs, of so many GPUs anything, and so many bytes are free on one
        node to those no claim admits.
        """
        most_cpus, most_gpus, most_bytes = self._capacity.most_free()
        if not self.nodes or len(self.nodes) < self._capacity.num_open:
            return most_cpus, most_gpus, most_bytes
        spares = [spare for claim in self.all for spare in claim.spare.values() if spare is not None]
        return (
            min(most_cpus, max((spare.millicpus for spare in spares), default=-1)),
            min(most_gpus, max((spare.num_devices for spare in spares), default=-1)),
            min(most_bytes, max((spare.memory_bytes for spare in spares), default=-1)),
        )

    def take(self, need: Need, shares: tuple[NodeShare, ...], ends_at: float) -> None:
        """Somebody starts there: what lasts past a claim is no longer spare."""
        for claim in self.all:
            if claim.admits(ends_at):
                continue
            if claim.draw.spare:
                for rack, drawn in self._power.of_shares(shares).items():
                    if rack in claim.draw.spare:
                        claim.draw.spare[rack] -= drawn
            for share in shares:
                spare = claim.spare.get(share.node)
                if spare is not None:
                    claim.spare[share.node] = less(spare, need, self._capacity.nodes[share.node].whole)
                    self._barred.clear()
