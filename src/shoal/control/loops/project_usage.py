"""Decayed usage from the store alone: what fair share starts from after a restart.

Every ten minutes the usage of each project is written down with the newest event it covers. After a crash the
usage is that record, plus the attempts that ended since, plus what is still held. So a crash at any
instruction loses nothing, and at most ten minutes of work have to be read.

`project_shares` reports to people what each project holds now, and how its recent usage compares to its
share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

import msgspec

from shoal.control.project_tree import project_view
from shoal.model.attempt import Attempt
from shoal.model.people import Project
from shoal.scheduler import Planner
from shoal.scheduler.facts.amounts import DeviceAmount, held_devices
from shoal.scheduler.order.fair_share import FairShare, Usage
from shoal.scheduler.order.project_tree import ProjectTree
from shoal.store import EventFilter, Store, Tx

KEY = "usage"
MAX_EVENTS = 200_000
"""The most events that are read back. Only a log without any usage record is longer."""
PAGE = 1000
ENDED = EventFilter(kinds_prefix="attempt.ended")


class UsageRecord(msgspec.Struct, frozen=True):
    """Usage of each project, and the newest event it covers."""

    seen_seq: int
    usages: tuple[Usage, ...]


def recall_usage(tx: Tx, half_life_s: float) -> UsageRecord:
    """Return the usage as of this transaction. Held resources count up to each usage's `at`; `FairShare.hold`
    continues from there.
    """
    newest_seq = tx.events.head().seq
    text = tx.meta.get(KEY)
    before = msgspec.json.decode(text, type=UsageRecord) if text else UsageRecord(0, ())
    fair = FairShare(ProjectTree(), half_life_s)
    fair.load_usages(before.usages)
    counted_until = {usage.project: usage.at for usage in before.usages}
    for attempt in _ended(tx, max(before.seen_seq, newest_seq - MAX_EVENTS)):
        if attempt.placed_at is None or attempt.ended_at is None:
            continue
        since = max(attempt.placed_at, counted_until.get(attempt.project, -inf))
        if attempt.ended_at > since:
            fair.charge(attempt.project, held_devices(attempt.allocation), since, attempt.ended_at)
    hold_all(tx, fair)
    return UsageRecord(newest_seq, fair.usages())


def hold_all(tx: Tx, fair: FairShare) -> None:
    """Add everything that is held now."""
    for _, attempt in tx.attempts.holding():
        if attempt.placed_at is not None:
            fair.hold(attempt.project, held_devices(attempt.allocation), attempt.placed_at)


async def write_usage(store: Store, planner: Planner) -> None:
    """Write the usage down. May be repeated. Events between the two steps come after `seen_seq` and are read
    next time.
    """
    recalled = await store.read(lambda tx: recall_usage(tx, planner.policy.half_life_s))
    text = msgspec.json.encode(recalled).decode()
    await store.write(lambda tx: tx.meta.set(KEY, text))


def _ended(tx: Tx, after: int) -> Iterator[Attempt]:
    while events := tx.events.page(after, ENDED, PAGE):
        for event in events:
            attempt = tx.attempts.get(event.attempt_id) if event.attempt_id else None
            if attempt is not None:
                yield attempt
        after = events[-1].seq


class ProjectShare(msgspec.Struct, frozen=True):
    held: DeviceAmount
    """Devices held by the project and all projects below it."""
    relative_usage: float | None
    """The project's part of the recent usage of itself and its siblings, divided by the part its weight gives
    it: 2.0 means twice its part. None if none of them had any usage.
    """


def project_shares(tx: Tx, half_life_s: float, now: float) -> dict[str, ProjectShare]:
    """Return the shares of all projects."""
    projects = tx.people.projects()
    tree = ProjectTree(map(project_view, projects))
    fair = FairShare(tree, half_life_s)
    fair.load_usages(recall_usage(tx, half_life_s).usages)
    hold_all(tx, fair)
    for job, attempt in tx.attempts.holding():
        tree.take(job.project, held_devices(attempt.allocation))
    siblings: dict[str | None, list[Project]] = {}
    for project in projects:
        siblings.setdefault(project.parent, []).append(project)
    return {
        project.name: ProjectShare(
            tree.held(project.name), _relative_usage(fair, project, siblings[project.parent], now)
        )
        for project in projects
    }


def _relative_usage(
    fair: FairShare, project: Project, siblings: Iterable[Project], now: float
) -> float | None:
    used = {sibling.name: fair.total(sibling.name, now) for sibling in siblings}
    weight = sum(sibling.weight for sibling in siblings)
    if not sum(used.values()):
        return None
    return used[project.name] / sum(used.values()) * weight / project.weight
