"""Keep every service as it should be: look, decide, and record what is to be done in one transaction.

What is decided outside a transaction only says whether one is needed; inside it everything is read and
decided again. So two turns, or a turn and a command, never start a replica twice.
"""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.record import note
from shoal.control.services.look import Look, Server, View, load, seen, view
from shoal.control.services.replicas import begin
from shoal.control.services.tables import publish
from shoal.control.services.wishes import wish
from shoal.control.stopping import ask_to_stop
from shoal.control.watch import cancel
from shoal.errors import LimitReached, StoreUnavailable
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job, JobOutcome
from shoal.model.service import STEADY_S, Rollout, Service, Stage
from shoal.serving import life
from shoal.store import Tx

MAX_STEPS = 50
"""Replicas that one transaction starts, drains, stops and buries, each at most."""

log = structlog.get_logger()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    service: Service
    """As it is to be recorded, but for its version."""
    ended: tuple[Server, ...]
    steps: life.Steps
    because: str = ""
    """Why there should be more or fewer replicas than before."""


async def tend(core: Core) -> None:
    """One turn for all services, and the table that follows from it."""
    failed: Exception | None = None
    for service in await core.store.read(lambda tx: tx.services.all()):
        try:
            await _tend(core, service.service_id)
        except StoreUnavailable:
            raise
        except Exception as error:
            # One service that cannot be tended must not keep the others from it.
            log.exception("service.failed", service=service.reference)
            failed = failed or error
    await publish(core)
    if failed is not None:
        raise failed


async def _tend(core: Core, service_id: str) -> None:
    look = await core.store.read(lambda tx: load(tx, service_id))
    if look is None:
        return
    known = view(core, look)
    decided = decide(look, known, core.clock.now())
    order_sleep(core, look, known, decided.service)
    if not _is_due(look, decided):
        return
    stopped = await core.store.write(lambda tx: _change(core, tx, service_id, known))
    for job, attempt in stopped:
        if attempt.state is AttemptState.STOPPING:
            await cancel(core, job, attempt)


def order_sleep(core: Core, look: Look, known: View, service: Service) -> None:
    """Have supervisors put servers to sleep, or wake them, at once. To sleep only what no data plane sends
    anything to any more.
    """
    for replica, job, attempt in look.servers:
        if job.replica is None or not job.replica.probe.can_sleep:
            continue
        should_sleep = service.is_asleep and replica.draining_at is None
        is_safe = not should_sleep or replica.is_asleep or replica.replica_id in known.idle
        if is_safe and core.services.order_sleep(attempt.attempt_id, should_sleep=should_sleep):
            core.meetings.tell(attempt.attempt_id)


def decide(look: Look, known: View, now: float) -> Decision:
    """Pure."""
    ended = tuple(server for server in look.servers if not server[1].is_open)[:MAX_STEPS]
    service = _after_ends(look.service, ended, now)
    there = seen(look, known, now)
    wished = wish(look, service, known, there, now)
    steps = life.decide(
        wished.counts,
        there,
        drain_s=look.spec(service.live).drain,
        may_start=now >= service.may_start_at,
    )
    return Decision(service=wished.service, ended=ended, steps=_some(steps), because=wished.because)


def _some(steps: life.Steps) -> life.Steps:
    """As many as one transaction takes. The others are decided again at the next turn."""
    return life.Steps(
        start=steps.start[:MAX_STEPS], drain=steps.drain[:MAX_STEPS], stop=steps.stop[:MAX_STEPS]
    )


def _is_due(look: Look, decided: Decision) -> bool:
    is_gone = look.service.stop_asked_by is not None and not look.servers
    return is_gone or bool(decided.ended) or not decided.steps.is_nothing or decided.service != look.service


def _after_ends(service: Service, ended: tuple[Server, ...], now: float) -> Service:
    """With what replicas that ended by themselves tell about how soon others may follow."""
    failures, rollout, last = service.failures, service.rollout, ("", "")
    for replica, job, _ in ended:
        if job.outcome is JobOutcome.CANCELLED:
            continue
        if rollout is not None and replica.release == rollout.new and replica.ready_at is None:
            rollout = msgspec.structs.replace(rollout, failures=rollout.failures + 1)
        served_s = 0.0 if replica.ready_at is None else (job.ended_at or now) - replica.ready_at
        failures, last = 1 if served_s >= STEADY_S else failures + 1, (job.reference, job.because)
    if last == ("", ""):
        return service
    return msgspec.structs.replace(
        service,
        failures=failures,
        failed_at=now,
        failed_ref=last[0],
        failed_because=last[1],
        rollout=rollout,
    )


