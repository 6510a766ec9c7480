"""One pass over those who wait: who starts now, on which nodes, and who is promised a start.

The higher rank first, and of each rank the heads first: those of a queue who are due, by arrival, then the
others by score, up to the first that does not fit; that one is promised the nodes that serve it soonest.
Then everybody else by score, as far as that delays no promise. All of it is decided from the book's facts
and `now`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush, heapreplace
from itertools import groupby
from math import inf

from shoal.scheduler.amounts import Demand, less
from shoal.scheduler.book import Book
from shoal.scheduler.claims import Bars, Claim, Claims, Draw
from shoal.scheduler.devices import Amount, asked_by, held_by
from shoal.scheduler.fit import share_of
from shoal.scheduler.gang import choose
from shoal.scheduler.growth import kept_to_grow
from shoal.scheduler.policy import Policy
from shoal.scheduler.powered import PowerAhead, choose_powered
from shoal.scheduler.preempt import Preemption
from shoal.scheduler.release import free_by
from shoal.scheduler.rights import ClaimOrder, claim_order
from shoal.scheduler.rows import Line, LineKey, Row, Turn, place_by_score
from shoal.scheduler.snapshot import Candidate
from shoal.scheduler.types import Promise, Start


class Cycle:
    """Starts are held in the book at once, so that the next question is asked of what is left."""

    def __init__(self, book: Book, policy: Policy, now: float) -> None:
        self._book = book
        self._policy = policy
        self.now = now
        self.claims = Claims(book.capacity, book.windows, book.power)
        self.heads: dict[str, Candidate] = {}
        """Per queue, the first that could run here and does not fit now."""
        self.starts: list[Start] = []
        self.preemption = Preemption(book, policy, now)
        self._rooms: set[Row] = set()
        """Whose first have others stop for them."""
        self._is_quota_unserved = False
        """Nobody may be asked to stop for one within its quota; whoever starts now may borrow, and be."""
        self.good_until = inf
        """From then on another pass may differ though nothing has happened."""
        self.look_again_at = inf
        """When such a pass may start somebody."""
        self._hopeless: set[tuple[Demand, Bars]] = set()
        """Demands that found no nodes, and what was in their way. While a cycle lasts nodes only fill up, so
        they find none again."""

    def run(self) -> None:
        self._book.rows.come_to(self.now)
        self._book.tree.keep_nothing()
        self.look_again_at = self._book.windows.next_change(self.now)
        self.good_until = min(self._book.rows.next_due(), self.look_again_at)
        for priority, ranks in groupby(self._book.ranks(self.now), key=lambda lines: lines[0].key.priority):
            equal = list(ranks)
            self._keep_to_grow(priority)
            self._serve_privileged([line for lines in equal for line in lines])
            for lines in equal:
                self._keep_allowances(lines)
                self._start_heads(lines)
                self._start_shortest([row for line in lines for row in line.rows.values()])
        self._keep_to_grow(-inf)

    def run_newcomers(self, newcomers: Collection[Candidate], now: float) -> bool:
        """Look at newcomers alone: nothing was given back since `run`. False: only a whole run can tell."""
        self.now, book = now, self._book
        # Under a ceiling, whoever starts uses up what others may have, and allowances are kept rank by rank.
        # Under a cap, whoever starts changes which nodes have power left for those who wait.
        if book.tree.has_ceilings or book.has_caps:
            return False
        if not book.is_order_as_before(now) or not self._do_heads_wait_for_room():
            return False
        last = max([book.rank(LineKey.of(claim.head)) for claim in self.claims.all], default=())
        found = []
        for candidate in newcomers:
            row = book.rows.row_of(candidate.attempt_id)
            rank, head = book.rank(row.line.key), self.heads.get(candidate.queue)
            if head is None or (rank, book.rows.turn_of(candidate)) < book.turn(head):
                return False
            if rank < last:
                return False  # what is kept for one of another queue is not kept from it
            if self.preemption.may_serve(row.line.key) and self.preemption.is_privileged(
                candidate, asked_by(row.key.demand)
            ):
                return False
            found.append((rank, place_by_score(candidate), row))
        for _, (*_, attempt_id), row in sorted(found):
            self._start(row, attempt_id)
        return True

    def _do_heads_wait_for_room(self) -> bool:
        """Else one who started after it has filled the limit of its array, and others are heads."""
        for head in self.heads.values():
            row = self._book.rows.row_of(head.attempt_id)
            if row not in self._rooms and not self._waits_for_room(row):
                return False
        return True

    def promises(self) -> tuple[Promise, ...]:
        leaving = self._book.stakes.leaving
        return tuple([claim.promise for claim in self.claims.all if claim.head.attempt_id not in leaving])

    def _keep_to_grow(self, least: float) -> None:
        """For those of at least this priority who are stopping to go on with more nodes."""
        leaving = self._book.stakes.leaving
        growing = [one for one in leaving.values() if one.grows_to is not None] if leaving else []
        if not growing:
            return
        # Whoever starts before one of them, or fills a node it could have had, moves what is kept for it.
        self.good_until = self.now
        kept = {claim.head.attempt_id for claim in self.claims.all}
        for one in sorted(growing, key=lambda one: (-one.priority, one.attempt_id)):
            if one.priority >= least and one.attempt_id not in kept:
                claim = kept_to_grow(self._book, self.claims, one, self.now)
                if claim is not None:
                    self.claims.add(claim)

    def _serve_privileged(self, lines: list[Line]) -> None:
        """Lines of one priority, as far as their first may evict others: each starts, or room is made.

        Before anybody else of that priority, so that who gave way does not take back what it gave.
        """
        queue = [turn for line in lines if (turn := self._claim(line, 0)) is not None]
        heapify(queue)
        while queue:
            _, (_, (*_, attempt_id)), place, line = heappop(queue)
            row = self._book.rows.row_of(attempt_id)
            if not self._start(row, attempt_id):
                if not self._is_possible(row) or not self._make_room(attempt_id, row):
                    continue
                place += 1
            following = self._claim(line, place)
            if following is not None:
                heappush(queue, following)

    def _claim(self, line: Line, place: int) -> tuple[ClaimOrder, Turn, int, Line] | None:
        """Whose turn it is of those who may evict others; None: nobody of this line."""
        if not self.preemption.may_serve(line.key):
            return None
        turn, rows = self._book.rows.nth(line, place), self._book.rows
        if turn is None:
            return None
        attempt_id = turn[1][-1]
        asked = asked_by(rows.row_of(attempt_id).key.demand)
        if not self.preemption.is_privileged(rows.candidates[attempt_id], asked):
            return None
        order = claim_order(line.key.project, asked, self._book.tree, self._book.fair, self.now)
        return order, turn, place, line

    def _make_room(self, attempt_id: str, row: Row) -> bool:
        head, demand = self._book.rows.candidates[attempt_id], row.key.demand
        if row.key.at_once is not None and row in self._rooms:
            return False  # those who start count against the limit only then
        windows = self._book.windows
        shut = windows.nodes_of(windows.shut(head.project, self.now, self.now + row.key.limit_s))
        barred = (self.claims.nodes - self.preemption.nodes) | shut
        room = self.preemption.make_room(head, demand, barred, self.claims.watts())
        self.good_until = min(self.good_until, self.preemption.settles_at)
        self.look_again_at = min(self.look_again_at, self.preemption.settles_at)
        if room is None:
            if self._book.has_caps:
                self.good_until = self.now  # where power decided, who comes may be who could give way
            self._is_quota_unserved |= self._book.tree.has_quota(head.project)
            return False
        # From then on a job that starts on a node with a window may not be gone in time.
        moments = (window.from_at - row.key.limit_s for window in windows.all)
        self.good_until = min(
            (at for at in moments if self.now <= at < self.good_until), default=self.good_until
        )
        self._rooms.add(row)
        self.heads.setdefault(head.queue, head)
        self.claims.add(Claim(head, inf, room.spare, room.stopping, room.draw))
        return True

    def _start_heads(self, lines: list[Line]) -> None:
        """Of each queue, until the first that does not fit; one that waits for no room holds nobody up."""
        passed: set[Row] = set()
        while True:
            firsts = [line.first(passed) for line in lines if line.key.queue not in self.heads]
            turn = min([first for first in firsts if first is not None], default=None)
            if turn is None:
                return
            attempt_id = turn[1][-1]
            row = self._book.rows.row_of(attempt_id)
            if self._start(row, attempt_id):
                continue
            if self._waits_for_room(row):
                self._promise(self._book.rows.candidates[attempt_id], row)
            else:
                passed.add(row)

    def _keep_allowances(self, lines: list[Line]) -> None:
        """For the first who are due and wait for their own project: nobody of it takes their turn."""
        if not self._book.tree.has_ceilings:
            return
        for *_, attempt_id in sorted(line.due[0] for line in lines if line.due):
            row = self._book.rows.row_of(attempt_id)
            refusal = self._book.refusal(row.line.key.project, row.key.demand)
            is_wanted = refusal is not None and not refusal.kept and refusal.asked <= refusal.allowed
            if refusal is not None and is_wanted and self._is_possible(row):
                self._book.tree.keep(refusal)

    def _start_shortest(self, rows: list[Row]) -> None:
        """Rows of equal rank. Whoever does not fit now is done for this pass, and their row with them."""
        most, most_beside = self._book.capacity.most_free(), self.claims.most_free()
        gone_in_time = self.claims.first_at - self.now
        queue = []
        for row in rows:
            need = row.key.demand.need
            cpus, gpus, memory = most if row.key.limit_s <= gone_in_time else most_beside
            if need.millicpus <= cpus and need.num_gpus <= gpus and (need.memory_bytes or 0) <= memory:
                queue.append((row.by_score[0], row))
        heapify(queue)
        while queue:
            (*_, attempt_id), row = queue[0]
            if self._start(row, attempt_id) and row.by_score:
                heapreplace(queue, (row.by_score[0], row))
            else:
                heappop(queue)

    def _start(self, row: Row, attempt_id: str) -> bool:
        book, project, (demand, limit_s, array_id, at_once) = self._book, row.line.key.project, row.key
        if at_once is not None and book.num_of_array(array_id) >= at_once:
            return False
        if book.tree.has_ceilings:
            if book.refusal(project, demand) is not None:
                return False
            demand = book.allowed(project, demand)
        ends_at = self.now + limit_s
        bars = self.claims.bars(project, self.now, ends_at)
        asked = demand, bars
        if asked in self._hopeless:
            return False
        names = self._choose(demand, bars)
        if not names:
            self._hopeless.add(asked)
            return False
        shares = tuple(share_of(demand.need, book.capacity.nodes[name]) for name in names)
        while book.tree.has_ceilings and shares and not self._is_allowed(project, held_by(shares)):
            shares = shares[:-1]
        if len(shares) < demand.min_nodes:
            return False
        self.claims.take(demand.need, shares, ends_at)
        book.start(attempt_id, shares, self.now)
        self.starts.append(Start(attempt_id=attempt_id, allocation=shares))
        if self._is_quota_unserved or (self._rooms and book.tree.has_quota(project)):
            self.good_until = self.now  # what it took of its quota may have been another's right to room
        return True

    def _is_allowed(self, project: str, amount: Amount) -> bool:
        """Now, and beside those for whom others are stopping."""
        is_refused = self._book.tree.refusal(project, amount) is not None
        return not is_refused and self.preemption.allows(project, amount)

    def _choose(self, demand: Demand, bars: Bars) -> list[str]:
        book, finder = self._book, self._book.finders.of(demand.need)
        barred = self.claims.barred(demand.need, bars)
        if not book.has_caps:
            return choose(demand, finder, book.capacity, barred)
        power, left = book.power, self.claims.power_left(bars)
        barred = barred | power.full(demand.need, left)
        names = choose(demand, finder, book.capacity, barred)
        if len(power.within(names, demand.need, left)) == len(names):
            return names
        return choose_powered(
            demand, finder.ranked(barred | demand.excluded), book.capacity.nodes, power, left
        )

    def _waits_for_room(self, row: Row) -> bool:
        """Only a job that the open nodes could hold makes others wait: one that cannot run blocks nobody."""
        return self._book.refusal(row.line.key.project, row.key.demand) is None and self._is_possible(row)

    def _is_possible(self, row: Row) -> bool:
        """Whether the open nodes could hold it and its array is not at its limit."""
        demand, _, array_id, at_once = row.key
        if at_once is not None and self._book.num_of_array(array_id) >= at_once:
            return False
        demand = self._book.allowed(row.line.key.project, demand)
        return self._book.possible.is_open_for(demand) and self._book.has_power_for(demand)

    def _promise(self, head: Candidate, row: Row) -> None:
        """The nodes that serve it soonest; where nobody knows when, only once its patience has ended."""
        self.heads[head.queue] = head
        demand, capacity = self._book.allowed(head.project, row.key.demand), self._book.capacity
        hours = self._book.windows.hours(head.project, row.key.limit_s, self.now)
        ahead = self._ahead()
        turn = self._book.soonest.turn(demand, self.claims.nodes, self.now, hours, ahead)
        if turn is None:
            return
        if turn.at == inf:
            waits_since = max(head.submitted_at, head.not_before)
            patient_until = waits_since + self._policy.patience_of(head.expected_s)
            if self.now < patient_until:
                self.good_until = min(self.good_until, patient_until)
                self.look_again_at = min(self.look_again_at, patient_until)
                return
            draw = _draw(demand, turn.nodes, ahead, -inf)
            self.claims.add(Claim(head, inf, dict.fromkeys(turn.nodes), draw=draw))
            return
        nodes = [capacity.nodes[name] for name in turn.nodes]
        spare = {node.name: less(free_by(node, turn.at), demand.need, node.whole) for node in nodes}
        self.claims.add(Claim(head, turn.at, spare, draw=_draw(demand, turn.nodes, ahead, turn.at)))
        self.good_until = min(self.good_until, turn.at)

    def _ahead(self) -> PowerAhead | None:
        """None where no rack has a cap."""
        book = self._book
        if not book.has_caps:
            return None
        return PowerAhead(book.power, self.claims.watts())


def _draw(demand: Demand, names: list[str], ahead: PowerAhead | None, at: float) -> Draw | None:
    """What it takes of their racks' power then, and leaves; at -infinity, with all that runs now."""
    if ahead is None:
        return None
    watts, left = ahead.power.of_nodes(demand.need, names), ahead.left(at)
    return Draw(watts, {rack: left[rack] - watts[rack] for rack in watts})
