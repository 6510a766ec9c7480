"""Which attempts there are: the spool's directories, and what was learned from them so far.

    spool/live/<attempt_id>/<node>/   taken and not forgotten
    spool/kept/<attempt_id>/<node>/   forgotten: logs and outcomes stay
    spool/standby/                    supervisors in waiting (`runtime/standby`)
    spool/draft/<term>/               half made; nothing there runs
    spool/trash/                      half removed; nothing there runs

An attempt appears in `live` whole, by one rename, and leaves it by another. Whoever leads takes away the
drafts of those before: one that was deposed and does not know it yet cannot make anything appear.
"""

# The spool names its files by strings: a supervisor starts without pathlib.
# ruff: noqa: PTH104

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import threading
from pathlib import Path

import msgspec
import structlog

from shoal.clock import BootClock
from shoal.engines.base import Observation
from shoal.engines.drafts import begin_term
from shoal.engines.local.states import ShareKey
from shoal.engines.refusal import is_name
from shoal.runtime import removal, spool
from shoal.runtime.standby.place import FOLDER, bury
from shoal.wire import NodeOutcome, Order

log = structlog.get_logger()
CLOCK = BootClock()
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
REMOVAL_S = 0.5
"""How long one call may spend on what a job left, be it ten million files; `sweep` goes on with it."""


class ShareView:
    """One share and what cannot change about it any more. `guard` is held by whoever acts on it."""

    def __init__(self, attempt_id: str, node: str, directory: Path) -> None:
        self.share = spool.Share(directory)
        self.key = ShareKey(attempt_id, node)
        self.guard = threading.Lock()
        self.order: Order | None = None
        self.started: spool.Started | None = None
        self.is_claimed = self.is_followed = False
        self.child: int | None = None
        """The supervisor we spawned last, if this process did."""
        self.claim_by = 0.0
        """Monotonic: when that one is given up."""
        self.num_failed = 0
        """How many of ours ended before they claimed it."""
        self.start_at = 0.0
        """Monotonic: when the next may be tried."""
        self.kill_at: float | None = None
        """Monotonic: when a stop becomes a kill."""
        self.is_stuck = False
        """Something of it did not die when it was waited for."""
        self.lost: NodeOutcome | None = None
        """The end we found for it, on disk or not."""
        self.end: Observation | None = None
        """Set once its end is on disk: nothing about it changes any more."""

    def read_order(self) -> Order | None:
        """The order, read at most once. `msgspec.DecodeError`: the file is not an order."""
        if self.order is None:
            self.order = spool.read_order(self.share)
            if self.order is not None:
                self.key = ShareKey(
                    self.key.attempt_id, self.key.node, self.order.epoch, self.order.incarnation
                )
        return self.order

    def port(self) -> int | None:
        """The port its ranks may use; None once it is over, or where its order cannot be read."""
        if self.end is not None:
            return None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            order = self.read_order()
            return order.master_port if order else None
        return None


Views = dict[str, ShareView]


