"""The set of running jobs whose end loses least and lets one demand start.

On each node that is looked at the cheapest set is found, exactly where few jobs run. The nodes that cost
least are taken one by one: a gang stops whole and is counted once. In the end whoever can be spared is, the
dearest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from shoal.scheduler.amounts import Amounts, less
from shoal.scheduler.offers import Offers
from shoal.scheduler.shortlist import Shortlist
from shoal.scheduler.snapshot import Holding


class Found(NamedTuple):
    victims: list[Holding]
    spare: dict[str, Amounts]
    """The nodes to start on, and what they have left beside it then."""
    stopping: tuple[str, ...]
    """Who has to be gone from them first."""


class Rights(Protocol):
    """Who may be asked to stop, one after the other, and whether that is enough for the ceilings."""

    def take(self, victims: Sequence[Holding]) -> bool:
        """They stop, if all of them may be asked to."""

    def spare(self, one: Holding) -> bool:
        """It goes on after all, if what is asked for is allowed beside it."""

    def lacking(self, cheapest: Iterator[Holding]) -> list[Holding] | None:
        """Who has to stop besides, so that what is asked for is allowed; they do. None: it never is."""

    def undo(self) -> None:
        """All of them go on."""


class Search:
    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    def run(self, rights: Rights) -> Found | None:
        """None: they are not enough, or may not all be asked."""
        Shortlist(self._offers).look()
        for _, names in sorted((self._estimate(names), names) for names in self._offers.spots.enough()):
            victims = self._choose(names, rights)
            if self._start_nodes() is not None:
                more = rights.lacking(self._others())
                for one in more or ():
                    victims[one.attempt_id] = one
                    self._offers.leave(one)
                if more is not None:
                    self._spare_some(victims, rights)
                    return self._found(victims)
            rights.undo()
            for one in victims.values():
                self._offers.stay(one)
            self._offers.look_again(victims.values())
        return None

    def _estimate(self, names: list[str]) -> float:
        return sum(sorted(self._offers.costs[name][0][0] for name in names)[: self._offers.demand.min_nodes])

    def _choose(self, names: list[str], rights: Rights) -> dict[str, Holding]:
        """Those who stop so that as many of the nodes as needed can serve, if they can."""
        victims: dict[str, Holding] = {}
        queue, ready = [self._offers.costs[name][0] for name in names], self._offers.spots.none()
        heapify(queue)
        while queue and not ready.is_enough():
            cost = heappop(queue)
            name = cost[-1]
            known = self._offers.costs.get(name)
            if known is None or known[0] != cost or ready.has_beside(name):
                continue  # it costs something else by now, or stands where another does that was taken
            stop = [self._offers.book.holdings[attempt_id] for attempt_id in known[1]]
            if stop and not rights.take(stop):
                continue  # a right ran out
            ready.add(name)
            for one in stop:
                victims[one.attempt_id] = one
                self._offers.leave(one)
            for other in self._offers.look_again(stop):
                if other != name and other in self._offers.costs:
                    heappush(queue, self._offers.costs[other][0])
        return victims

    def _others(self) -> Iterator[Holding]:
        """Whoever may stop and does not yet, the one that loses least for each device first."""
        for attempt_id in self._offers.cheapest():
            if attempt_id not in self._offers.gone:
                yield self._offers.book.holdings[attempt_id]

    def _start_nodes(self) -> list[str] | None:
        """Where it starts once everybody who counts as gone is; None: nowhere."""
        return self._offers.able().tightest(lambda name: (*self._offers.vacancy(name).left(), name))

    def _spare_some(self, victims: dict[str, Holding], rights: Rights) -> None:
        """Whoever it can start without goes on, the dearest first."""
        able = self._offers.able()
        dearest = sorted(
            victims.values(), key=lambda one: (-self._offers.lost(one.attempt_id), one.attempt_id)
        )
        for one in dearest:
            self._offers.stay(one)
            here = [share.node for share in one.allocation if share.node in able]
            lacking = [name for name in here if not self._offers.vacancy(name).fits()]
            for name in lacking:
                able.discard(name)
            if able.is_enough() and rights.spare(one):
                del victims[one.attempt_id]
                continue
            for name in lacking:
                able.add(name)
            self._offers.leave(one)

    def _found(self, victims: dict[str, Holding]) -> Found:
        nodes, on_node = self._start_nodes() or [], self._offers.book.stakes.on_node
        spare = {
            name: less(
                self._offers.vacancy(name).free(),
                self._offers.need,
                self._offers.book.capacity.nodes[name].whole,
            )
            for name in nodes
        }
        there = {one for name in nodes for one in on_node.get(name, ()) if one in self._offers.gone}
        return Found(list(victims.values()), spare, tuple(sorted(there | victims.keys())))
