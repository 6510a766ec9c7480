"""The facts a plan is made of, kept up to date one by one: nodes, who holds what, who waits.

Nothing here depends on how the facts came to be: a book filled from a snapshot answers like one that
followed every change.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import msgspec

from shoal.model.attempt import Allocation
from shoal.scheduler.amounts import MILLI, Demand, Need
from shoal.scheduler.capacity import Capacity
from shoal.scheduler.devices import Amount, asked_by, held_by, taken_whole
from shoal.scheduler.fair import Fair
from shoal.scheduler.fit import Finders, fits
from shoal.scheduler.policy import Policy
from shoal.scheduler.possible import Possible
from shoal.scheduler.power import Power
from shoal.scheduler.powered import choose_powered
from shoal.scheduler.rows import Line, LineKey, Rows, Turn
from shoal.scheduler.snapshot import Candidate, Holding, NodeView
from shoal.scheduler.soonest import Soonest
from shoal.scheduler.stakes import Stakes
from shoal.scheduler.tree import Refusal, Tree
from shoal.scheduler.whole_nodes import WholeNodes
from shoal.scheduler.windows import Windows

Rank = tuple[float, ...]
"""Priority, whether only borrowed devices are left, standing: the least comes first."""
ANY_GPU, ANY_CPU = Amount(MILLI, 0), Amount(0, MILLI)


class Book:
    def __init__(self, policy: Policy) -> None:
        self.tree = Tree()
        self.fair = Fair(self.tree, policy.half_life_s)
        self._power = Power(policy.power_caps)
        self.has_caps = self._power.has_caps
        """Whether any rack has one: else power never matters."""
        self._power_as_of = -1
        self.windows = Windows(self.tree)
        self.capacity = Capacity()
        self.finders = Finders(self.capacity)
        self.soonest = Soonest(self.capacity)
        self.rows = Rows(self.capacity.typical)
        self.stakes = Stakes(policy.max_evictions)
        self.elastic: set[str] = set()
        """Attempts that could use more nodes than they hold."""
        self.holdings: dict[str, Holding] = {}
        self.kept_back: dict[str, Candidate] = {}
        """Wait for a dependency or a moment, not for room."""
        self.unconfirmed: dict[str, Candidate] = {}
        """Started by a plan, and nobody has said yet that they hold anything."""
        self._num_of_array: Counter[str] = Counter()
        self._stand: dict[str, Rank] = {}
        self._possible = Possible(self.capacity)
        self._possible_as_of = 0

    @property
    def possible(self) -> Possible:
        """Forgets what it knew whenever a node has changed."""
        if self._possible_as_of != self.capacity.num_node_changes:
            self._possible = Possible(self.capacity)
            self._possible_as_of = self.capacity.num_node_changes
        return self._possible

    def set_node(self, view: NodeView) -> bool:
        """Whether that is anything new."""
        known = self.capacity.nodes.get(view.name)
        if known is not None and known.view == view:
            return False
        self.capacity.set_node(view)
        return True

    @property
    def power(self) -> Power:
        """Reckons anew whenever a node has changed."""
        if self.has_caps and self._power_as_of != self.capacity.num_node_changes:
            views = (node.view for node in self.capacity.nodes.values())
            self._power.rebuild(views, self.holdings.values())
            self._power_as_of = self.capacity.num_node_changes
        return self._power

    def has_power_for(self, demand: Demand) -> bool:
        """Whether the racks of the open nodes could draw it while nothing else runs."""
        if not self.has_caps:
            return True
        power = self.power
        names = [node.name for node in self.possible.suitable(demand.need).without(demand.excluded).open]
        left = power.left_when_idle()
        return bool(choose_powered(demand, names, self.capacity.nodes, power, left))

    def refusal(self, project: str, demand: Demand) -> Refusal | None:
        """Who up the tree of projects does not allow the least it can start with."""
        if not self.tree.has_ceilings:
            return None
        if demand.need.is_exclusive:
            return self._whole_nodes(project, demand).refusal()
        return self.tree.refusal(project, self.asked(demand))

    def asked(self, demand: Demand) -> Amount:
        """The least that it takes: of whole nodes, where those differ, of the largest."""
        asked = asked_by(demand)
        if demand.need.is_exclusive:
            nodes = self.possible.suitable(demand.need).without(demand.excluded).nodes
            taken = [taken_whole(whole, demand.min_nodes) for whole in {node.whole for node in nodes}]
            return Amount(*(max(amounts) for amounts in zip(asked, *taken, strict=True)))
        if demand.need.memory_bytes is not None and not demand.need.num_gpus:
            charged = self._least_charged(demand.need) * demand.min_nodes
            asked = asked._replace(millicpus=max(asked.millicpus, charged))
        return asked

    def _least_charged(self, need: Need) -> int:
        """What its memory costs it on the node where that is least."""
        wholes = (whole for whole in self.capacity.stock if fits(need, whole, whole))
        return min((need.charged_on(whole) for whole in wholes), default=0)

    def allowed(self, project: str, demand: Demand) -> Demand:
        """The demand as its project may have it: of whole nodes, not those that have too much."""
        if not demand.need.is_exclusive or not self.tree.has_ceilings:
            return demand
        return self._whole_nodes(project, demand).allowed()

    def _whole_nodes(self, project: str, demand: Demand) -> WholeNodes:
        return WholeNodes(self.tree, project, demand, self.possible.suitable(demand.need))

    def num_of_array(self, array_id: str | None) -> int:
        return self._num_of_array[array_id] if array_id is not None else 0

    def start(self, attempt_id: str, allocation: Allocation, now: float) -> None:
        """It leaves its row and holds its share."""
        candidate = self.unconfirmed[attempt_id] = self.rows.remove(attempt_id)
        self._take(holding_of(candidate, allocation, now), is_new=True)

    def undo(self, attempt_id: str) -> Candidate | None:
        """The candidate that `start` took, which never held anything; None when it took none."""
        candidate = self.unconfirmed.pop(attempt_id, None)
        if candidate is not None:
            self._give(attempt_id, self.holdings[attempt_id].placed_at, is_new=True)
        return candidate

    def hold(self, holding: Holding) -> bool:
        """Whether anything was given back."""
        self.unconfirmed.pop(holding.attempt_id, None)
        was = self.holdings.get(holding.attempt_id)
        if was is not None and holding.checkpoint_at is None:
            holding = msgspec.structs.replace(holding, checkpoint_at=was.checkpoint_at)
        if was == holding:
            return False
        if was is not None and was.allocation == holding.allocation and was.array_id == holding.array_id:
            self.stakes.remove(was)
            self.stakes.add(holding)
            if msgspec.structs.replace(was, checkpoint_at=holding.checkpoint_at) == holding:
                self.holdings[holding.attempt_id] = holding
                return False  # where its work is safe until decides who is evicted, and not whether
            self.capacity.retime(holding, was)
            if self.has_caps:
                self._power.give(was)
                self._power.take(holding)
            held = held_by(holding.allocation)
            self.fair.release(was.project, held, was.placed_at)
            self.fair.hold(holding.project, held, holding.placed_at)
            self.holdings[holding.attempt_id] = holding
            return True
        if was is not None:
            self._give(holding.attempt_id, holding.placed_at)
        self._take(holding)
        return was is not None

    def save(self, attempt_id: str, at: float | None) -> bool:
        """It has a checkpoint of that time, or none that anybody knows; what else is said of it takes none
        away.
        """
        holding = self.holdings.get(attempt_id)
        if holding is None:
            return False
        self.stakes.remove(holding)
        saved = self.holdings[attempt_id] = msgspec.structs.replace(holding, checkpoint_at=at)
        self.stakes.add(saved)
        return True

    def release(self, attempt_id: str, at: float) -> bool:
        """Whether it held anything."""
        self.unconfirmed.pop(attempt_id, None)
        if attempt_id not in self.holdings:
            return False
        self._give(attempt_id, at)
        return True

    def drop(self, attempt_id: str) -> bool:
        """Whether it waited for room: whoever was kept back stood in nobody's way."""
        self.kept_back.pop(attempt_id, None)
        if attempt_id not in self.rows.candidates:
            return False
        self.rows.remove(attempt_id)
        return True

    def ranks(self, now: float) -> list[list[Line]]:
        """Lines of equal rank together, the first to be served first."""
        if len(self.rows.lines) == 1:
            (line,) = self.rows.lines.values()
            self._stand = {line.key.project: ()}
            return [[line]]
        projects = self._projects()
        if len(projects) == 1:
            self._stand = dict.fromkeys(projects, ())
        else:
            self._stand = {project: self._standing(project, now) for project in projects}
        lines = sorted(self.rows.lines.values(), key=lambda line: (self.rank(line.key), line.key))
        return [list(equal) for _, equal in groupby(lines, key=lambda line: self.rank(line.key))]

    @property
    def has_rivals(self) -> bool:
        """Whether usage may order those who wait: jobs of several projects, or queues.

        Of one project, too: under a clock that was set back a start shows in its usage at once, and the rest
        of that queue comes after another queue.
        """
        return len({(key.project, key.queue) for key in self.rows.lines}) > 1

    def is_order_as_before(self, now: float) -> bool:
        """Whether projects that wait stand to each other as they did when `ranks` was asked."""
        projects = self._projects()
        if len(projects) <= 1 and projects <= self._stand.keys():
            return True
        stand = {project: self._standing(project, now) for project in projects}
        return stand.keys() <= self._stand.keys() and _order(stand) == _order(
            {project: self._stand[project] for project in stand}
        )

    def rank(self, key: LineKey) -> Rank:
        return (-key.priority, *self._stand[key.project])

    def _projects(self) -> set[str]:
        return {key.project for key in self.rows.lines}

    def _standing(self, project: str, now: float) -> Rank:
        is_guaranteed = any(self.tree.is_within_quota(project, some) for some in (ANY_GPU, ANY_CPU))
        return (0.0 if is_guaranteed else 1.0, *self.fair.standing(project, now))

    def turn(self, candidate: Candidate) -> tuple[Rank, Turn]:
        """When it is looked at, as a head."""
        return self.rank(LineKey.of(candidate)), self.rows.turn_of(candidate)

    def _take(self, holding: Holding, *, is_new: bool = False) -> None:
        self.holdings[holding.attempt_id] = holding
        self.stakes.add(holding)
        if holding.request is not None and len(holding.allocation) < holding.request.max_nodes:
            self.elastic.add(holding.attempt_id)
        self.capacity.hold(holding)
        held = held_by(holding.allocation)
        self.tree.take(holding.project, held)
        self.fair.hold(holding.project, held, holding.placed_at, is_new=is_new)
        if self.has_caps:
            self._power.take(holding)
        if holding.array_id is not None:
            self._num_of_array[holding.array_id] += 1

    def _give(self, attempt_id: str, at: float, *, is_new: bool = False) -> None:
        holding = self.holdings.pop(attempt_id)
        self.stakes.remove(holding)
        self.elastic.discard(attempt_id)
        self.capacity.release(holding)
        held = held_by(holding.allocation)
        self.tree.give(holding.project, held)
        self.fair.release(holding.project, held, at, is_new=is_new)
        if self.has_caps:
            self._power.give(holding)
        if holding.array_id is not None:
            self._num_of_array[holding.array_id] -= 1
            if not self._num_of_array[holding.array_id]:
                del self._num_of_array[holding.array_id]


def _order(stand: dict[str, Rank]) -> list[list[str]]:
    """Projects in the order of their standing, equals together."""
    by_rank: dict[Rank, list[str]] = {}
    for project, rank in stand.items():
        by_rank.setdefault(rank, []).append(project)
    return [sorted(by_rank[rank]) for rank in sorted(by_rank)]


def holding_of(candidate: Candidate, allocation: Allocation, now: float) -> Holding:
    """What a candidate holds once it has started."""
    return Holding(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        project=candidate.project,
        priority=candidate.priority,
        allocation=allocation,
        placed_at=now,
        time_limit_s=candidate.request.time_limit_s,
        array_id=candidate.array_id,
        label=candidate.label,
        owner=candidate.owner,
        name=candidate.name,
        request=candidate.request,
        excluded_nodes=candidate.excluded_nodes,
        num_evicted=candidate.num_evicted,
    )
