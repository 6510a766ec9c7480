"""Keep every service as desired: look, decide, and record the necessary steps in one transaction.

A decision outside a transaction only says whether a transaction is needed. Inside it everything is read and
decided again. So two turns, or a turn and a command, never start a replica twice.
"""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from shoal.control.actor import SHOAL
from shoal.control.capabilities import JobAdmission, Serving
from shoal.control.commands.job_records import ask_to_stop
from shoal.control.loops.watch import cancel
from shoal.control.memory.running import RunningAttempts
from shoal.control.record import AttemptRecorder, record_event
from shoal.control.services.desired import desired_replicas
from shoal.control.services.replicas import begin_replica
from shoal.control.services.serving_table import publish
from shoal.control.services.snapshot import (
    ReplicaRecord,
    ServiceActivity,
    ServiceSnapshot,
    load_snapshot,
    open_replicas,
    service_activity,
)
from shoal.control.services.state import ServiceState
from shoal.errors import LimitReached, StoreUnavailable
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job, JobOutcome
from shoal.model.service import STEADY_S, Rollout, RolloutStage, Service
from shoal.serving.scaling import replica_steps
from shoal.store import Tx

MAX_STEPS = 50
"""Replicas that one transaction starts, drains, stops and removes: at most this many of each."""

log = structlog.get_logger()


class ServiceDecision(msgspec.Struct, frozen=True, kw_only=True):
    service: Service
    """As it will be recorded, except for its version."""
    ended: tuple[ReplicaRecord, ...]
    steps: replica_steps.ReplicaSteps
    because: str = ""
    """Why there should be more or fewer replicas than before."""


async def reconcile_services(admission: JobAdmission, serving: Serving, running: RunningAttempts) -> None:
    """Run one turn for all services, then publish the table that follows from it."""
    failed: Exception | None = None
    for service in await serving.records.store.read(lambda tx: tx.services.all()):
        try:
            await _reconcile(admission, running, serving.services, service.service_id)
        except StoreUnavailable:
            raise
        except Exception as error:
            # A service that cannot be reconciled must not keep the others from it.
            log.exception("service.failed", service=service.reference)
            failed = failed or error
    await publish(serving)
    if failed is not None:
        raise failed


async def _reconcile(
    admission: JobAdmission, running: RunningAttempts, services: ServiceState, service_id: str
) -> None:
    snapshot = await admission.records.store.read(lambda tx: load_snapshot(tx, service_id))
    if snapshot is None:
        return
    activity = service_activity(
        admission.records.clock, running, admission.planning.planner, services, snapshot
    )
    decision = decide(snapshot, activity, admission.records.clock.now())
    order_sleep(running, snapshot, activity, decision.service)
    if not _is_due(snapshot, decision):
        return
    stopped = await admission.records.store.write(lambda tx: _apply(admission, tx, service_id, activity))
    for job, attempt in stopped:
        if attempt.state is AttemptState.STOPPING:
            await cancel(admission.engine, job, attempt)


def order_sleep(
    running: RunningAttempts, snapshot: ServiceSnapshot, activity: ServiceActivity, service: Service
) -> None:
    """Have supervisors put servers to sleep, or wake them, at once. A server may sleep only once no data
    plane sends anything to it.
    """
    for replica, job, attempt in snapshot.replicas:
        if job.replica is None or not job.replica.probe.can_sleep:
            continue
        should_sleep = service.is_asleep and replica.draining_at is None
        is_safe = not should_sleep or replica.is_asleep or replica.replica_id in activity.idle
        if is_safe and running.replicas.order_sleep(attempt.attempt_id, should_sleep=should_sleep):
            running.rendezvous.notify(attempt.attempt_id)


def decide(snapshot: ServiceSnapshot, activity: ServiceActivity, now: float) -> ServiceDecision:
    """Decide what to do for the service. Pure."""
    ended = tuple(server for server in snapshot.replicas if not server[1].is_open)[:MAX_STEPS]
    service = _after_ends(snapshot.service, ended, now)
    replicas = open_replicas(snapshot, activity, now)
    desired = desired_replicas(snapshot, service, activity, replicas, now)
    steps = replica_steps.decide(
        desired.counts,
        replicas,
        drain_s=snapshot.spec(service.live).drain,
        may_start=now >= service.may_start_at,
    )
    return ServiceDecision(
        service=desired.service, ended=ended, steps=_first_steps(steps), because=desired.because
    )


def _first_steps(steps: replica_steps.ReplicaSteps) -> replica_steps.ReplicaSteps:
    """Return as many steps as one transaction takes. The next turn decides the others again."""
    return replica_steps.ReplicaSteps(
        start=steps.start[:MAX_STEPS], drain=steps.drain[:MAX_STEPS], stop=steps.stop[:MAX_STEPS]
    )


def _is_due(snapshot: ServiceSnapshot, decision: ServiceDecision) -> bool:
    is_gone = snapshot.service.stop_asked_by is not None and not snapshot.replicas
    return (
        is_gone
        or bool(decision.ended)
        or not decision.steps.is_nothing
        or decision.service != snapshot.service
    )


