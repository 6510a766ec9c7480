"""Declare and cancel maintenance windows and reservations: one transaction each, with its event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from shoal.control.actor import Actor
from shoal.control.capabilities import Records
from shoal.control.commands.nodes import find_node
from shoal.control.project_tree import project_view
from shoal.control.record import fingerprint, record_event, run_idempotent
from shoal.errors import NotFound, SpecError, StateError
from shoal.ids import IdFactory
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.node import Window, WindowKind
from shoal.model.people import Project
from shoal.scheduler.order.project_tree import ProjectTree
from shoal.scheduler.placement.windows import WindowSchedule
from shoal.spec.error_text import or_nearest
from shoal.store import Tx

MAX_AHEAD_S = 366 * 86_400.0
"""The furthest ahead that a window may end."""
WINDOWS_HINT = "see them with `shoal reservations`"


class WindowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asks for: nodes by name, or a number of nodes of a pool."""

    kind: WindowKind
    nodes: tuple[str, ...] = ()
    count: int | None = None
    pool: str | None = None
    from_at: float | None = None
    """None: now."""
    duration_s: float
    project: str | None = None
    because: str = ""


async def declare_window(records: Records, actor: Actor, request: WindowRequest, key: str | None) -> Window:
    """Declare the window. Once this returns, no plan starts a job that may be in its way. Running jobs keep
    running.
    """
    _check(request)

    def change(tx: Tx) -> Window:
        now = records.clock.now()
        digest = fingerprint("window.added", msgspec.to_builtins(request))
        return run_idempotent(
            tx, actor, key, digest, now, Window, lambda: _declare(records.new_id, tx, actor, request, now)
        )[0]

    return await records.store.write(change)


async def cancel_window(records: Records, actor: Actor, window_id: str, key: str | None) -> Window:
    """Cancel the window. Its nodes are open to all jobs again."""

    def change(tx: Tx) -> Window:
        now = records.clock.now()
        digest = fingerprint("window.cancelled", window_id)
        return run_idempotent(
            tx, actor, key, digest, now, Window, lambda: _cancel(tx, actor, window_id, now)
        )[0]

    return await records.store.write(change)


HoldingJob = tuple[Job, Attempt]


def jobs_in_the_way(
    windows: Iterable[Window], holding: Iterable[HoldingJob], projects: Iterable[Project], now: float
) -> list[list[HoldingJob]]:
    """Return for each window the foreign jobs that run on its nodes now and may still run when it begins, by
    their time limits. Looks at each job once for each of its nodes, and not once for each window.
    """
    tree = WindowSchedule(ProjectTree(map(project_view, projects)))
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


def _check(request: WindowRequest) -> None:
    """Refuse what is wrong whatever the cluster looks like."""
    if bool(request.nodes) == (request.count is not None):
        raise SpecError(
            "say which nodes, or how many: one of the two",
            hint="`--nodes node-01,node-02`, or `--count 2` of `--pool POOL`",
        )
    if request.nodes and request.pool is not None:
        raise SpecError("nodes that are named are of no pool to choose from", hint="leave out `--pool`")
    if request.kind is WindowKind.MAINTENANCE and request.project is not None:
        raise SpecError("maintenance is for no project: the nodes take no jobs", hint="leave out `--project`")
    if request.kind is WindowKind.RESERVATION and request.project is None:
        raise SpecError(
            "a reservation is for a project",
            hint="say which with `--project NAME`, or `--maintenance` to keep everybody off",
        )


def _declare(new_id: IdFactory, tx: Tx, actor: Actor, request: WindowRequest, now: float) -> Window:
    tx.windows.purge(now)
    if request.project is not None and tx.people.get_project(request.project) is None:
        near = or_nearest(request.project, (project.name for project in tx.people.projects()))
        raise NotFound(f"no project `{request.project}`{near}", hint="list them with `shoal project`")
    node_names = {node.name for node in tx.nodes.all()} if request.nodes else set()
    for name in request.nodes:
        if name not in node_names:
            find_node(tx, name)  # which names the nearest node
    window = Window(
        window_id=new_id("win"),
        kind=request.kind,
        nodes=tuple(sorted(set(request.nodes))),
        from_at=now if request.from_at is None else request.from_at,
        until_at=(now if request.from_at is None else request.from_at) + request.duration_s,
        project=request.project,
        because=request.because,
        by=actor.name,
        created_at=now,
    )
    _check_times(window, now)
    others = tx.windows.open(now)
    if request.count is not None:
        names = _choose(tx, window, others, request.count, request.pool, now)
        window = msgspec.structs.replace(window, nodes=names)
    _check_overlap(window, others)
    tx.windows.add(window)
    record_event(tx, "window.added", now, actor, project=request.project, data=msgspec.to_builtins(window))
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
                hint=f"{WINDOWS_HINT}; take it back with `shoal reservations cancel {other.window_id}`",
            )


def _choose(
    tx: Tx, window: Window, others: list[Window], count: int, pool: str | None, now: float
) -> tuple[str, ...]:
    """Return `count` nodes that take work and have no other window then: those with the fewest jobs that may
    still run when it begins.
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
            f"{count} nodes are asked for; {len(free)}{where} take work and have no other window then",
            hint=f"`--count {len(free)}` could be had; {WINDOWS_HINT}" if free else WINDOWS_HINT,
        )
    (jobs_there,) = jobs_in_the_way([trial], tx.attempts.holding(), tx.people.projects(), now)
    in_the_way = Counter(name for _, attempt in jobs_there for name in attempt.node_names)
    return tuple(sorted(sorted(free, key=lambda name: (in_the_way[name], name))[:count]))


def _cancel(tx: Tx, actor: Actor, window_id: str, now: float) -> Window:
    window = tx.windows.get(window_id)
    if window is None:
        raise NotFound(f"no reservation `{window_id}`", hint=WINDOWS_HINT)
    tx.windows.remove(window_id)
    record_event(tx, "window.cancelled", now, actor, project=window.project, data=msgspec.to_builtins(window))
    return window
