"""Make a copied home a place of its own: settle every open job before anything acts on it.

The original may still run those jobs. So without the operator's word that it is gone nothing of the copy
starts: open jobs end, services have no replicas, and no process that the copy's files name gets a signal.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import structlog

from shoal import site
from shoal.control.actor import SHOAL
from shoal.control.arrays import finish_submission
from shoal.control.core import Core
from shoal.control.first import SITE_ID, register_name, write_private
from shoal.control.owners import give_home
from shoal.control.record import note
from shoal.control.uids import claim_block, keep_blocks
from shoal.engines.set_aside import BECAUSE, Outcomes, outcomes_of
from shoal.model.attempt import Attempt, EndReason
from shoal.model.moves import NodeEnded, StopAsked
from shoal.model.people import Project
from shoal.site import RestoreRequest, Site
from shoal.store import ArrayVerb, Tx
from shoal.wire import EndKind, NodeOutcome

RESTORED_AT = "restored_at"
"""In the database: what happened before then was in another home."""
BATCH = 100
"""Attempts settled in one transaction."""
ENDED = (
    "the home was restored from a copy, whose original may run this job; `shoal retry` begins it again here"
)

log = structlog.get_logger()


async def settle_restored(core: Core, request: RestoreRequest) -> None:
    """Record what became of open work. May be repeated; `finish` makes it final."""
    for array_id, verb in await core.store.read(lambda tx: tx.array_work.all()):
        if verb is ArrayVerb.SUBMIT:  # else its other elements would be recorded, and begin, afterwards
            await finish_submission(core, array_id)
    settled = 0
    while batch := await core.store.read(partial(_open_attempts, runs_again=request.runs_again)):
        outcomes = await anyio.to_thread.run_sync(_read_outcomes, core.settings.state_dir, batch)
        await core.store.write(partial(_settle, core, batch, outcomes, runs_again=request.runs_again))
        settled += len(batch)
    services = 0 if request.runs_again else await core.store.write(partial(_rest_services, core))
    await finish(core, request, settled, services)


async def finish(core: Core, request: RestoreRequest, jobs: int, services: int) -> None:
    """Tie home and database to each other under a new identity. Last: until then a restart begins again.

    May be repeated, also after a kill between two of its steps: the identity came with the operator's word.
    """
    home = core.settings.state_dir
    before = site.read_site(home)
    new = Site(site_id=request.site_id, directory=site.identify(home))
    moves, next_uid = await _claim_uids(core, is_heir=request.runs_again)
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
        now = core.clock.now()
        tx.meta.set(SITE_ID, new.site_id)
        tx.meta.set(RESTORED_AT, str(now))
        tx.people.begin_uids(next_uid)
        for project, uid in moves:
            tx.people.change_uid(project, uid)
            data = {"project": project.name, "uid": uid}
            note(tx, "project.updated", now, SHOAL, project=project.name, data=data)
        note(tx, "home.restored", now, SHOAL, data=facts)

    await core.store.write(change)
    write_private(home / site.FILE, site.encoded(new))
    (home / site.REQUEST).unlink(missing_ok=True)
    log.warning("home.restored", **facts)


async def _claim_uids(core: Core, *, is_heir: bool) -> tuple[list[tuple[Project, int]], int]:
    """Claim a block of uids. Return the projects that get another uid, with that one, and where those of new
    projects begin.

    Original and copy would count on from the same uid. While the original is on this machine, its projects
    and those of the copy get different users: as one user, jobs of the copy could do to the original's what
    jobs of one project can do to each other. When this returns, what jobs left in this home belongs to the
    new users. May be repeated, also after a kill: the block is the same one.
    """
    home = core.settings.state_dir
    name = register_name(home)
    projects = await core.store.read(lambda tx: tx.people.projects())
    used = [project.uid for project in projects]

    def work() -> tuple[list[tuple[Project, int]], int]:
        foreign = {*keep_blocks(used, home, name, is_heir=is_heir)}
        moved = [project for project in projects if project.uid in foreign]
        first = claim_block(home, name, used=used, wanted=len(moved) + 1)
        moves = [(project, uid) for uid, project in enumerate(moved, first)]
        give_home(home, moves)
        return moves, first + len(moves)

    return await anyio.to_thread.run_sync(work)


def _open_attempts(tx: Tx, *, runs_again: bool) -> list[Attempt]:
    """Those that hold resources; and those that wait, where nothing is to begin here."""
    holding = [attempt for _, attempt in tx.attempts.holding()]
    if holding or runs_again:
        return holding[:BATCH]
    return [attempt for _, attempt in tx.attempts.queued(BATCH)]


def _read_outcomes(home: Path, batch: list[Attempt]) -> dict[str, Outcomes]:
    return {attempt.attempt_id: outcomes_of(home, attempt.attempt_id) for attempt in batch}


def _settle(
    core: Core, batch: list[Attempt], outcomes: dict[str, Outcomes], tx: Tx, *, runs_again: bool
) -> None:
    for attempt in batch:
        if not runs_again:
            stop = StopAsked(reason=EndReason.CANCELLED, by="shoal up --restored", because=ENDED)
            core.recorder.advance(tx, attempt.attempt_id, stop)
        known = outcomes[attempt.attempt_id]
        for node in attempt.nodes_left:
            outcome = known.get(node)
            is_its = (
                outcome is not None
                and outcome.epoch == attempt.epoch
                and outcome.incarnation == attempt.incarnation(node)
            )
            ended = outcome if outcome is not None and is_its else _lost(core, attempt, node)
            core.recorder.advance(tx, attempt.attempt_id, NodeEnded(ended))


def _lost(core: Core, attempt: Attempt, node: str) -> NodeOutcome:
    return NodeOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=EndKind.LOST,
        ended_at=core.clock.now(),
        message=BECAUSE,
        incarnation=attempt.incarnation(node),
    )


def _rest_services(core: Core, tx: Tx) -> int:
    """No replicas until an operator scales the service up again: its releases stay."""
    now, resting = core.clock.now(), 0
    for service in tx.services.all():
        if service.stop_asked_by is not None or service.max_replicas == 0:
            continue
        rest = msgspec.structs.replace(service, min_replicas=0, max_replicas=0, scaled_at=now)
        rest = rest.resized(0, "the home was restored from a copy", now)
        tx.services.update(msgspec.structs.replace(rest, version=service.version + 1))
        facts = {"service": service.name, "min": 0, "max": 0, "because": "restored from a copy"}
        note(tx, "service.scaled", now, SHOAL, project=service.project, data=facts)
        resting += 1
    return resting