class Book:
    """Blocking, and safe to use from several threads."""

    def __init__(self, home: Path, term: int = 0) -> None:
        """`term`: of the control plane that leads. `Deposed` where one with a later term was here before."""
        root = home / "spool"
        self.live, self.kept, self.draft, self.trash = (
            root / name for name in ("live", "kept", "draft", "trash")
        )
        self.standby = root / FOLDER
        for folder in (home, root, self.live, self.kept, self.draft, self.trash):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._attempts: dict[str, Views] = {}
        self._guard = threading.Lock()
        self._numbers = itertools.count(1)

        self._unburied: set[Path] = set()
        self._is_read = False
        self.draft = begin_term(self.draft, self.trash, term)

    def sweep(self) -> None:
        """Remove some more of what was thrown away, or left half removed by a crash, or by a standby."""
        removal.empty(str(self.trash), timeout_s=REMOVAL_S)
        deadline = CLOCK.monotonic() + REMOVAL_S
        try:
            places = list(self.standby.iterdir())
        except OSError as error:
            self._tell_unburied(self.standby, error)
            return
        random.shuffle(places)  # one that does not die must not always come before the others
        for place in places:
            left_s = deadline - CLOCK.monotonic()
            if left_s <= 0:
                return
            try:
                bury(str(place), timeout_s=left_s)  # of one that lives, nothing
            except OSError as error:
                self._tell_unburied(place, error)

    def _tell_unburied(self, place: Path, error: OSError) -> None:
        """Once for each: it is tried again with every look, and nothing else depends on it."""
        if error.errno != errno.ENOENT and place not in self._unburied:
            self._unburied.add(place)
            log.warning("engine.standby_not_buried", path=str(place), because=str(error))

    def all(self) -> list[ShareView]:
        """Every share taken and not forgotten, oldest attempt first."""
        with self._guard:
            with os.scandir(self.live) as entries:
                names = sorted(entry.name for entry in entries if is_name(entry.name))
            self._attempts = {name: self._views(name) for name in names}
            self._is_read = True
            return self._flat()

    def known(self) -> list[ShareView]:
        """As `all`, from memory: complete but for what somebody else did to the directory."""
        with self._guard:
            if self._is_read:
                return self._flat()
        return self.all()

    def find(self, attempt_id: str) -> Views:
        """The attempt's shares by node; none where it is unknown or forgotten."""
        if not is_name(attempt_id) or not (self.live / attempt_id).is_dir():
            return {}
        with self._guard:
            views = self._attempts[attempt_id] = self._views(attempt_id)
            return views

    def is_kept(self, attempt_id: str) -> bool:
        """Whether it was here once and has been forgotten."""
        return is_name(attempt_id) and (self.kept / attempt_id).is_dir()

    def place(self, attempt_id: str, node: str) -> spool.Share | None:
        """Where a share's files are now, live or kept."""
        if is_name(attempt_id) and is_name(node):
            # Forgetting moves it from the first place to the second: look in that order.
            for folder in (self.live, self.kept):
                directory = folder / attempt_id / node
                if directory.is_dir():
                    return spool.Share(directory)
        return None

    def add(self, orders: tuple[Order, ...], archive_path: str | None) -> Views:
        """Write every order durably; the attempt is there with all of them or not at all."""
        attempt_id = orders[0].attempt_id
        draft = self.draft / f"{attempt_id}.{next(self._numbers)}"
        draft.mkdir(mode=0o700)
        try:
            for order in orders:
                (draft / order.node).mkdir(mode=0o700)
                share = spool.Share(draft / order.node)
                if archive_path is not None:
                    _link_or_copy(archive_path, share.archive)
                spool.write_order(share, order)
            spool.sync_directory(draft)
            draft.rename(self.live / attempt_id)
        except OSError as error:
            removal.remove(str(draft), timeout_s=REMOVAL_S)
            if error.errno not in TAKEN:
                raise
        spool.sync_directory(self.live)
        return self.find(attempt_id)

    def begin_anew(self, order: Order, archive_path: str | None) -> None:
        """Put a new share where one has ended, or was none. Its log goes on in the same file.

        A crash in between leaves no share there, nothing that could be started, and the log.
        """
        above, number = self.live / order.attempt_id, next(self._numbers)
        place, draft = above / order.node, self.draft / f"{order.attempt_id}.{order.node}.{number}"
        log = above / f"{order.node}.log"
        draft.mkdir(mode=0o700)
        old, new = spool.Share(place), spool.Share(draft)
        try:
            if archive_path is not None:
                _link_or_copy(archive_path, new.archive)
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                os.link(old.log, log)
            with contextlib.suppress(FileNotFoundError):
                os.link(log, new.log)
            spool.write_order(new, order)
        except OSError:
            removal.remove(str(draft), timeout_s=REMOVAL_S)
            raise
        old_place = draft.with_name(f"{draft.name}.old")
        with contextlib.suppress(FileNotFoundError):
            # Into our own place for drafts: where that is gone, another leads, and both renames fail.
            place.rename(old_place)
        draft.rename(place)
        log.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            # `sweep` removes it: the ranks do not wait for that.
            old_place.rename(self.trash / f"{draft.name}.{os.urandom(6).hex()}")
        spool.sync_directory(above)
        with self._guard:
            view = ShareView(order.attempt_id, order.node, place)
            self._attempts[order.attempt_id] = {**self._views(order.attempt_id), order.node: view}

    def keep(self, attempt_id: str) -> None:
        """Move it from `live` to `kept` and throw away what its ranks worked in. May be repeated."""
        rubbish = []
        for node, view in self.find(attempt_id).items():
            share = view.share
            for path in (share.work, share.scratch, share.stand_ins, share.archive):
                thrown = self.trash / f"{attempt_id}.{node}.{os.urandom(6).hex()}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path, thrown)
                    rubbish.append(thrown)
        with contextlib.suppress(FileNotFoundError):
            (self.live / attempt_id).rename(self.kept / attempt_id)
        with self._guard:
            self._attempts.pop(attempt_id, None)
        for thrown in rubbish:
            removal.remove(str(thrown), timeout_s=REMOVAL_S)

    def prune(self, older_than: float, max_bytes: int) -> int:
        """Remove kept attempts last written before that date, then the oldest until the rest fits.

        Returns how many. An attempt leaves `kept` whole, by one rename, as it came.
        """
        found = sorted((*_age_and_size(entry), entry) for entry in self.kept.iterdir())
        total = sum(size for _, size, _ in found)
        pruned = 0
        for written_at, size, entry in found:
            if written_at >= older_than and total <= max_bytes:
                break
            self.discard(entry)
            total -= size
            pruned += 1
        return pruned

    def discard(self, path: Path) -> None:
        """Take it away at once and remove it then: a crash in between leaves it in the trash."""
        thrown = self.trash / f"{path.name}.{os.urandom(6).hex()}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(thrown)
        removal.remove(str(thrown), timeout_s=REMOVAL_S)

    def _flat(self) -> list[ShareView]:
        return [view for views in self._attempts.values() for view in views.values()]

    def _views(self, attempt_id: str) -> Views:
        known = self._attempts.get(attempt_id)
        if known:
            return known
        try:
            with os.scandir(self.live / attempt_id) as entries:
                nodes = sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {node: ShareView(attempt_id, node, self.live / attempt_id / node) for node in nodes}


def _age_and_size(path: Path) -> tuple[float, int]:
    """When anything in it was written last, and the bytes of all of it. Follows no link."""
    written_at, total = 0.0, 0
    for above, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                facts = Path(above, name).lstat()
                written_at, total = max(written_at, facts.st_mtime), total + facts.st_size
    return written_at, total


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)
