"""The local engine: the seven verbs over the spool of one machine.

Every verb is one trip to a worker thread, since disks may block; none waits for a job.
"""

# The spool names its files by strings: a supervisor starts without pathlib.
# ruff: noqa: PTH110, PTH112, PTH113

from __future__ import annotations

import contextlib
import errno
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
import structlog

from shoal.clock import Clock
from shoal.engines.base import LogChunk, Observation, SavedCheckpoints, Sight, Submission
from shoal.engines.checkpoint_folder import CheckpointFolder
from shoal.engines.local.book import Book, ShareView, Views
from shoal.engines.local.checkpoint import with_checkpoint, with_model
from shoal.engines.local.client import Children, Nursery, free_port, read_words
from shoal.engines.local.inventory import take_inventory
from shoal.engines.local.notice import Notice
from shoal.engines.local.parse import read_page
from shoal.engines.local.render import (
    complete_orders,
    detect_command,
    nursery_command,
    supervisor_command,
    supervisor_environment,
)
from shoal.engines.local.simulated import SimulatedNodes
from shoal.engines.local.states import native_id
from shoal.engines.local.watch import Watch
from shoal.engines.refusal import refuse_malformed, what_is_gone
from shoal.engines.threads import on_thread
from shoal.errors import EngineRefused, NodeGone
from shoal.model.node import NodeFacts
from shoal.runtime.standby.place import directory_of
from shoal.wire import Credentials, Order

T = TypeVar("T")
log = structlog.get_logger()

MAX_THREADS = 8
UNKNOWN = "unknown"
LOOK_AGAIN_S = 60.0
CLAIM_S = 60.0
"""A supervisor that has not claimed its share so long after its start hangs: it usually takes 50 ms."""
MAX_CREDENTIALS = 1 << 20
"""What an unprivileged process may put in a pipe (fs.pipe-max-size)."""


