"""The desk: where supervisors on other machines fetch their orders and hand in logs and outcomes.

For engines whose nodes have other disks. An engine lays an attempt's orders down here; a process that comes
with a ticket gets one, once, and no other process ever does (`take`). Until then the engine may close the
share for good (`close`), so that what a cluster starts too late finds nothing to do. Blocking; safe to use
from threads.

    desk/live/<attempt_id>/<node>/   laid down and not forgotten
    desk/kept/<attempt_id>/<node>/   forgotten: logs and outcomes stay
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from shoal import bounded_file
from shoal.clock import Clock
from shoal.engines.base import LogChunk
from shoal.engines.boots import Boot
from shoal.engines.drafts import begin_term, throw_away
from shoal.engines.log_pages import read_page
from shoal.engines.refusal import is_name
from shoal.errors import NotFound, StateError
from shoal.runtime import removal, spool
from shoal.wire import MAX_OUTCOME_MESSAGE, Dispatch, DispatchAnswer, EndKind, Fetch, NodeOutcome, Order

REMOVAL_S = 0.5
HEIR_S = 5.0
"""How long a keeper that is there already has to come for the next order, before another is started."""
FORGOTTEN = ".forgotten"
"""Ends the name of what is on its way from live to kept: its logs must not go with other drafts."""
MAX_LOG_SLACK = 1 << 20
"""Beyond the limit of its order, for Shoal's own last lines."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """Who has the order, for ever. No process: the engine closed the share, and nobody ever will."""

    process: str
    at: float
    log_base: int = 0
    """Where this share's log begins in the desk's file, which goes on over incarnations."""
    launch: int = 0
    """The incarnation that the keeper was started for which has it; that of the share, or one before. Of a
    share that was closed, its own."""


class DeskShare:
    """One share at the desk. Its fields are read by engines and written here alone."""

    def __init__(self, order: Order, directory: Path) -> None:
        self.order = order
        self.files = spool.Share(directory)
        self.taken: Taken | None = None
        self.known_since: float | None = None
        """Monotonic: since when this process knows who has the order; never sooner than it was given."""
        self.started_at: float | None = None
        self.stop: spool.Stop | None = None
        self.stop_seen_at: float | None = None
        """Monotonic: since when this process knows of `stop`. Its own date may lie."""
        self.outcome: NodeOutcome | None = None
        self.heard_at: float | None = None
        """Monotonic: when its keeper last said something, to this process."""
        self.boot: Boot | None = None
        """Of its machine, as the cluster told it while its keeper lived: see `mark_boot`."""
        self.left = ""
        """What its supervisor left that does not die, as its keeper last said it; empty: nothing. On disk: if
        the keeper dies, too, nobody says it again."""
        self.will_be_followed = False
        """Its keeper asks for the order of the share in its place."""
        self.heir_until: float | None = None
        """Monotonic: until when somebody who is there already may come for the order."""

    @property
    def place(self) -> tuple[str, str]:
        """Its attempt and its node."""
        return self.order.attempt_id, self.order.node

    @property
    def is_waiting(self) -> bool:
        return self.taken is None and self.outcome is None

    @property
    def launch(self) -> int:
        """The incarnation under which the cluster knows it."""
        return self.order.incarnation if self.taken is None else self.taken.launch

    @property
    def is_closed(self) -> bool:
        """Nobody has its order, and nobody will."""
        return self.taken is not None and not self.taken.process


@runtime_checkable
class SupportsDesk(Protocol):
    """An engine whose supervisors come from other machines."""

    desk: Desk

    async def as_given(self, order: Order) -> Order:
        """The order, with what is known only when somebody comes for it. `EngineUnreachable`: not now."""


