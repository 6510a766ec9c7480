"""An engine on other machines: the seven verbs over a desk, and three more for the cluster below.

Orders wait at the desk; the cluster starts keepers (`shoal.runtime.keeper`) on the nodes, who fetch them.
What a share does is known from its keeper (`sightings`). What the cluster says of it is a reason to look and
to explain; only where `Glimpse.is_over` is set is it evidence. A cluster that lost a submission is asked
again (`starts`); that this is safe is the desk's doing, which gives every order to one process.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from shoal.clock import Clock
from shoal.engines.base import CANNOT_ASK, LogChunk, Observation, SavedCheckpoints, Submission
from shoal.engines.boots import Boot
from shoal.engines.checkpoint_folder import CheckpointFolder
from shoal.engines.desk import Desk, DeskShare
from shoal.engines.glimpses import NO_TRACE, Glimpse, Glimpses, Stage
from shoal.engines.reach import Reach
from shoal.engines.refusal import is_name, refuse_malformed, refuse_strangers, what_is_gone
from shoal.engines.sightings import REPLACED, Sightings
from shoal.engines.starts import Starts
from shoal.engines.threads import on_thread
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone
from shoal.model.node import NodeFacts
from shoal.wire import EndKind, Order, Summons

T = TypeVar("T")
log = structlog.get_logger()

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below Linux's ephemeral ports (32768 on), which any outgoing connection may take at any time."""


class Asked(msgspec.Struct, frozen=True):
    """When a question began, and its answer had come. Monotonic."""

    at: float
    answered_at: float


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
        self._reach = reach
        self._share(reach.shared)
        self.sightings = Sightings(self.desk, clock, self.native_id)
        self._starts = Starts(self, self.desk, clock, reach)
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
        await self._starts.start(submission, is_new=is_new)
        return self.native_id(attempt_id)

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        shares = self.desk.find(attempt_id)
        if not shares:
            return
        await self.on_thread(lambda: self.desk.stop(attempt_id, grace_s))
        # Nobody has begun, and nobody can: no need to wait in a queue. Or its grace is over, and who has
        # it hears nobody; one that speaks hears it from the desk, and may still hand in the rest of its log.
        if all(share.taken is None or not share.taken.process for share in shares.values()) or any(
            self.sightings.is_deaf(share) and self._is_grace_over(share) for share in shares.values()
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
            if self.sightings.is_deaf(share):
                await self.on_thread(lambda share=share: self.desk.bury(share, EndKind.FENCED, told))  # type: ignore[misc]

    def _is_grace_over(self, share: DeskShare) -> bool:
        if share.stop is None or share.stop_seen_at is None:
            return False
        return self._clock.monotonic() >= share.stop_seen_at + share.stop.grace_s

    async def list_owned(self) -> list[Observation]:
        shares = self.desk.shares()
        await self.on_thread(lambda: self.sightings.end_replaced(shares))
        open_shares = [share for share in shares if share.outcome is None]
        seen, unseen = await self._glimpses(open_shares)
        # On a thread, as what ends is written down; on one for all, as there may be hundreds.
        return await self.on_thread(lambda: self.sightings.observe(shares, seen, unseen))

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
                self._starts.forget(attempt_id)
                self.sightings.forget(attempt_id)

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
            if not self.sightings.is_deaf(before):
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
