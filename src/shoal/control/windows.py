"""Declare and cancel maintenance windows and reservations: one transaction each, with its event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from shoal.control.actor import Actor
from shoal.control.core import Core
from shoal.control.nodes import find_node
from shoal.control.once import fingerprint, once
from shoal.control.record import note
from shoal.control.tree import project_view
from shoal.errors import NotFound, SpecError, StateError
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.people import Project
from shoal.model.window import Window, WindowKind
from shoal.scheduler.tree import Tree
from shoal.scheduler.windows import Windows
from shoal.spec.wording import or_nearest
from shoal.store import Tx

MAX_AHEAD_S = 366 * 86_400.0
"""Further ahead than this nobody plans by the clock."""
LOOK = "see them with `shoal reservations`"


class AskedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asks for: nodes by name, or so many of a pool."""

    kind: WindowKind
    nodes: tuple[str, ...] = ()
    count: int | None = None
    pool: str | None = None
    from_at: float | None = None
    """None: now."""
    duration_s: float
    project: str | None = None
    because: str = ""


async def declare_window(core: Core, actor: Actor, asked: AskedWindow, key: str | None) -> Window:
    """From when this returns, no plan starts anybody who may be in its way. What runs already runs on."""
    _check(asked)

    def change(tx: Tx) -> Window:
        now = core.clock.now()
        said = fingerprint("window.added", msgspec.to_builtins(asked))
        return once(tx, actor, key, said, now, Window, lambda: _declare(core, tx, actor, asked, now))[0]

    return await core.store.write(change)


async def cancel_window(core: Core, actor: Actor, window_id: str, key: str | None) -> Window:
    """The nodes are everybody's again."""

    def change(tx: Tx) -> Window:
        now = core.clock.now()
        said = fingerprint("window.cancelled", window_id)
        return once(tx, actor, key, said, now, Window, lambda: _cancel(tx, actor, window_id, now))[0]

    return await core.store.write(change)


Held = tuple[Job, Attempt]


def all_still_there(
    windows: Iterable[Window], holding: Iterable[Held], projects: Iterable[Project], now: float
) -> list[list[Held]]:
    """Of each window, the jobs it is not for that run on its nodes now and may still do so when it begins, by
    their limits. Looks at each job once for each of its nodes, and not once for each window.
    """
    tree = Windows(Tree(map(project_view, projects)))
    on_node: dict[str, list[int]] = {}
    held = list(holding)
    for number, (_, attempt) in enumerate(held):
        for name in attempt.node_names:
            on_node.setdefault(name, []).append(number)
    return [
        [
            held[number]
            for number in sorted({number for name in window.nodes for number in on_node.get(name, ())})
            if _lasts_past(*held[number], max(window.from_at, now))
            and not tree.serves(window, held[number][0].project)
        ]
        for window in windows
    ]


def _lasts_past(job: Job, attempt: Attempt, moment: float) -> bool:
    limit_s = job.request.time_limit_s
    return limit_s is None or (attempt.placed_at or attempt.queued_at) + limit_s > moment


def _check(asked: AskedWindow) -> None:
    """What is wrong about it whatever the cluster looks like."""
    if bool(asked.nodes) == (asked.count is not None):
        raise SpecError(
            "say which nodes, or how many: one of the two",
            hint="`--nodes node-01,node-02`, or `--count 2` of `--pool POOL`",
        )
    if asked.nodes and asked.pool is not None:
        raise SpecError("nodes that are named are of no pool to choose from", hint="leave out `--pool`")
    if asked.kind is WindowKind.MAINTENANCE and asked.project is not None:
        raise SpecError("maintenance is for no project: the nodes take nobody", hint="leave out `--project`")
    if asked.kind is WindowKind.RESERVATION and asked.project is None:
        raise SpecError(
            "a reservation is for a project",
            hint="say which with `--project NAME`, or `--maintenance` to keep everybody off",
        )