def _after_ends(service: Service, ended: tuple[ReplicaRecord, ...], now: float) -> Service:
    """Return the service with the failures of replicas that ended by themselves, which delay
    the next starts.
    """
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


def _apply(
    admission: JobAdmission, tx: Tx, service_id: str, activity: ServiceActivity
) -> list[tuple[Job, Attempt]]:
    """Do what is decided, as far as there is room. Return the jobs that were asked to stop."""
    now = admission.records.clock.now()
    snapshot = load_snapshot(tx, service_id)
    if snapshot is None:
        return []
    decision = decide(snapshot, activity, now)
    for replica, job, attempt in decision.ended:
        tx.services.drop_replica(replica.replica_id)
        facts = {"service": snapshot.service.name, "release": replica.release, "because": job.because}
        record_event(tx, "replica.ended", now, SHOAL, job=job, attempt=attempt, data=facts)
    if decision.service.stop_asked_by is not None and len(decision.ended) == len(snapshot.replicas):
        _remove(tx, snapshot, now)
        return []
    service = _start(admission, tx, snapshot, decision, now)
    _record_changes(tx, snapshot.service, service, decision.because, now)
    if service != snapshot.service:
        tx.services.update(msgspec.structs.replace(service, version=snapshot.service.version + 1))
    _drain(tx, snapshot, decision.steps.drain, now)
    return _stop(admission.records.recorder, tx, snapshot, decision.steps, now)


def _start(
    admission: JobAdmission, tx: Tx, snapshot: ServiceSnapshot, decision: ServiceDecision, now: float
) -> Service:
    """Start as many replicas as the project has room for, and the others when it has."""
    service = decision.service
    try:
        for number in decision.steps.start:
            begin_replica(admission, tx, service, snapshot.releases[number], service.next_slot, now)
            service = msgspec.structs.replace(service, next_slot=service.next_slot + 1)
    except LimitReached as full:
        if service.rollout is not None and _is_under_way(service.rollout, snapshot):
            rollout = msgspec.structs.replace(service.rollout, waits=service.rollout.waits or full.message)
            return msgspec.structs.replace(service, rollout=rollout)
    return service


def _is_under_way(rollout: Rollout, snapshot: ServiceSnapshot) -> bool:
    """Whether the rollout is still moving in either direction. A rollout that was rolled back counts until
    its last replica is gone.
    """
    return rollout.is_open or (
        rollout.stage is RolloutStage.ROLLED_BACK
        and any(replica.release == rollout.new for replica, _, _ in snapshot.replicas)
    )


def _record_changes(tx: Tx, before: Service, after: Service, because: str, now: float) -> None:
    if after.is_asleep != before.is_asleep:
        kind = "service.slept" if after.is_asleep else "service.woken"
        record_event(tx, kind, now, SHOAL, project=after.project, data={"service": after.name})
    if after.replicas != before.replicas:
        facts: dict[str, Any] = {"service": after.name, "replicas": after.replicas, "because": because}
        record_event(tx, "service.resized", now, SHOAL, project=after.project, data=facts)
    old, new = before.rollout, after.rollout
    if new is not None and (old is None or (old.stage, old.step) != (new.stage, new.step)):
        facts = {"service": after.name, "from": new.old, "to": new.new, "step": new.step}
        facts |= {"because": new.because} if new.because else {}
        record_event(tx, f"rollout.{new.stage}", now, SHOAL, project=after.project, data=facts)
    if new is not None and new.waits and not (old is not None and old.waits):
        facts = {
            "service": after.name,
            "to": new.new,
            "because": f"no room for one more replica: {new.waits}",
        }
        record_event(tx, "rollout.waits", now, SHOAL, project=after.project, data=facts)


def _drain(tx: Tx, snapshot: ServiceSnapshot, replica_ids: tuple[str, ...], now: float) -> None:
    for replica, job, attempt in snapshot.replicas:
        if replica.replica_id in replica_ids:
            tx.services.set_replica(msgspec.structs.replace(replica, draining_at=now))
            record_event(tx, "replica.draining", now, SHOAL, job=job, attempt=attempt)


def _stop(
    recorder: AttemptRecorder,
    tx: Tx,
    snapshot: ServiceSnapshot,
    steps: replica_steps.ReplicaSteps,
    now: float,
) -> list[tuple[Job, Attempt]]:
    reasons = dict(steps.stop)
    for replica, job, attempt in snapshot.replicas:
        if replica.replica_id in reasons:
            facts = {"because": reasons[replica.replica_id]}
            record_event(tx, "replica.stopped", now, SHOAL, job=job, attempt=attempt, data=facts)
    return ask_to_stop(recorder, tx, SHOAL, list(reasons), now)


def _remove(tx: Tx, snapshot: ServiceSnapshot, now: float) -> None:
    service = snapshot.service
    for release in tx.services.releases(service.service_id):
        tx.secrets.drop(release.secrets_id)
    tx.services.remove(service.service_id)
    facts = {"service": service.name, "releases": service.newest}
    record_event(tx, "service.ended", now, SHOAL, project=service.project, data=facts)
