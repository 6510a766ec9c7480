"""Ask for a drill, and look at past ones: one transaction each, with its event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from shoal.control.actor import Actor
from shoal.control.core import Core
from shoal.control.drill_book import Open, facts_of
from shoal.control.frozen import spec_of
from shoal.control.leases import QUIET_S
from shoal.control.once import fingerprint, once
from shoal.control.record import note
from shoal.errors import NotFound, SpecError, StateError
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.drill import ON_RANKS, Drill, DrillKind, DrillResult
from shoal.model.job import Job, ReplicaPlace
from shoal.spec.clauses import MAX_RETRIES
from shoal.spec.wording import nearest
from shoal.store import Event, EventFilter, Tx
from shoal.wire import Progress

MAX_RUNNING = 200
"""Attempts that are looked at after the control plane was killed."""
STARTED, FINISHED = "drill.started", "drill.finished"
LOOK_BACK = 100_000
"""Events: more are not recorded while a drill lasts."""
MAX_FOUND = 1000
MORE_RETRIES = 3
"""Than a job had that has none left: enough for some drills."""
SETTLED_S = 15.0
"""A program that has run for so long has told of a step, or tells of none: renewals come every 5 s."""
MARGIN_S = 60.0
"""How much longer than it may take a drill without a result keeps others away."""

# Made here, by one thread: what msgspec knows of a type it finds out at the first use, and several
# threads read from the store.
_DRILL = msgspec.json.Decoder(Drill)
_RESULT = msgspec.json.Decoder(DrillResult)


class AskedDrill(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody asks for. `rank` and `node` None: the last one."""

    kind: DrillKind
    job_id: str = ""
    rank: int | None = None
    node: str | None = None
    for_s: float = 0.0
    window_s: float = 20.0
    within_s: float = 120.0
    is_forced: bool = False


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A drill as the log tells of it. `result` None: it is under way, or nobody was left to see its end."""

    drill: Drill
    project: str | None
    ref: str | None
    result: DrillResult | None


async def start_drill(core: Core, actor: Actor, asked: AskedDrill, key: str | None) -> Drill:
    """Record it; supervisors hear of it at once where they listen, else with their next renewal.

    `StateError`: nothing was begun, because of how the job stands.
    """

    def change(tx: Tx) -> tuple[Drill, bool]:
        now = core.clock.now()
        said = fingerprint(STARTED, msgspec.to_builtins(asked))
        return once(tx, actor, key, said, now, Drill, lambda: _start(core, tx, actor, asked, now))

    drill, was_repeated = await core.store.write(change)
    if not was_repeated:
        core.drills.open[drill.drill_id] = Open(drill)
        core.meetings.tell(drill.attempt_id)
    return drill


def history(tx: Tx, events: list[Event]) -> list[Held]:
    """What these events tell of drills, in their order."""
    refs = tx.jobs.references(event.job_id for event in events if event.job_id)
    results = {e.data["drill_id"]: e.data["result"] for e in events if e.kind == FINISHED}
    return [
        Held(
            drill=_drill(event.data),
            project=event.project,
            ref=refs.get(event.job_id) if event.job_id else None,
            result=_result(results.get(event.data["drill_id"])),
        )
        for event in events
        if event.kind == STARTED
    ]


def unfinished(tx: Tx) -> list[Drill]:
    """Those that have no result yet, oldest first."""
    after = max(0, tx.events.head().seq - LOOK_BACK)
    events = tx.events.latest(MAX_FOUND, EventFilter(kinds_prefix="drill."), after)
    finished = {event.data["drill_id"] for event in events if event.kind == FINISHED}
    started = [event.data for event in events if event.kind == STARTED]
    return [_drill(data) for data in started if data["drill_id"] not in finished]


def _drill(data: object) -> Drill:
    return _DRILL.decode(msgspec.json.encode(data))


def _result(data: object) -> DrillResult | None:
    return None if data is None else _RESULT.decode(msgspec.json.encode(data))


def _start(core: Core, tx: Tx, actor: Actor, asked: AskedDrill, now: float) -> Drill:
    _check_alone(tx, asked, now)
    drill = Drill(
        drill_id=core.new_id("drl"),
        kind=asked.kind,
        started_at=now,
        by=actor.name,
        for_s=asked.for_s,
        window_s=asked.window_s,
        within_s=asked.within_s + asked.for_s,
    )
    if asked.kind is DrillKind.KILL_CONTROL:
        drill = msgspec.structs.replace(drill, running=_running(core, tx.attempts.holding()))
        note(tx, STARTED, now, actor, data=facts_of(drill))
        return drill
    job, attempt = tx.jobs.get(asked.job_id), tx.attempts.newest(asked.job_id)
    if job is None or attempt is None:
        raise NotFound("no such thing, or one you may not see")
    if attempt.state is not AttemptState.RUNNING:
        raise StateError(
            f"job {job.reference} is {'over' if not job.is_open else attempt.state}; a drill needs one that "
            "runs",
            hint=f"shoal why {job.reference}",
        )
    node, rank = _aim(job, attempt, asked)
    if asked.kind is DrillKind.HANG:
        _check_tells(core, job, attempt, node, now)
    if not asked.is_forced:
        _check_survives(job, attempt, asked)
    drill = msgspec.structs.replace(
        drill,
        job_id=job.job_id,
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        generation=attempt.generation,
        nodes=attempt.node_names,
        node=node,
        rank=rank,
    )
    note(tx, STARTED, now, actor, job=job, attempt=attempt, node=node, data=facts_of(drill))
    return drill


def _running(core: Core, holding: Sequence[tuple[Job, Attempt]]) -> dict[str, Progress | None]:
    """How far each attempt is that runs and was heard from; of many, the oldest. Who was silent before is not
    to be found again by anybody.
    """
    running = [own for _, own in holding if own.state is AttemptState.RUNNING]
    running = [own for own in running if not core.leases.silent_nodes(own, QUIET_S)]
    return {
        own.attempt_id: next(iter(core.drills.progress(own.attempt_id, own.node_names)), None)
        for own in running[:MAX_RUNNING]
    }


def _check_alone(tx: Tx, asked: AskedDrill, now: float) -> None:
    """One fault at a time: of two, nobody could say which did what."""
    for other in unfinished(tx):
        is_mine = other.job_id == asked.job_id
        is_late = now > other.started_at + 2 * other.within_s + other.window_s + MARGIN_S
        if not is_late and (is_mine or DrillKind.KILL_CONTROL in (other.kind, asked.kind)):
            raise StateError(
                f"drill {other.drill_id} ({other.kind}) is under way",
                hint="see it with `shoal drill history`; it ends by itself",
            )


def _aim(job: Job, attempt: Attempt, asked: AskedDrill) -> tuple[str, int | None]:
    """The node it is done on, and the rank, if it is about one."""
    names, per_node = attempt.node_names, job.request.ranks_per_node
    world_size = len(names) * per_node
    if asked.node is not None and asked.node not in names:
        meant = nearest(asked.node, names)
        near = f"; did you mean `{meant}`?" if meant else f"; it runs on {', '.join(names)}"
        raise SpecError(
            f"{job.reference} does not run on `{asked.node}`{near}", hint=f"--node {meant or names[-1]}"
        )
    if asked.rank is not None and asked.rank >= world_size:
        has = "one rank, 0" if world_size == 1 else f"{world_size} ranks, 0 to {world_size - 1}"
        raise SpecError(
            f"{job.reference} has {has}; {asked.rank} is none", hint=f"--rank {world_size - 1}, the last"
        )
    if asked.kind in (DrillKind.KILL_RANK, DrillKind.HANG):
        rank = world_size - 1 if asked.rank is None else asked.rank
        return names[rank // per_node], rank
    if asked.kind is DrillKind.CORRUPT_CHECKPOINT:
        return names[0], None
    return asked.node or names[-1], None


def _check_tells(core: Core, job: Job, attempt: Attempt, node: str, now: float) -> None:
    """Refuse to stop a rank that nobody would miss. Of one that has just begun its supervisor decides."""
    is_heard = core.drills.group(attempt.attempt_id, node) >= 0
    has_begun = attempt.started_at is not None and now > attempt.started_at + SETTLED_S
    if is_heard and has_begun and not core.drills.progress(attempt.attempt_id, (node,)):
        raise StateError(
            f"job {job.reference} has told of no step, so nobody could tell that a rank hangs; "
            "nothing was done to it",
            hint="its program tells with `runtime.train` or a callback of `shoal.runtime`; if it does, try "
            "again after its first steps",
        )


def _refuse_to_end(job: Job, place: ReplicaPlace, asked: AskedDrill) -> NoReturn:
    """A replica has neither retries nor checkpoints: its service begins another."""
    if asked.kind is DrillKind.CORRUPT_CHECKPOINT:
        raise StateError(
            f"{job.reference} is a replica of service {place.service}: it keeps no checkpoints to damage",
            hint=f"`shoal drill kill-rank {job.reference} --force` ends it, and another takes its place",
        )
    raise StateError(
        f"{job.reference} is a replica of service {place.service}: it would end, and another take its place",
        hint=f"`--force` does it; `shoal services {job.project}/{place.service}` shows the one that follows",
    )


def _check_survives(job: Job, attempt: Attempt, asked: AskedDrill) -> None:
    """Refuse what would be the end of the job, or of its work."""
    spec = spec_of(job)
    force = "`--force` does it all the same"
    if job.replica is not None and asked.kind is not DrillKind.PARTITION:
        _refuse_to_end(job, job.replica, asked)
    left = job.retry.max_retries - job.failures - attempt.restarts
    if asked.kind in ON_RANKS and (left <= 0 or EndReason.SIGNAL not in job.retry.on):
        had = job.retry.max_retries
        has = f"has no retry left of the {had} it had" if had else "has no `retry`"
        more = f"max: {min(had + MORE_RETRIES, MAX_RETRIES)}"
        if EndReason.SIGNAL not in job.retry.on:
            has, more = "has no `retry` on `signal`", f"{more}, on: [exit, signal]"
        raise StateError(
            f"job {job.reference} {has}: it would end as failed",
            hint=f"submit it with `retry: {{{more}}}`; {force}",
        )
    if asked.kind is DrillKind.CORRUPT_CHECKPOINT and spec.checkpoint is None:
        raise StateError(
            f"job {job.reference} keeps no checkpoints: there is none to damage",
            hint="submit it with `checkpoint: {}`",
        )
    if asked.kind is DrillKind.KILL_NODE and spec.checkpoint is None:
        raise StateError(
            f"job {job.reference} keeps no checkpoints: it may begin from the start again",
            hint=f"submit it with `checkpoint: {{}}`; {force}",
        )
    if asked.kind is DrillKind.PARTITION and asked.for_s >= spec.fence:
        raise StateError(
            f"after {spec.fence:g} s without an answer job {job.reference} is stopped (its `fence`)",
            hint=f"`--for` less than that; {force}",
        )