def _declare(core: Core, tx: Tx, actor: Actor, asked: AskedWindow, now: float) -> Window:
    tx.windows.purge(now)
    if asked.project is not None and tx.people.get_project(asked.project) is None:
        near = or_nearest(asked.project, (project.name for project in tx.people.projects()))
        raise NotFound(f"no project `{asked.project}`{near}", hint="list them with `shoal project`")
    known = {node.name for node in tx.nodes.all()} if asked.nodes else set()
    for name in asked.nodes:
        if name not in known:
            find_node(tx, name)  # which says what is near
    window = Window(
        window_id=core.new_id("win"),
        kind=asked.kind,
        nodes=tuple(sorted(set(asked.nodes))),
        from_at=now if asked.from_at is None else asked.from_at,
        until_at=(now if asked.from_at is None else asked.from_at) + asked.duration_s,
        project=asked.project,
        because=asked.because,
        by=actor.name,
        created_at=now,
    )
    _check_times(window, now)
    others = tx.windows.open(now)
    if asked.count is not None:
        names = _choose(tx, window, others, asked.count, asked.pool, now)
        window = msgspec.structs.replace(window, nodes=names)
    _check_overlap(window, others)
    tx.windows.add(window)
    note(tx, "window.added", now, actor, project=asked.project, data=msgspec.to_builtins(window))
    return window


def _check_times(window: Window, now: float) -> None:
    if window.until_at <= now:
        ends = f"{datetime.fromtimestamp(window.until_at, UTC):%Y-%m-%d %H:%M} UTC"
        raise SpecError(
            f"that is over already: it would end {ends}",
            hint="say when it begins: `--from 14:00` or `--from 2h`",
        )
    if window.until_at > now + MAX_AHEAD_S:
        raise SpecError(
            "that is more than a year ahead", hint="declare it later; `shoal drain NODE` has no end"
        )


def _check_overlap(window: Window, others: Iterable[Window]) -> None:
    for other in others:
        shared = window.overlaps(other)
        if shared:
            have = "has" if len(shared) == 1 else "have"
            raise StateError(
                f"{', '.join(shared[:4])} {have} a {other.kind} then already",
                hint=f"{LOOK}; take it back with `shoal reservations cancel {other.window_id}`",
            )


def _choose(
    tx: Tx, window: Window, others: list[Window], count: int, pool: str | None, now: float
) -> tuple[str, ...]:
    """Of the nodes that take work and are spoken for by nobody then, those with the fewest jobs that may
    still be there when it begins.
    """
    nodes = tx.nodes.all()
    usable = [node.name for node in nodes if node.takes_work and pool in (None, node.facts.pool)]
    pools = {node.facts.pool for node in nodes}
    if pool is not None and pool not in pools:
        raise NotFound(f"no pool `{pool}`; there is {', '.join(sorted(pools))}", hint="shoal nodes")
    trial = msgspec.structs.replace(window, nodes=tuple(usable))
    taken = {name for other in others for name in trial.overlaps(other)}
    free = [name for name in usable if name not in taken]
    if len(free) < count:
        where = f" in pool `{pool}`" if pool is not None else ""
        raise StateError(
            f"{count} nodes are asked for; {len(free)}{where} take work and are spoken for by nobody then",
            hint=f"`--count {len(free)}` could be had; {LOOK}" if free else LOOK,
        )
    (there,) = all_still_there([trial], tx.attempts.holding(), tx.people.projects(), now)
    in_the_way = Counter(name for _, attempt in there for name in attempt.node_names)
    return tuple(sorted(sorted(free, key=lambda name: (in_the_way[name], name))[:count]))


def _cancel(tx: Tx, actor: Actor, window_id: str, now: float) -> Window:
    window = tx.windows.get(window_id)
    if window is None:
        raise NotFound(f"no reservation `{window_id}`", hint=LOOK)
    tx.windows.remove(window_id)
    note(tx, "window.cancelled", now, actor, project=window.project, data=msgspec.to_builtins(window))
    return window