def _change(core: Core, tx: Tx, service_id: str, known: View) -> list[tuple[Job, Attempt]]:
    """Do what is decided, or as much of it as there is room for. Returns who was asked to stop."""
    now = core.clock.now()
    look = load(tx, service_id)
    if look is None:
        return []
    decided = decide(look, known, now)
    for replica, job, attempt in decided.ended:
        tx.services.drop_replica(replica.replica_id)
        told = {"service": look.service.name, "release": replica.release, "because": job.because}
        note(tx, "replica.ended", now, SHOAL, job=job, attempt=attempt, data=told)
    if decided.service.stop_asked_by is not None and len(decided.ended) == len(look.servers):
        _remove(tx, look, now)
        return []
    service = _start(core, tx, look, decided, now)
    _tell(tx, look.service, service, decided.because, now)
    if service != look.service:
        tx.services.update(msgspec.structs.replace(service, version=look.service.version + 1))
    _drain(tx, look, decided.steps.drain, now)
    return _stop(core, tx, look, decided.steps, now)


def _start(core: Core, tx: Tx, look: Look, decided: Decision, now: float) -> Service:
    """As many as the project has room for; the others when it has."""
    service = decided.service
    try:
        for number in decided.steps.start:
            begin(core, tx, service, look.releases[number], service.next_slot, now)
            service = msgspec.structs.replace(service, next_slot=service.next_slot + 1)
    except LimitReached as full:
        if service.rollout is not None and _is_under_way(service.rollout, look):
            rollout = msgspec.structs.replace(service.rollout, waits=service.rollout.waits or full.message)
            return msgspec.structs.replace(service, rollout=rollout)
    return service


def _is_under_way(rollout: Rollout, look: Look) -> bool:
    """Either way: also one that was taken back, until the last replica of it is gone."""
    return rollout.is_open or (
        rollout.stage is Stage.ROLLED_BACK
        and any(replica.release == rollout.new for replica, _, _ in look.servers)
    )


def _tell(tx: Tx, before: Service, after: Service, because: str, now: float) -> None:
    if after.is_asleep != before.is_asleep:
        kind = "service.slept" if after.is_asleep else "service.woken"
        note(tx, kind, now, SHOAL, project=after.project, data={"service": after.name})
    if after.replicas != before.replicas:
        told: dict[str, Any] = {"service": after.name, "replicas": after.replicas, "because": because}
        note(tx, "service.resized", now, SHOAL, project=after.project, data=told)
    old, new = before.rollout, after.rollout
    if new is not None and (old is None or (old.stage, old.step) != (new.stage, new.step)):
        told = {"service": after.name, "from": new.old, "to": new.new, "step": new.step}
        told |= {"because": new.because} if new.because else {}
        note(tx, f"rollout.{new.stage}", now, SHOAL, project=after.project, data=told)
    if new is not None and new.waits and not (old is not None and old.waits):
        told = {"service": after.name, "to": new.new, "because": f"no room for one more replica: {new.waits}"}
        note(tx, "rollout.waits", now, SHOAL, project=after.project, data=told)


def _drain(tx: Tx, look: Look, replica_ids: tuple[str, ...], now: float) -> None:
    for replica, job, attempt in look.servers:
        if replica.replica_id in replica_ids:
            tx.services.set_replica(msgspec.structs.replace(replica, draining_at=now))
            note(tx, "replica.draining", now, SHOAL, job=job, attempt=attempt)


def _stop(core: Core, tx: Tx, look: Look, steps: life.Steps, now: float) -> list[tuple[Job, Attempt]]:
    reasons = dict(steps.stop)
    for replica, job, attempt in look.servers:
        if replica.replica_id in reasons:
            told = {"because": reasons[replica.replica_id]}
            note(tx, "replica.stopped", now, SHOAL, job=job, attempt=attempt, data=told)
    return ask_to_stop(core, tx, SHOAL, list(reasons), now)


def _remove(tx: Tx, look: Look, now: float) -> None:
    service = look.service
    for release in tx.services.releases(service.service_id):
        tx.secrets.drop(release.secrets_id)
    tx.services.remove(service.service_id)
    told = {"service": service.name, "releases": service.newest}
    note(tx, "service.ended", now, SHOAL, project=service.project, data=told)