class Desk:
    """One per home. Made anew it knows everything again but when somebody was last heard from."""

    def __init__(self, home: Path, clock: Clock, term: int = 0) -> None:
        """`term`: of the control plane that leads, where several share the home; `Deposed` if a later one was
        here before.
        """
        root = home / "desk"
        self._live, self._kept, self._draft, self._trash = (
            root / name for name in ("live", "kept", "draft", "trash")
        )
        for folder in (root, self._live, self._kept, self._draft, self._trash):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clock = clock
        self._guard = threading.RLock()
        self._numbers = itertools.count(1)
        self._attempts: Mapping[str, Mapping[str, DeskShare]] = {}
        """Replaced, never changed: who only reads must not wait for `_guard`, which is held while a disk is
        slow, or hangs."""
        self._draft = begin_term(self._draft, self._trash, term)
        self._sweep()
        self._attempts = {
            entry.name: {share.order.node: share for share in _found(entry)}
            for entry in sorted(self._live.iterdir())
            if is_name(entry.name)
        }
        for share in self.shares():
            share.known_since = None if share.taken is None else self._clock.monotonic()
            share.stop_seen_at = None if share.stop is None else self._clock.monotonic()
            self._end_if_closed(share)
        self.on_news: Callable[[], None] | None = None
        """Called, from any thread, when a share began or ended."""

    def shares(self) -> list[DeskShare]:
        """Everything laid down and not forgotten, oldest attempt first. Does not block."""
        return [share for shares in self._attempts.values() for share in shares.values()]

    def find(self, attempt_id: str) -> Mapping[str, DeskShare]:
        """The attempt's shares by node; none where it is unknown or forgotten. Does not block."""
        return self._attempts.get(attempt_id, {})

    def is_kept(self, attempt_id: str) -> bool:
        """Whether it was here once and has been forgotten."""
        return is_name(attempt_id) and (self._kept / attempt_id).is_dir()

    def add(self, orders: tuple[Order, ...], archive_path: str | None) -> None:
        """Lay the orders down durably: all of them or none. Done before, it changes nothing."""
        attempt_id = orders[0].attempt_id
        with self._guard:
            if attempt_id in self._attempts:
                return
            draft = self._draft / f"{attempt_id}.{next(self._numbers)}"
            draft.mkdir(mode=0o700)
            try:
                for order in orders:
                    _lay(draft / order.node, order, archive_path)
                spool.sync_directory(draft)
                draft.rename(self._live / attempt_id)
            except OSError:
                removal.remove(str(draft), timeout_s=REMOVAL_S)
                raise
            spool.sync_directory(self._live)
            place = self._live / attempt_id
            shares = {order.node: DeskShare(order, place / order.node) for order in orders}
            self._attempts = {**self._attempts, attempt_id: shares}

    def begin_anew(self, order: Order, archive_path: str | None) -> None:
        """Lay down an order in place of a share that has ended, or where none was. Its log goes on."""
        with self._guard:
            above = self._live / order.attempt_id
            place, log = above / order.node, above / f"{order.node}.log"
            draft = self._draft / f"{order.attempt_id}.{order.node}.{next(self._numbers)}"
            _lay(draft, order, archive_path)
            # A crash in between leaves no order there, which is laid down again, and the log.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                os.link(place / "log", log)
            with contextlib.suppress(FileNotFoundError):
                os.link(log, draft / "log")
            old_place = draft.with_name(f"{draft.name}.old")
            with contextlib.suppress(FileNotFoundError):
                # Into our own place for drafts: where that is gone, another leads, and both renames fail.
                place.rename(old_place)
            draft.rename(place)
            log.unlink(missing_ok=True)
            spool.sync_directory(above)
            shares, share = self._attempts[order.attempt_id], DeskShare(order, place)
            before = shares.get(order.node)
            if before is not None and before.will_be_followed:
                share.heir_until = self._clock.monotonic() + HEIR_S
            self._attempts = {**self._attempts, order.attempt_id: {**shares, order.node: share}}
        throw_away(old_place, self._trash)

    def withdraw(self, attempt_id: str) -> None:
        """Take an attempt back as if it had never been laid down. Nobody may have any order of it."""
        with self._guard:
            shares = self._attempts.get(attempt_id, {})
            if shares and all(share.is_waiting for share in shares.values()):
                held = self._draft / f"{attempt_id}.{next(self._numbers)}"
                # Into our own place for drafts, here and in `forget`: where that is gone another leads, and
                # may have given the order out.
                (self._live / attempt_id).rename(held)
                self._drop(attempt_id)
                throw_away(held, self._trash)

    def take(self, asked: Fetch) -> DeskShare:
        """Give the order to the process that asks. `NotFound`: no such share waits here. `StateError`:
        another process has it, or nobody gets it any more.
        """
        with self._guard:
            share = self._attempts.get(asked.attempt_id, {}).get(asked.node)
            if share is None or not _is_meant(share.order, asked):
                raise NotFound(f"no order waits here for {asked.attempt_id} on {asked.node}")
            if share.taken is None and share.outcome is None:
                base = os.stat(share.files.log).st_size if os.path.exists(share.files.log) else 0  # noqa: PTH110, PTH116
                self._write_taken(share, asked.process, base, asked.incarnation)
                self._end_if_closed(share)
            if share.outcome is not None or share.taken is None or share.taken.process != asked.process:
                raise StateError(
                    f"the order for {asked.attempt_id} on {asked.node} was given to another, or taken back",
                )
            share.heard_at = self._clock.monotonic()
            return share

    def hear(self, told: Dispatch, piece: bytes) -> DispatchAnswer:
        """Keep what a keeper says; on disk when this returns, the log excepted, which is with its outcome.

        `StateError`: whoever says it does not have this share, or no longer, or means another one.
        """
        with self._guard:
            share = self._attempts.get(told.attempt_id, {}).get(told.node)
            if share is None and self.is_kept(told.attempt_id):
                return DispatchAnswer(is_recorded=True, stop_grace_s=0.0)
            if share is None:  # not ours to stop: it may be another desk's
                raise NotFound(f"nobody here knows {told.attempt_id} on {told.node}")
            taken, now = share.taken or self._read_taken(share), self._clock.monotonic()
            if taken is None or not taken.process or taken.process != told.process:
                raise StateError(f"another process has the share of {told.attempt_id} on {told.node}")
            if any(_identity(one) != _identity(share.order) for one in (told, told.outcome or told)):
                raise StateError(f"what was said is not about the share of {told.attempt_id} on {told.node}")
            is_first = share.heard_at is None
            share.heard_at = now
            size = self._append(share, taken.log_base + told.offset, piece) - taken.log_base
            is_news = self._note_left(share, told.left[:MAX_OUTCOME_MESSAGE]) or is_first
            if told.started_at is not None and share.started_at is None:
                spool.write_started(share.files, spool.Started(at=told.started_at))
                share.started_at, is_news = told.started_at, True
            if told.outcome is not None and share.outcome is None and told.offset + len(piece) == size:
                said = told.outcome.message[:MAX_OUTCOME_MESSAGE]
                self._end(share, msgspec.structs.replace(told.outcome, message=said))
                share.will_be_followed, is_news = told.will_follow, True
            is_over = share.outcome is not None and told.outcome is None
            stop_s = 0.0 if is_over else share.stop.grace_s if share.stop is not None else None
            answer = DispatchAnswer(
                size=size,
                stop_grace_s=stop_s,
                is_recorded=share.outcome is not None,
            )
        if is_news and self.on_news is not None:
            self.on_news()
        return answer

    def _note_left(self, share: DeskShare, left: str) -> bool:
        """Whether that is news."""
        if left == share.left:
            return False
        if left:
            spool.durable_write(_left_file(share.files), left.encode(errors="replace"))
        else:
            Path(_left_file(share.files)).unlink(missing_ok=True)
        share.left = left
        return True

    def stop(self, attempt_id: str, grace_s: float) -> None:
        """Ask for its end: who has an order hears it; an order that nobody has is taken back for good."""
        with self._guard:
            for share in self._attempts.get(attempt_id, {}).values():
                if share.outcome is not None:
                    continue
                is_sooner = share.stop is None or grace_s < share.stop.grace_s
                if not self.close(share, EndKind.STOPPED, "stopped before it began") and is_sooner:
                    share.stop = spool.Stop(grace_s=max(grace_s, 0.0), at=self._clock.now())
                    share.stop_seen_at = self._clock.monotonic()
                    spool.write_stop(share.files, share.stop)

    def close(self, share: DeskShare, kind: EndKind, message: str) -> bool:
        """End a share whose order nobody has: nobody will get it. False: somebody has it, or it has ended."""
        with self._guard:
            if share.is_waiting:
                self._write_taken(share, "", 0, share.order.incarnation)
            if share.outcome is not None or not share.is_closed:
                return False  # a deposed control plane may have given it out
            self._end(share, self.end_of(share, kind, message))
            return True

    def close_unbegun(self, attempt_id: str, launch: int, kind: EndKind, message: str) -> bool:
        """Close all shares that a cluster was to start at once. False: somebody has one, or one has ended,
        and nothing was changed.
        """
        with self._guard:
            shares = [share for share in self.find(attempt_id).values() if share.launch == launch]
            is_unbegun = all(share.is_waiting for share in shares)
            for share in shares if is_unbegun else ():
                self.close(share, kind, message)
            return is_unbegun

    def mark_boot(self, share: DeskShare, boot: Boot) -> None:
        """Remember the start of the machine that its keeper lives on: one that follows means its end."""
        with self._guard:
            spool.durable_write(_boot_file(share.files), msgspec.json.encode(boot))
            share.boot = boot

    def bury(self, share: DeskShare, kind: EndKind, message: str) -> None:
        """End a share on evidence that nothing of it runs. What its keeper says later changes nothing."""
        with self._guard:
            if share.outcome is None:
                self._end(share, self.end_of(share, kind, message))

    def end_of(self, share: DeskShare, kind: EndKind, message: str) -> NodeOutcome:
        """The outcome where no supervisor will write one."""
        order = share.order
        return NodeOutcome(
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            node=order.node,
            kind=kind,
            ended_at=self._clock.now(),
            message=message[:MAX_OUTCOME_MESSAGE],
            started_at=share.started_at,
            incarnation=order.incarnation,
        )

    def forget(self, attempt_id: str) -> None:
        """Keep its logs and outcomes and nothing else. Does nothing while something of it may run."""
        with self._guard:
            shares = self._attempts.get(attempt_id)
            if shares is None or any(share.outcome is None for share in shares.values()):
                return
            held, kept = self._draft / f"{attempt_id}{FORGOTTEN}", self._kept / attempt_id
            (self._live / attempt_id).rename(held)
            held.rename(kept)
            self._drop(attempt_id)
            for node in shares:
                Path(spool.Share(kept / node).archive).unlink(missing_ok=True)

    def _drop(self, attempt_id: str) -> None:
        self._attempts = {key: shares for key, shares in self._attempts.items() if key != attempt_id}

    def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        """As `Engine.read_log`."""
        held = self._draft / f"{attempt_id}{FORGOTTEN}"
        for attempt in (self._live / attempt_id, held, self._kept / attempt_id):
            directory = attempt / node
            if is_name(attempt_id) and is_name(node) and directory.is_dir():
                files = spool.Share(directory)
                is_ended = os.path.exists(files.outcome)  # noqa: PTH110
                page = read_page(files.log, offset, limit, is_ended=is_ended)
                if directory.is_dir():
                    return page
                # Forgotten meanwhile, which happens once: it is in a later place now.
        return LogChunk(data=b"", next_offset=max(offset, 0), size=0, is_complete=True)

    def kept(self) -> frozenset[str]:
        """The attempts that were forgotten, and whose logs are here."""
        return frozenset(entry.name for entry in self._kept.iterdir())

    def old(self, older_than: float, max_bytes: int) -> list[str]:
        """Those of them that may go, oldest first: by the rule of `SupportsPrune.prune`."""
        found = []
        for entry in self._kept.iterdir():
            facts = [path.stat() for path in entry.rglob("*") if path.is_file()]
            found.append(
                (max((f.st_mtime for f in facts), default=0.0), sum(f.st_size for f in facts), entry.name)
            )
        total, going = sum(size for _, size, _ in found), list[str]()
        for written_at, size, attempt_id in sorted(found):
            if written_at >= older_than and total <= max_bytes:
                break
            total -= size
            going.append(attempt_id)
        return going

    def remove(self, attempt_ids: Collection[str], *, are_known: bool = False) -> None:
        """What was kept of them. May be repeated. `are_known`: but for the names, which are `old` again."""
        remove = removal.empty if are_known else removal.remove
        for attempt_id in attempt_ids:
            remove(str(self._kept / attempt_id), timeout_s=REMOVAL_S)

    def _sweep(self) -> None:
        """Remove what was thrown away, but for what somebody was about to keep when he was killed."""
        for held in self._trash.glob(f"*/*{FORGOTTEN}"):
            held.rename(self._kept / held.name.removesuffix(FORGOTTEN))
        removal.empty(str(self._trash), timeout_s=REMOVAL_S)

    def _write_taken(self, share: DeskShare, process: str, log_base: int, launch: int) -> None:
        """Once, for ever. Where a control plane that was deposed meanwhile was quicker, its word stands."""
        mine = Taken(process=process, at=self._clock.now(), log_base=log_base, launch=launch)
        if spool.write_once(share.files.claimed, msgspec.json.encode(mine)):
            self._know(share, mine)
        else:
            self._read_taken(share)

    def _read_taken(self, share: DeskShare) -> Taken | None:
        self._know(share, _taken(share.files))
        return share.taken

    def _know(self, share: DeskShare, taken: Taken | None) -> None:
        share.taken = taken
        if taken is not None and share.known_since is None:
            share.known_since = self._clock.monotonic()

    def _end_if_closed(self, share: DeskShare) -> None:
        """Who closed it was killed, or deposed, before the outcome was written."""
        if share.is_closed and share.outcome is None:
            self._end(share, self.end_of(share, EndKind.LOST, "its order was taken back before it began"))

    def _append(self, share: DeskShare, at: int, piece: bytes) -> int:
        """Add what the log does not have yet; its size afterwards. A piece from beyond its end is left out.

        One that is full counts on, so that its end can come.
        """
        fd = os.open(share.files.log, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(fd).st_size
            most = (
                share.order.limits.max_log_bytes
                + MAX_LOG_SLACK
                + (share.taken.log_base if share.taken else 0)
            )
            if size >= most:
                return max(size, at + len(piece))
            new = piece[size - at :] if at <= size else b""
            if new and share.outcome is None:
                _write_whole(fd, new[: most - size], size)
                size += len(new)
            return size
        finally:
            os.close(fd)

    def _end(self, share: DeskShare, outcome: NodeOutcome) -> None:
        """Once, for ever: where another control plane has written how this share ended, its word stands."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(share.files.log, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        if not spool.write_once(share.files.outcome, msgspec.json.encode(outcome)):
            found = spool.read_outcome(share.files)
            if found is None or found.incarnation < share.order.incarnation:
                self._replace_outcome(share, outcome)  # of the share before this: see `_found`
            elif found.incarnation == share.order.incarnation:
                outcome = found
            # Else another share has this one's place, and has ended: we were deposed, and nobody asks us.
        share.outcome = outcome

    def _replace_outcome(self, share: DeskShare, outcome: NodeOutcome) -> None:
        """By way of our own place for drafts: where that is gone another leads, and what stands there by now
        may be his word about this share, or a later one.
        """
        draft = self._draft / f"{share.order.attempt_id}.{share.order.node}.{next(self._numbers)}.outcome"
        with contextlib.suppress(FileNotFoundError):
            spool.durable_write(draft, msgspec.json.encode(outcome))
            draft.rename(share.files.outcome)
            spool.sync_directory(share.files.directory)


def _write_whole(fd: int, data: bytes, at: int) -> None:
    """A disk that is nearly full may take a part, without an error. `OSError`: what it took is there, and
    counts when the rest is said again.
    """
    view = memoryview(data)
    while view:
        taken = os.pwrite(fd, view, at)
        view, at = view[taken:], at + taken


def _identity(one: Order | Dispatch | NodeOutcome) -> tuple[str, int, str, int]:
    return one.attempt_id, one.epoch, one.node, one.incarnation


def _is_meant(order: Order, asked: Fetch) -> bool:
    if asked.after is not None:
        return order.incarnation > asked.after
    return order.incarnation == asked.incarnation


def _lay(directory: Path, order: Order, archive_path: str | None) -> None:
    directory.mkdir(mode=0o700)
    files = spool.Share(directory)
    if archive_path is not None:
        try:
            os.link(archive_path, files.archive)
        except OSError:
            shutil.copyfile(archive_path, files.archive)
    spool.write_order(files, order)


def _found(attempt: Path) -> Iterator[DeskShare]:
    """The attempt's shares as the disk has them."""
    for directory in sorted(path for path in attempt.iterdir() if path.is_dir()):
        files = spool.Share(directory)
        order = spool.read_order(files)
        if order is None:
            continue
        share = DeskShare(order, directory)
        share.taken = _taken(files)
        started = spool.read_started(files)
        share.started_at = started.at if started is not None else None
        share.stop, outcome = spool.read_stop(files), spool.read_outcome(files)
        # One of another incarnation was written late, by a control plane that was deposed.
        share.outcome = outcome if outcome is None or outcome.incarnation == order.incarnation else None
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            boot = bounded_file.read_whole(_boot_file(files), spool.MAX_RECORD)
            share.boot = msgspec.json.decode(boot, type=Boot)
        with contextlib.suppress(FileNotFoundError):
            left = bounded_file.read_whole(_left_file(files), spool.MAX_RECORD)
            share.left = left.decode(errors="replace")
        yield share


def _boot_file(files: spool.Share) -> str:
    """Not `booted`, where older versions kept a date that nobody renewed when a clock was set."""
    return f"{files.directory}/boot"


def _left_file(files: spool.Share) -> str:
    return f"{files.directory}/left"


def _taken(files: spool.Share) -> Taken | None:
    try:
        return msgspec.json.decode(bounded_file.read_whole(files.claimed, spool.MAX_RECORD), type=Taken)
    except FileNotFoundError:
        return None
