"""An engine on other machines: the seven verbs over a desk, and three more for the cluster below.

Orders wait at the desk; the cluster starts keepers (`shoal.runtime.keeper`) on the nodes, who fetch them.
What a share does is known from its keeper. What the cluster says of it is a reason to look and to explain;
only where `Glimpse.is_over` is set is it evidence. A cluster that lost a submission is asked again; that this
is safe is the desk's doing, which gives every order to one process.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
import structlog

from shoal.clock import Clock
from shoal.engines.base import CANNOT_ASK, LogChunk, Observation, SavedCheckpoints, Sight, Submission
from shoal.engines.boots import Boot
from shoal.engines.checkpoint_folder import CheckpointFolder
from shoal.engines.desk import Desk, DeskShare
from shoal.engines.glimpses import NO_TRACE, THERE, Glimpse, Glimpses, Stage
from shoal.engines.refusal import is_name, refuse_malformed, refuse_strangers, what_is_gone
from shoal.engines.threads import on_thread
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone
from shoal.model.node import NodeFacts
from shoal.wire import KEEPER_ASK_S, KEEPER_PATIENCE_S, KEEPER_PING_S, EndKind, Order, Summons

T = TypeVar("T")
log = structlog.get_logger()

LATE_S = KEEPER_PING_S + 2 * KEEPER_ASK_S
"""How long a keeper may be quiet before the cluster's evidence of its end counts: one that lives may ask two
control planes in vain before it comes to us. Who speaks contradicts it."""
HEARD_S = LATE_S + 2.0
"""Who has said something so lately lives."""
SILENT_S = 3 * HEARD_S
"""A node that nobody was heard from for so long takes no work. Less than the shortest fence: what is replaced
because its node is silent goes elsewhere."""
UNHEARD = f"what runs there was not heard from for {SILENT_S:.0f} s"
BEHIND_S = KEEPER_PATIENCE_S + 60.0
"""How long a share may wait for its keeper while the cluster runs what it was started with, and others of it
have their orders. By then its keeper has given up; one that comes yet is late, and gets no order."""
STARTS_AT_ONCE = 8
"""Of different owners. Those of one come one after the other: where what starts them is the owner's own
process, as `sbatch` may be, who stops it holds up nobody else."""
MAX_STARTS = 6
MAX_PAUSE_S = 60.0
REPLACED = "nothing was heard from it, and another share has its place"
FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below Linux's ephemeral ports (32768 on), which any outgoing connection may take at any time."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How supervisors on other machines find and know the control planes, and where they work."""

    urls: tuple[str, ...]
    ca: str
    spool: str = ""
    """On each node's own disk; empty: below its /tmp."""
    shared: str = ""
    """A directory that every node and the control plane have; empty: there is none."""


class Asked(msgspec.Struct, frozen=True):
    """When a question began, and its answer had come. Monotonic."""

    at: float
    answered_at: float


class Starts(msgspec.Struct):
    """Of one attempt and incarnation."""

    tried: int = 0
    done: int = 0
    """How often the cluster took it."""
    not_before: float = 0.0
    """When it may be tried again (monotonic)."""


