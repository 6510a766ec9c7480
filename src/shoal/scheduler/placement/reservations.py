"""Nodes that are reserved from some time on, and which jobs may still use them before or beside that.

The reservation of a waiting job is its promise. A job that starts on a reserved node must end in time by its
own limit, or fit beside what the reservation will take of the nodes and of their racks' power. So no start
delays the promise. A declared window blocks whole nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from shoal.model.attempt import NodeTask
from shoal.scheduler.facts.amounts import Need, NodeResources, remaining_after
from shoal.scheduler.facts.capacity import Capacity
from shoal.scheduler.facts.plan import Promise
from shoal.scheduler.facts.snapshot import Candidate
from shoal.scheduler.placement.fit import fits
from shoal.scheduler.placement.power import RackMilliwatts, RackPower
from shoal.scheduler.placement.windows import WindowNumbers, WindowSchedule

NO_NODES: frozenset[str] = frozenset()


class Blockers(NamedTuple):
    """Reservations that do not admit a job, by their index in `CapacityReservations.all`, and windows closed
    to it.
    """

    closed: WindowNumbers
    windows: WindowNumbers


class PowerDraw(NamedTuple):
    """What a reservation will draw in capped racks, and what these have left beside it at that time."""

    watts: RackMilliwatts
    spare: dict[str, int]


class CapacityReservation:
    """`spare`: on each reserved node, what is left beside the job once it runs; None if `at` is unknown."""

    def __init__(
        self,
        head: Candidate,
        at: float,
        spare: Mapping[str, NodeResources | None],
        stopping: tuple[str, ...] = (),
        draw: PowerDraw | None = None,
    ) -> None:
        self.head = head
        self.stopping = stopping
        """Attempts that are stopping for it, or stop anyway, and have not ended."""
        self.at = at
        """Infinity: the time is unknown, so no job is certain to end before it."""
        self.spare = dict(spare)
        self._promise: Promise | None = None
        self.draw = draw or PowerDraw({}, {})

    @property
    def promise(self) -> Promise:
        """What its job is promised. The nodes that it names do not change."""
        if self._promise is None:
            at, nodes = None if self.at == inf else self.at, tuple(sorted(self.spare))
            self._promise = Promise(
                attempt_id=self.head.attempt_id, job_id=self.head.job_id, at=at, nodes=nodes
            )
        return self._promise

    def admits(self, ends_at: float) -> bool:
        """Whether a job that ends at `ends_at` at the latest may use its nodes until then."""
        return ends_at <= self.at < inf


class CapacityReservations:
    """The reservations of one cycle, in the order they were made, and the windows."""

    def __init__(self, capacity: Capacity, windows: WindowSchedule, power: RackPower) -> None:
        self._capacity = capacity
        self._windows = windows
        self._power = power
        self.all: list[CapacityReservation] = []
        self.nodes: set[str] = set()
        """Nodes of all reservations."""
        self._barred: dict[tuple[Need, Blockers], frozenset[str]] = {}

    def add(self, reservation: CapacityReservation) -> None:
        self.all.append(reservation)
        self.nodes.update(reservation.spare)

    def watts(self) -> Counter[str]:
        """Return what all reservations will draw in capped racks."""
        watts: Counter[str] = Counter()
        for reservation in self.all:
            watts.update(reservation.draw.watts)
        return watts

    def power_left(self, blockers: Blockers) -> dict[str, int]:
        """Return what racks may draw more now without delaying one of those reservations."""
        left = self._power.left()
        for number in blockers.closed:
            for rack, spare in self.all[number].draw.spare.items():
                left[rack] = min(left[rack], spare)
        return left

    def blockers(self, project: str, now: float, ends_at: float) -> Blockers:
        """Return what blocks a job of the project that would start now and may last until `ends_at`."""
        closed: WindowNumbers = ()
        if self.all:
            closed = tuple(
                [number for number, reservation in enumerate(self.all) if not reservation.admits(ends_at)]
            )
        return Blockers(closed, self._windows.blocking(project, now, ends_at) if self._windows.all else ())

    def barred(self, need: Need, blockers: Blockers) -> frozenset[str]:
        """Return nodes on which a start would delay one of those reservations or meet one of those
        windows.
        """
        closed, window_numbers = blockers
        if not closed:
            return self._windows.nodes_of(window_numbers) if window_numbers else NO_NODES
        key = need, blockers
        names = self._barred.get(key)
        if names is None:
            names = self._barred[key] = self._windows.nodes_of(window_numbers).union(
                name
                for number in closed
                for name, spare in self.all[number].spare.items()
                if spare is None or not self._fits_beside(need, name, spare, self.all[number])
            )
        return names

    def _fits_beside(
        self, need: Need, name: str, spare: NodeResources, reservation: CapacityReservation
    ) -> bool:
        """Whether the need fits beside it. Never, if the reservation is for one of several GPU kinds there
        and the need could be given that kind.
        """
        node, reserved_gpus = self._capacity.nodes[name], reservation.head.request.gpus
        takes_any = need.num_gpus > 0 and need.gpu_kind is None
        if (
            takes_any
            and reserved_gpus is not None
            and reserved_gpus.kind is not None
            and len(node.whole.gpus) > 1
        ):
            return False
        return fits(need, node.whole, spare)

    @property
    def first_at(self) -> float:
        """A job that ends before this time is admitted by all reservations; infinity if there are none."""
        return min(
            [reservation.at if reservation.at < inf else -inf for reservation in self.all], default=inf
        )

    def most_free(self) -> tuple[int, int, int]:
        """Return the most thousandths of CPUs, devices and bytes of memory that one node has free for a job
        that no reservation admits.
        """
        most_cpus, most_gpus, most_bytes = self._capacity.most_free()
        if not self.nodes or len(self.nodes) < self._capacity.num_open:
            return most_cpus, most_gpus, most_bytes
        spares = [
            spare for reservation in self.all for spare in reservation.spare.values() if spare is not None
        ]
        return (
            min(most_cpus, max((spare.millicpus for spare in spares), default=-1)),
            min(most_gpus, max((spare.num_devices for spare in spares), default=-1)),
            min(most_bytes, max((spare.memory_bytes for spare in spares), default=-1)),
        )

    def take(self, need: Need, tasks: tuple[NodeTask, ...], ends_at: float) -> None:
        """A job starts on these nodes. What it uses beyond a reservation's start is no longer spare."""
        for reservation in self.all:
            if reservation.admits(ends_at):
                continue
            if reservation.draw.spare:
                for rack, drawn in self._power.of_tasks(tasks).items():
                    if rack in reservation.draw.spare:
                        reservation.draw.spare[rack] -= drawn
            for task in tasks:
                spare = reservation.spare.get(task.node)
                if spare is not None:
                    reservation.spare[task.node] = remaining_after(
                        spare, need, self._capacity.nodes[task.node].whole
                    )
                    self._barred.clear()
