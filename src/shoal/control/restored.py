"""Make a copied home a home of its own: settle every open job before anything acts on it.

The original may still run those jobs. So nothing of the copy starts without the operator's word that the
original is gone: open jobs end, services have no replicas, and no process that the copy's files name gets a
signal.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import structlog

from shoal import home_identity
from shoal.clock import Clock
from shoal.control.actor import SHOAL
from shoal.control.bootstrap import SITE_ID, register_name, write_private
from shoal.control.capabilities import Records, Sealing
from shoal.control.commands.arrays import finish_submission
from shoal.control.project_uids import chown_home, claim_block, keep_blocks
from shoal.control.record import record_event
from shoal.engines.home_records import RESTORED_MESSAGE, Outcomes, outcomes_of
from shoal.home_identity import HomeIdentity, RestoreRequest
from shoal.model.attempt import Attempt, EndReason
from shoal.model.moves import StopRequested, TaskEnded
from shoal.model.people import Project
from shoal.settings import Settings
from shoal.store import ArrayVerb, Store, Tx
from shoal.wire import EndKind, TaskOutcome

RESTORED_AT = "restored_at"
"""Key in the database. What happened before that time happened in another home."""
BATCH = 100
"""Attempts that one transaction settles."""
ENDED_BECAUSE = (
    "the home was restored from a copy, whose original may run this job; `shoal retry` begins it again here"
)

log = structlog.get_logger()


async def settle_restored(
    records: Records, sealing: Sealing, settings: Settings, request: RestoreRequest
) -> None:
    """Record what became of open work. May be repeated until `finish_restore` makes it final."""
    for array_id, verb in await records.store.read(lambda tx: tx.array_work.all()):
        if verb is ArrayVerb.SUBMIT:  # else the other elements would be recorded, and start, afterwards
            await finish_submission(records, sealing, array_id)
    settled = 0
    while batch := await records.store.read(partial(_open_attempts, runs_again=request.runs_again)):
        outcomes = await anyio.to_thread.run_sync(_read_outcomes, settings.state_dir, batch)
        await records.store.write(partial(_settle, records, batch, outcomes, runs_again=request.runs_again))
        settled += len(batch)
    services = (
        0
        if request.runs_again
        else await records.store.write(partial(_scale_services_to_zero, records.clock))
    )
    await finish_restore(records, settings, request, settled, services)


async def finish_restore(
    records: Records, settings: Settings, request: RestoreRequest, jobs: int, services: int
) -> None:
    """Tie home and database to each other under a new identity. This is the last step: until then a restart
    begins again.

    May be repeated, also after a kill between two of its steps, because the identity came with the operator's
    request.
    """
    home = settings.state_dir
    before = home_identity.read_identity(home)
    new = HomeIdentity(site_id=request.site_id, directory=home_identity.identify(home))
    moves, next_uid = await _claim_uids(records.store, settings, is_heir=request.runs_again)
    facts: dict[str, Any] = {
        "path": str(home),
        "copied_from": before.directory.path if before is not None else None,
        "runs_again": request.runs_again,
        "jobs": jobs,
        "services": services,
        "users_changed": len(moves),
    }

    def change(tx: Tx) -> None:
        if tx.meta.get(SITE_ID) == new.site_id:
            return
        now = records.clock.now()
        tx.meta.set(SITE_ID, new.site_id)
        tx.meta.set(RESTORED_AT, str(now))
        tx.people.begin_uids(next_uid)
        for project, uid in moves:
            tx.people.change_uid(project, uid)
            data = {"project": project.name, "uid": uid}
            record_event(tx, "project.updated", now, SHOAL, project=project.name, data=data)
        record_event(tx, "home.restored", now, SHOAL, data=facts)

    await records.store.write(change)
    write_private(home / home_identity.FILE, home_identity.encode_record(new))
    (home / home_identity.REQUEST).unlink(missing_ok=True)
    log.warning("home.restored", **facts)


async def _claim_uids(
    store: Store, settings: Settings, *, is_heir: bool
) -> tuple[list[tuple[Project, int]], int]:
    """Claim a block of uids. Return the projects that get another uid, with that uid, and the first uid for
    new projects.

    Original and copy would count on from the same uid. While the original is on this machine, its projects
    and those of the copy get different users. With one user, jobs of the copy could do to the original's jobs
    what jobs of one project can do to each other. When this returns, the files that jobs left in this home
    belong to the new users. May be repeated, also after a kill: the block is the same one.
    """
    home = settings.state_dir
    name = register_name(home)
    projects = await store.read(lambda tx: tx.people.projects())
    used = [project.uid for project in projects]

    def work() -> tuple[list[tuple[Project, int]], int]:
        foreign = {*keep_blocks(used, home, name, is_heir=is_heir)}
        moved = [project for project in projects if project.uid in foreign]
        first = claim_block(home, name, used=used, wanted=len(moved) + 1)
        moves = [(project, uid) for uid, project in enumerate(moved, first)]
        chown_home(home, moves)
        return moves, first + len(moves)

    return await anyio.to_thread.run_sync(work)


def _open_attempts(tx: Tx, *, runs_again: bool) -> list[Attempt]:
    """Return attempts that hold resources. If nothing shall start here, return queued attempts too."""
    holding = [attempt for _, attempt in tx.attempts.holding()]
    if holding or runs_again:
        return holding[:BATCH]
    return [attempt for _, attempt in tx.attempts.queued(BATCH)]


def _read_outcomes(home: Path, batch: list[Attempt]) -> dict[str, Outcomes]:
    return {attempt.attempt_id: outcomes_of(home, attempt.attempt_id) for attempt in batch}


def _settle(
    records: Records, batch: list[Attempt], outcomes: dict[str, Outcomes], tx: Tx, *, runs_again: bool
) -> None:
    for attempt in batch:
        if not runs_again:
            stop = StopRequested(reason=EndReason.CANCELLED, by="shoal up --restored", because=ENDED_BECAUSE)
            records.recorder.advance(tx, attempt.attempt_id, stop)
        recorded = outcomes[attempt.attempt_id]
        for node in attempt.nodes_left:
            outcome = recorded.get(node)
            is_its = (
                outcome is not None
                and outcome.epoch == attempt.epoch
                and outcome.replacement == attempt.replacement_on(node)
            )
            ended = outcome if outcome is not None and is_its else _lost_outcome(records.clock, attempt, node)
            records.recorder.advance(tx, attempt.attempt_id, TaskEnded(ended))


def _lost_outcome(clock: Clock, attempt: Attempt, node: str) -> TaskOutcome:
    return TaskOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=EndKind.LOST,
        ended_at=clock.now(),
        message=RESTORED_MESSAGE,
        replacement=attempt.replacement_on(node),
    )


def _scale_services_to_zero(clock: Clock, tx: Tx) -> int:
    """Set services to no replicas until an operator scales them up again. Their releases stay."""
    now, resting = clock.now(), 0
    for service in tx.services.all():
        if service.stop_asked_by is not None or service.max_replicas == 0:
            continue
        rest = msgspec.structs.replace(service, min_replicas=0, max_replicas=0, scaled_at=now)
        rest = rest.resized(0, "the home was restored from a copy", now)
        tx.services.update(msgspec.structs.replace(rest, version=service.version + 1))
        facts = {"service": service.name, "min": 0, "max": 0, "because": "restored from a copy"}
        record_event(tx, "service.scaled", now, SHOAL, project=service.project, data=facts)
        resting += 1
    return resting