class RemoteEngine(ABC):
    """Subclass it for a cluster. Thrown away and made anew it finds everything at the desk again."""

    name: str
    can_replace_shares = True
    devices_from = ""
    to_share = "`shoal connect --help`"
    can_follow = False
    """Whether a keeper may take the order in place of a lost one: see `Summons`."""
    stays_in_cgroup = False
    """Of all shares: see `Order`."""

    def __init__(
        self, home: Path, *, clock: Clock, reach: Reach, term: int = 0, only_project: str | None = None
    ) -> None:
        """`only_project`: whose jobs may run there; None: everybody's."""
        self._only_project = only_project
        self.desk = Desk(home, clock, term)
        self._home = home
        self._clock = clock
        self._opened_at = clock.monotonic()
        self._looked_at = math.inf
        """Monotonic: when this process first looked at what runs. Who lived before may speak yet."""
        self._reach = reach
        self._share(reach.shared)
        self._starting: dict[tuple[str, int], Starts] = {}
        """By attempt and incarnation."""
        self._suspended: set[tuple[str, str]] = set()
        """Attempts and nodes of shares that were so when they were looked at last."""
        self._behind: dict[tuple[str, str, int], float] = {}
        """By attempt, node and incarnation: since when nobody came for an order while others have theirs."""
        self._guards: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        """By owner: starts of one attempt must exclude each other."""
        self._at_once = anyio.CapacityLimiter(STARTS_AT_ONCE)
        self._unended: set[str] = set()
        """Attempts that were buried while the cluster could not be told."""

    def _share(self, shared: str) -> None:
        """Keep all jobs' checkpoints below this directory, as the nodes have it; empty: there is none."""
        self._folder = Path(shared) / "checkpoints" if shared else None
        self._saves = CheckpointFolder(self._folder, self._clock) if self._folder is not None else None

    @abstractmethod
    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        """Have the cluster start one keeper for each of these shares, all of one incarnation.

        `EngineRefused`: it will not, ever, in its own words. `EngineUnreachable`: we do not know.
        """

    @abstractmethod
    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        """What the cluster says of these shares, of their very incarnation; nothing, or no stage, of those it
        has no trace of. Must not be older than the last `start`. May raise `EngineUnreachable`.
        """

    @abstractmethod
    async def end(self, attempt_id: str) -> None:
        """Take back from the cluster what was started for the attempt; keepers are told by the desk."""

    async def take_back(self, attempt_id: str) -> None:
        """Leave nothing of an attempt that has ended in the cluster's own queue. May be repeated;
        `EngineUnreachable`: we do not know. Nothing to do where there is no queue.
        """
        return

    async def as_given(self, order: Order) -> Order:
        """As it was laid down, where the cluster's nodes keep their addresses."""
        return order

    @abstractmethod
    async def nodes(self) -> list[NodeFacts]: ...

    async def submit(self, submission: Submission) -> str:
        """Lay the orders down and have keepers started for those that nobody has taken."""
        attempt_id = submission.attempt_id
        is_new = not self.desk.find(attempt_id)
        if is_new:
            if await self.on_thread(lambda: self.desk.is_kept(attempt_id)):
                return self.native_id(attempt_id)
            await self._take(submission)
        else:
            await self._begin_anew(submission)
        if is_new or await self._due(submission):  # else nobody waits for those who start others
            async with self._guards[submission.orders[0].owner], self._at_once:
                await self._start(submission, is_new=is_new)
        return self.native_id(attempt_id)

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        shares = self.desk.find(attempt_id)
        if not shares:
            return
        await self.on_thread(lambda: self.desk.stop(attempt_id, grace_s))
        # Nobody has begun, and nobody can: no need to wait in a queue. Or its grace is over, and who has
        # it hears nobody; one that speaks hears it from the desk, and may still hand in the rest of its log.
        if all(share.taken is None or not share.taken.process for share in shares.values()) or any(
            self.is_deaf(share) and self._is_grace_over(share) for share in shares.values()
        ):
            await self.end(attempt_id)

    async def bury(self, attempt_id: str) -> None:
        """The control plane has recorded the end of all of it, by a fence or an operator's word. What nobody
        was heard from is over here, too; what speaks is stopped.
        """
        try:
            await self.cancel(attempt_id, 0.0)  # the cluster ends what hears nobody
        except EngineUnreachable:
            self._unended.add(attempt_id)  # what was recorded does not hang on the cluster's word
        told = "its attempt had ended, and nothing was heard from it since"
        for share in self.desk.find(attempt_id).values():
            if self.is_deaf(share):
                await self.on_thread(lambda share=share: self.desk.bury(share, EndKind.FENCED, told))  # type: ignore[misc]

    def _is_grace_over(self, share: DeskShare) -> bool:
        if share.stop is None or share.stop_seen_at is None:
            return False
        return self._clock.monotonic() >= share.stop_seen_at + share.stop.grace_s

    def is_deaf(self, share: DeskShare) -> bool:
        """Nobody was heard from it for longer than one that lives is quiet."""
        heard_at = self._opened_at if share.heard_at is None else share.heard_at
        return share.outcome is None and self._clock.monotonic() - heard_at >= HEARD_S

    async def list_owned(self) -> list[Observation]:
        shares = self.desk.shares()
        await self.on_thread(lambda: self._end_replaced(shares))
        open_shares = [share for share in shares if share.outcome is None]
        seen, unseen = await self._glimpses(open_shares)
        # On a thread, as what ends is written down; on one for all, as there may be hundreds.
        return await self.on_thread(lambda: self._observe(shares, seen, unseen))

    def _observe(self, shares: Collection[DeskShare], seen: Glimpses, unseen: Glimpse) -> list[Observation]:
        """Those that somebody has first: a node is not silent whose silent share is known to be over."""
        self._looked_at = min(self._looked_at, self._clock.monotonic())
        begun = {
            _place(share): self._seen(share, seen.get(_place(share), unseen))
            for share in shares
            if not share.is_waiting
        }
        self._take_back_stranded(shares, seen, unseen)
        return [
            begun.get(_place(share)) or self._seen(share, seen.get(_place(share), unseen)) for share in shares
        ]

    def _end_replaced(self, shares: Collection[DeskShare]) -> None:
        """A share whose place another node has got was replaced on evidence, or after its fence. Nobody will
        write its end, and silent without one it would keep its node from work while the attempt goes on.
        """
        newest = dict[str, Order]()
        for share in sorted(shares, key=lambda share: share.order.incarnation):
            newest[share.order.attempt_id] = share.order
        for share in shares:
            if share.outcome is None and share.order.node not in newest[share.order.attempt_id].nodes:
                is_closed = self.desk.close(share, EndKind.LOST, REPLACED)
                if not is_closed and self.is_deaf(share):
                    self.desk.bury(share, EndKind.LOST, REPLACED)

    def _take_back_stranded(self, shares: Collection[DeskShare], seen: Glimpses, unseen: Glimpse) -> None:
        """What waits for a node that takes no work, or was to begin where nobody is heard from, is lost
        before it began, and may be placed elsewhere. Whom the cluster starts at this very moment either has
        an order by then, and nothing is taken back, or gets none.
        """
        silent = self._silent_nodes()
        for share in (share for share in shares if share.is_waiting):
            glimpse, node = seen.get(_place(share), unseen), share.order.node
            # One that is still in the cluster's queue may be there for longer than the node is silent.
            is_cut_off = node in silent and glimpse.stage not in (Stage.QUEUED, Stage.AWAY)
            if glimpse.stranded or is_cut_off:
                told = f"{glimpse.stranded or f'`{node}`: {UNHEARD}'}; {glimpse.raw}"
                told = f"taken back before it began: {told}"
                self.desk.close_unbegun(share.order.attempt_id, share.launch, EndKind.LOST, told)

    async def _glimpses(self, shares: Collection[DeskShare]) -> tuple[Glimpses, Glimpse]:
        """What the cluster says of these, and what goes for the others. While it cannot be asked the desk
        still knows who speaks; and a share that nobody has may be in the cluster's queue, as before.
        """
        try:
            return (await self.look(shares) if shares else {}), NO_TRACE
        except EngineUnreachable as error:
            log.warning("cluster.unreachable", engine=self.name, error=error.message)
            # Not in its words, which may name machines: whoever may read a job reads this.
            return {}, Glimpse(stage=Stage.AWAY, raw=CANNOT_ASK)

    async def forget(self, attempt_id: str) -> None:
        if is_name(attempt_id):
            if any(share.outcome is not None for share in self.desk.find(attempt_id).values()):
                if attempt_id in self._unended:
                    await self.end(attempt_id)
                await self.take_back(attempt_id)
            self._unended.discard(attempt_id)
            await self.on_thread(lambda: self.desk.forget(attempt_id))
            if not self.desk.find(attempt_id):
                self._starting = {key: at for key, at in self._starting.items() if key[0] != attempt_id}
                self._behind = {key: at for key, at in self._behind.items() if key[0] != attempt_id}

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        return await self.on_thread(lambda: self.desk.read_log(attempt_id, node, offset, limit))

    async def close(self) -> None:
        """What runs, runs on."""
        self.desk.on_news = None

    def notice(self, tell: Callable[[], None]) -> None:
        """A share that began or ended is a reason to look at once."""
        self.desk.on_news = tell

    async def prune(self, older_than: float, max_bytes: int) -> int:
        old = await self.on_thread(lambda: self.desk.old(older_than, max_bytes))
        is_tidy = await self.tidy(old)
        await self.on_thread(lambda: self.desk.remove(old, are_known=not is_tidy))
        return len(old)

    async def tidy(self, old: Collection[str]) -> bool:
        """Throw away what the cluster has left of attempts that were forgotten; of the `old`, whose logs go
        next, all of it. May be repeated. False: not now, and these must be known until it was.
        """
        return True

    async def checkpoints(self) -> list[str]:
        """Those on the shared directory; of other homes, which may share it, too."""
        return await self._saves.jobs() if self._saves is not None else []

    async def saved(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        return SavedCheckpoints() if self._saves is None else await self._saves.saved(job_id, verify_s)

    def checkpoint_dir(self, job_id: str) -> str | None:
        return str(self._folder / job_id) if self._folder is not None else None

    async def drop_checkpoint(self, job_id: str) -> None:
        if self._saves is not None:
            await self._saves.drop(job_id)

    def reached(self, nodes: Collection[NodeFacts]) -> list[NodeFacts]:
        """As the cluster lists them; those that cannot be reached from here are not alive. A cluster may take
        minutes to notice a cut, and may not be cut off itself. What is suspended is silent, and says nothing.
        """
        silent = self._silent_nodes()
        return [_unreached(facts) if facts.name in silent else facts for facts in nodes]

    def _silent_nodes(self) -> set[str]:
        now, silences = self._clock.monotonic(), dict[str, float]()
        for share in self.desk.shares():
            if share.outcome is None and share.taken is not None and _place(share) not in self._suspended:
                heard_at = self._opened_at if share.heard_at is None else share.heard_at
                node = share.order.node
                silences[node] = min(silences.get(node, now - heard_at), now - heard_at)
        return {node for node, silence_s in silences.items() if silence_s >= SILENT_S}

    async def has_rebooted(self, share: DeskShare, boot: Boot | None, asked: Asked) -> bool:
        """Whether the node was started anew since the share's keeper was last heard from.

        `boot`: as it was told when it was `asked` for; None: nobody tells it now. A keeper that speaks later
        than that lives in that very boot, whatever its date was before: only what changes while it is silent
        is evidence. The answer to a question from before the share may be of an earlier start. Whoever speaks
        does so on the machine where it began.
        """
        if share.taken is None or share.known_since is None or boot is None:
            return False
        if share.boot is not None and not share.boot.is_on(boot.machine):
            return False  # another has got the name, and says nothing of who began on the one before
        if share.heard_at is not None and share.heard_at >= asked.answered_at:
            if asked.at >= share.known_since and not boot.is_like(share.boot):
                await self.on_thread(lambda: self.desk.mark_boot(share, boot))
            return False
        return share.boot is not None and boot.follows(share.boot)

    def native_id(self, attempt_id: str) -> str:
        return f"{self.name}:{attempt_id}"

    async def on_thread(self, work: Callable[[], T]) -> T:
        return await on_thread(work, f"the {self.name} engine could not use {self._home}")

    async def _take(self, submission: Submission) -> None:
        refuse_strangers(submission.orders, self.name, self._only_project)
        nodes = {facts.name: facts for facts in await self.nodes()}
        refuse_malformed(submission, nodes)
        orders = self._completed(submission, nodes)
        await self._make_folders(orders)
        await self.on_thread(lambda: self.desk.add(orders, _archive_of(submission)))

    async def _begin_anew(self, submission: Submission) -> None:
        """New orders where a share of a greater incarnation replaces one that has ended, or is new there."""
        shares = self.desk.find(submission.attempt_id)
        known = {node: share.order.incarnation for node, share in shares.items()}
        lacking = {o.node for o in submission.orders if o.incarnation > known.get(o.node, 0)}
        if not lacking:
            return
        nodes = {facts.name: facts for facts in await self.nodes()}
        for order in submission.orders:
            gone = what_is_gone(order, nodes) if order.node in lacking else None
            if gone is not None:
                raise NodeGone(gone, hint="shoal nodes", node=order.node)
            before = shares.get(order.node) if order.node in lacking else None
            if before is None or before.outcome is not None:
                continue
            if not self.is_deaf(before):
                raise EngineUnreachable(f"{order.node} still has the share that is to be replaced")
            await self.on_thread(lambda before=before: self.desk.bury(before, EndKind.LOST, REPLACED))  # type: ignore[misc]
        orders = self._completed(submission, nodes)
        await self._make_folders(orders)
        for order in orders:
            if order.node in lacking:
                await self.on_thread(
                    lambda order=order: self.desk.begin_anew(order, _archive_of(submission))  # type: ignore[misc]
                )

    def _completed(self, submission: Submission, nodes: dict[str, NodeFacts]) -> tuple[Order, ...]:
        """The orders with what this cluster decides. Jobs run as whoever the cluster runs them as."""
        first = submission.orders[0]
        used = {share.order.master_port for share in self.desk.shares() if share.outcome is None}
        begin = zlib.crc32(submission.attempt_id.encode())
        ports = (FIRST_PORT + (begin + step) % NUM_PORTS for step in range(NUM_PORTS))
        port = next(port for port in ports if port not in used)
        return tuple(
            msgspec.structs.replace(
                order,
                master_addr=nodes[first.node].address if len(submission.orders) > 1 else "127.0.0.1",
                master_port=port if order.incarnation == 0 else 0,
                uid=None,
                control_url=None if order.control_url is None else self._reach.urls[0],
                checkpoint_dir=self._on_shared(order.checkpoint_dir, order.job_id),
                model_dir=self._on_shared(order.model_dir, order.job_id),
                stays_in_cgroup=self.stays_in_cgroup,
            )
            for order in submission.orders
        )

    def make_folder(self, path: str) -> None:
        """Make a folder of the shared directory. Blocks; one that is there stays as it is."""
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)

    async def _make_folders(self, orders: Collection[Order]) -> None:
        for path in sorted({order.checkpoint_dir for order in orders if order.checkpoint_dir}):
            await self.on_thread(lambda path=path: self.make_folder(path))  # type: ignore[misc]

    def _on_shared(self, path: str | None, job_id: str) -> str | None:
        """A path below the home's checkpoints, where all nodes have it."""
        if path is None:
            return None
        if self._folder is None:
            raise EngineRefused(
                f"job {job_id} keeps checkpoints, and this cluster has no directory that all nodes share",
                hint=f"leave out `checkpoint`, or let an operator type {self.to_share}",
            )
        return str(self._folder / Path(path).relative_to(self._home / "checkpoints"))

    async def _start(self, submission: Submission, *, is_new: bool) -> None:
        """Start keepers for orders that nobody has taken, unless the cluster still has what was started."""
        for incarnation, (due, seen) in (await self._due(submission, is_new=is_new)).items():
            await self._start_one(submission, incarnation, due, seen)

    async def _due(
        self, submission: Submission, *, is_new: bool = False
    ) -> dict[int, tuple[list[DeskShare], Glimpses]]:
        """By incarnation: shares that nobody has, and nobody is on his way for; and what the cluster says."""
        waiting = [share for share in self.desk.find(submission.attempt_id).values() if share.is_waiting]
        seen = await self.look(waiting) if waiting and not is_new else {}
        found = {}
        for incarnation in sorted({share.order.incarnation for share in waiting}):
            due = [share for share in waiting if share.order.incarnation == incarnation]
            if not any(self._stage(share, seen) in THERE or self._has_heir(share) for share in due):
                found[incarnation] = due, seen
        return found

    async def _start_one(
        self, submission: Submission, incarnation: int, due: list[DeskShare], seen: Glimpses
    ) -> None:
        key, now = (submission.attempt_id, incarnation), self._clock.monotonic()
        starts = self._starting.setdefault(key, Starts())
        if now < starts.not_before:
            return
        if starts.done >= MAX_STARTS:
            said = {seen.get(_place(share), NO_TRACE).raw for share in due}
            told = f"no supervisor fetched the order in {starts.done} tries: {'; '.join(sorted(said))}"
            await self._close(due, told)
            return
        starts.not_before = now + min(2.0**starts.tried, MAX_PAUSE_S)
        starts.tried += 1
        summons = Summons(
            attempt_id=submission.attempt_id,
            urls=tuple(dict.fromkeys((*self._reach.urls, *due[0].order.control_urls))),
            ca=self._reach.ca,
            ticket=submission.ticket,
            incarnation=incarnation,
            spool=self._reach.spool,
            devices_from=self.devices_from,
            can_follow=self.can_follow,
        )
        try:
            await self.start(summons, tuple(share.order for share in due))
        except EngineRefused as error:
            if starts.done == 0 and incarnation == 0:
                await self.on_thread(lambda: self.desk.withdraw(submission.attempt_id))
            if not self.desk.find(submission.attempt_id):
                raise
            # Others of it may run, or may begin yet: these alone are over.
            await self._close(due, f"{self.name} refused it: {error.message}")
            return
        starts.done += 1  # what was turned away for now is no try

    async def _close(self, shares: Collection[DeskShare], told: str) -> None:
        """Give up those that nobody has: nobody ever will."""
        for share in shares:
            await self.on_thread(lambda share=share: self.desk.close(share, EndKind.LOST, told))  # type: ignore[misc]

    def _has_heir(self, share: DeskShare) -> bool:
        return share.heir_until is not None and self._clock.monotonic() < share.heir_until

    def _stage(self, share: DeskShare, seen: Glimpses) -> Stage:
        return seen.get(_place(share), NO_TRACE).stage

    def _seen(self, share: DeskShare, glimpse: Glimpse) -> Observation:
        """One share, by what its keeper said, and else by what the cluster says."""
        now = self._clock.monotonic()
        silence_s = now - (min(self._looked_at, now) if share.heard_at is None else share.heard_at)
        if share.outcome is None and share.taken is not None and glimpse.is_over and silence_s >= LATE_S:
            self.desk.bury(share, EndKind.LOST, f"its supervisor is gone: {glimpse.raw}")
        behind_s = self._behind_s(share, glimpse)
        raw = f"{glimpse.raw}; others of it have begun, and nobody has come for this order"
        if behind_s >= BEHIND_S:
            self.desk.close(share, EndKind.LOST, f"{raw} in {BEHIND_S:.0f} s")
        if share.outcome is not None:
            return self._observation(share, Sight.ENDED, share.outcome.kind)
        if share.is_waiting:
            is_queued = glimpse.stage in (Stage.QUEUED, Stage.AWAY)
            raw = raw if behind_s >= HEARD_S else glimpse.raw
            return self._observation(share, Sight.PENDING, raw, is_queued=is_queued)
        is_heard = share.heard_at is not None and silence_s < HEARD_S
        if glimpse.stage is Stage.SUSPENDED:
            self._suspended.add(_place(share))
        else:
            self._suspended.discard(_place(share))
        if share.left:
            return self._observation(share, Sight.ORPHANED, share.left)
        if is_heard:
            return self._observation(share, Sight.ALIVE, "its keeper speaks", silent_s=silence_s)
        if glimpse.stage is Stage.SUSPENDED:
            return self._observation(share, Sight.ALIVE, glimpse.raw, is_hearsay=True)
        is_late = silence_s >= LATE_S  # else who lived before us may speak yet
        if glimpse.is_left and is_late:
            return self._observation(share, Sight.ORPHANED, glimpse.raw, is_hearsay=True)
        raw = f"its keeper is silent; {glimpse.raw}"
        if glimpse.is_left or glimpse.is_doubtful:
            return self._observation(share, Sight.DOUBTFUL, raw, is_hearsay=True)
        return self._observation(share, Sight.UNKNOWN, raw, is_cleared=glimpse.is_clear and is_late)

    def _behind_s(self, share: DeskShare, glimpse: Glimpse) -> float:
        """For how long it has been left behind by others that the cluster started with it. It may have one
        word for all of them: what it runs for one hides that another's keeper is gone. Or what one waits for
        does not come, and those that began cannot be taken back with it.
        """
        key = (*_place(share), share.order.incarnation)
        is_due = glimpse.stage is Stage.RUNNING or bool(glimpse.stranded)
        if not share.is_waiting or not is_due or not self._have_others_begun(share):
            self._behind.pop(key, None)
            return 0.0
        now = self._clock.monotonic()
        return now - self._behind.setdefault(key, now)

    def _have_others_begun(self, share: DeskShare) -> bool:
        return any(
            other.taken is not None and not other.is_closed and other.launch == share.launch
            for other in self.desk.find(share.order.attempt_id).values()
        )

    def _observation(
        self,
        share: DeskShare,
        sight: Sight,
        raw: str,
        *,
        is_queued: bool = False,
        is_hearsay: bool = False,
        is_cleared: bool = False,
        silent_s: float = 0.0,
    ) -> Observation:
        order, outcome = share.order, share.outcome
        return Observation(
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            node=order.node,
            native_id=self.native_id(order.attempt_id),
            sight=sight,
            incarnation=order.incarnation,
            started_at=outcome.started_at if outcome is not None else share.started_at,
            outcome=outcome,
            raw=str(raw),
            is_queued=is_queued,
            is_hearsay=is_hearsay,
            is_cleared=is_cleared,
            silent_s=silent_s,
        )


def _unreached(facts: NodeFacts) -> NodeFacts:
    return msgspec.structs.replace(facts, is_alive=False, closed="", remarks=(*facts.remarks, UNHEARD))


def _place(share: DeskShare) -> tuple[str, str]:
    return share.order.attempt_id, share.order.node


def _archive_of(submission: Submission) -> str | None:
    digest, path = submission.orders[0].archive_digest, submission.archive_path
    if digest is None:
        return None
    if path is None or not Path(path).is_file():
        raise EngineRefused(
            f"attempt {submission.attempt_id} needs the archive {digest}, which is not at {path}",
            hint="submit the job again",
        )
    return path