class LocalEngine:
    """One per SHOAL_HOME. Thrown away and made anew it finds everything in the spool again."""

    name = "local"
    can_replace_shares = True

    def __init__(
        self,
        home: Path,
        *,
        clock: Clock,
        server_file: Path,
        simulated: SimulatedNodes | None = None,
        confinement: tuple[str, ...] | None = None,
        has_nursery: bool = True,
        term: int = 0,
    ) -> None:
        """`confinement`: only these of the ways to confine a job; None: all that work here. `term`: of the
        control plane that leads, where several share the home; `Deposed` if a later one was here before.

        Without a nursery every supervisor is a new interpreter, which is slower and means the same.
        """
        self._home = home.absolute()
        self._server_file = str(server_file.absolute())
        self._simulated = simulated
        self._confinement = confinement
        self._clock = clock
        self._book = Book(self._home, term)
        self._notice = Notice()
        self._watch = Watch(clock, self._notice)
        environment = supervisor_environment(os.environ, self._server_file)
        self._children = Children(Nursery(nursery_command(), environment) if has_nursery else None)
        self._threads = anyio.CapacityLimiter(MAX_THREADS)
        self._checkpoints = CheckpointFolder(home / "checkpoints", clock)
        self._guard = threading.Lock()
        self._looking = threading.Lock()
        self._promised: set[int] = set()
        self._facts: dict[str, NodeFacts] = {}
        self._look_at = 0.0
        """Monotonic: when to look again at what could not be told."""

    async def submit(self, submission: Submission) -> str:
        return await self._ask(lambda: self._submit(submission))

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        await self._ask(lambda: self._cancel(attempt_id, grace_s))

    async def list_owned(self) -> list[Observation]:
        return await self._ask(self._list_owned)

    async def forget(self, attempt_id: str) -> None:
        """Does nothing while something of it may still run: then it stays listed."""
        await self._ask(lambda: self._forget(attempt_id))

    async def nodes(self) -> list[NodeFacts]:
        """This machine first, then the simulated nodes. Looked at once, since its parts do not change; but
        again from time to time while nobody knows what confines jobs there.
        """
        return list((await self._ask(self._nodes_again)).values())

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        return await self._ask(lambda: self._read_log(attempt_id, node, offset, limit))

    def notice(self, tell: Callable[[], None]) -> None:
        self._notice.listen(tell)

    async def prune(self, older_than: float, max_bytes: int) -> int:
        return await self._ask(lambda: self._book.prune(older_than, max_bytes))

    async def checkpoints(self) -> list[str]:
        return await self._checkpoints.jobs()

    async def saved(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        return await self._checkpoints.saved(job_id, verify_s)

    async def drop_checkpoint(self, job_id: str) -> None:
        await self._checkpoints.drop(job_id)

    async def close(self) -> None:
        """Supervisors need no parent, and run on."""
        self._notice.close()
        self._children.close()

    async def _ask(self, work: Callable[[], T]) -> T:
        return await on_thread(work, f"the local engine could not use {self._home}", self._threads)

    def _submit(self, submission: Submission) -> str:
        attempt_id = submission.attempt_id
        # Forgetting moves it from the first place to the second: looked for in that order, it is found.
        views = self._book.find(attempt_id)
        if not views and self._book.is_kept(attempt_id):
            return native_id(attempt_id)
        views = self._begin_anew(submission, views) if views else self._take(submission)
        for view in views.values():
            self._spawn(view, submission.credentials.get(view.key.node, Credentials()))
        return native_id(attempt_id)

    def _take(self, submission: Submission) -> Views:
        """Check it and write its orders. Nothing is started, and after an error nothing will be."""
        nodes = self._nodes()
        refuse_malformed(submission, nodes)
        archive_path = _archive_of(submission)
        for credentials in submission.credentials.values():
            _refuse_large(credentials)
        address = nodes[submission.orders[0].node].address
        port = self._promise_port(address, submission.attempt_id)
        try:
            orders = complete_orders(submission, address, port, self._confinement)
            orders = with_model(self._home, with_checkpoint(self._home, orders))
            return self._book.add(orders, archive_path)
        finally:
            # From here on the order itself tells that the port is taken.
            with self._guard:
                self._promised.discard(port)

    def _begin_anew(self, submission: Submission, views: Views) -> Views:
        """The attempt's shares, with new ones where an order replaces one that has ended."""
        lacking = [order for order in submission.orders if _is_lacking(order, views.get(order.node))]
        nodes = self._nodes()
        for order in lacking:
            gone = what_is_gone(order, nodes)
            if gone is not None:
                raise NodeGone(gone, hint="shoal nodes", node=order.node)
            look = self._watch.look(views[order.node]) if order.node in views else None
            if look is not None and look.sight is not Sight.ENDED:
                raise OSError(errno.EBUSY, f"{order.node} still has the share that is to be replaced")
        if lacking:
            archive_path, address = _archive_of(submission), nodes[submission.orders[0].node].address
            completed = with_model(self._home, complete_orders(submission, address, 0, self._confinement))
            anew = {order.node for order in lacking}
            for order in with_checkpoint(self._home, completed):
                if order.node in anew:
                    self._book.begin_anew(order, archive_path)
        return self._book.find(submission.attempt_id)

    def _promise_port(self, address: str, attempt_id: str) -> int:
        views = self._book.known()
        with self._guard:
            used = {port for view in views if (port := view.port()) is not None}
            port = free_port(address, used | self._promised, zlib.crc32(attempt_id.encode()))
            self._promised.add(port)
            return port

    def _spawn(self, view: ShareView, credentials: Credentials) -> None:
        """Start a supervisor unless the share is claimed or one of ours is on its way."""
        with view.guard:
            if os.path.exists(view.share.claimed):
                return
            if view.child is not None and self._children.is_running(view.child):
                if self._clock.monotonic() >= view.claim_by:
                    self._children.kill(view.child)  # the next look counts it, and starts another
                return
            gone = self._what_is_gone(view)
            if gone is not None:
                self._watch.give_up(view, gone)
                return
            if not self._watch.may_start(view):
                return
            view.child = self._children.spawn(
                view.share.directory,
                supervisor_command(view.share.directory),
                supervisor_environment(os.environ, self._server_file),
                view.share.errors,
                msgspec.json.encode(credentials),
                self._standby_of(view),
            )
            view.claim_by = self._clock.monotonic() + CLAIM_S

    def _standby_of(self, view: ShareView) -> str | None:
        """Where one waits to take over a lost share, if it does. The first share of a node has none."""
        with contextlib.suppress(msgspec.DecodeError):
            order = view.read_order()
            if order is not None and order.incarnation > 0 and view.num_failed == 0:
                return directory_of(view.share)
        return None

    def _what_is_gone(self, view: ShareView) -> str | None:
        """Taken by an engine before us, on a machine that has changed since, and not begun there."""
        with contextlib.suppress(msgspec.DecodeError):
            order = view.read_order()
            return what_is_gone(order, self._nodes()) if order is not None else None
        return None

    def _cancel(self, attempt_id: str, grace_s: float) -> None:
        failure: OSError | None = None
        for view in self._book.find(attempt_id).values():
            try:
                self._watch.stop(view, max(grace_s, 0.0))
            except OSError as error:
                # A share that cannot be reached must not keep the others from being stopped.
                failure = error
        self._children.reap()
        if failure is not None:
            raise failure

    def _list_owned(self) -> list[Observation]:
        self._children.reap()
        self._book.sweep()
        looks = (self._watch.look(view) for view in self._book.all())
        return [look for look in looks if look is not None]

    def _forget(self, attempt_id: str) -> None:
        views = self._book.find(attempt_id)
        looks = [self._watch.look(view) for view in views.values()]
        if views and all(look is not None and look.sight is Sight.ENDED for look in looks):
            self._book.keep(attempt_id)

    def _nodes(self) -> dict[str, NodeFacts]:
        with self._looking:
            if not self._facts:
                self._children.reap()  # the nursery gets warm while we look
                self._look_around()
            return self._facts

    def _nodes_again(self) -> dict[str, NodeFacts]:
        self._nodes()
        if self._confinement is None and self._clock.monotonic() >= self._look_at:
            self._look_around()  # without the lock, for which submissions would wait
        return self._facts

    def _look_around(self) -> None:
        unknown = self._choose_confinement()
        walls = UNKNOWN if unknown else " ".join(self._confinement or ())
        found = take_inventory(self._home, walls)
        machine = msgspec.structs.replace(found, remarks=(*found.remarks, *unknown))
        simulated = self._simulated.facts(walls) if self._simulated else []
        for told in machine.remarks:
            log.info("engine.remark", engine=self.name, node=machine.name, told=told)
        self._facts = {facts.name: facts for facts in (machine, *simulated)}
        self._look_at = self._clock.monotonic() + LOOK_AGAIN_S

    def _choose_confinement(self) -> tuple[str, ...]:
        """Find out what works here, so that no supervisor has to. Remarks, where it could not be."""
        if self._confinement is not None:
            return ()
        environment = supervisor_environment(os.environ, self._server_file)
        words, because = read_words(detect_command(), environment)
        # Without an answer the orders name none, and every supervisor finds out for itself.
        self._confinement = words or None
        return () if words else (f"what confines jobs here is not known: {because}",)

    def _read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        share = self._book.place(attempt_id, node)
        if share is None:
            return LogChunk(data=b"", next_offset=max(offset, 0), size=0, is_complete=True)
        # Asked before reading: once there is an outcome, the log does not grow.
        is_ended = os.path.exists(share.outcome)
        page = read_page(share.log, offset, limit, is_ended=is_ended)
        if not os.path.isdir(share.directory):
            # Forgotten meanwhile, which happens once: it is in its other place now.
            return self._read_log(attempt_id, node, offset, limit)
        return page


def _is_lacking(order: Order, view: ShareView | None) -> bool:
    """Whether a share is to be begun in place of one that was lost: here, or where it was before."""
    known = view.read_order() if view is not None else None
    return order.incarnation > (known.incarnation if known is not None else 0)


def _archive_of(submission: Submission) -> str | None:
    """The snapshot that goes with the orders; refuses orders whose snapshot is not there."""
    digest, path = submission.orders[0].archive_digest, submission.archive_path
    if digest is None:
        return None
    if path is None or not os.path.isfile(path):
        raise EngineRefused(
            f"attempt {submission.attempt_id} needs the archive {digest}, which is not at {path}",
            hint="submit the job again",
        )
    return path


def _refuse_large(credentials: Credentials) -> None:
    size = len(msgspec.json.encode(credentials))
    if size > MAX_CREDENTIALS:
        raise EngineRefused(
            f"the job's secrets take {size} bytes; the most is {MAX_CREDENTIALS}",
            hint="put large secrets in a file and mount it",
        )
