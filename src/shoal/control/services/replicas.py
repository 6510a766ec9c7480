"""Replicas as jobs: how a replica begins, and how its supervisor's reports are recorded."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import msgspec

from shoal.clock import Clock
from shoal.control.actor import SHOAL
from shoal.control.capabilities import JobAdmission, Records, Sealing
from shoal.control.commands.submit import check_quota, in_one_part
from shoal.control.job_specs import FrozenSpec, freeze
from shoal.control.memory.running import RunningAttempts
from shoal.control.record import REPORT_PATIENCE_S, record_event
from shoal.control.services.state import ServiceState
from shoal.errors import NotFound
from shoal.identity import open_secrets, seal_secrets
from shoal.model.attempt import Attempt
from shoal.model.job import Job, ReplicaRef
from shoal.model.service import MAX_STARTS, Release, Replica, ReplicaStart, Service
from shoal.serving.table import is_address
from shoal.sidecar_tls import SCHEME
from shoal.spec.service import ServiceSpec
from shoal.spec.service_fields import ModelSpec
from shoal.store import Tx
from shoal.wire import ProbeSpec, ReplicaStatus

log = logging.getLogger(__name__)


@lru_cache(maxsize=512)
def spec_of_release(spec_json: str) -> ServiceSpec:
    return ServiceSpec.model_validate_json(spec_json)


@lru_cache(maxsize=512)
def frozen_replica(spec_json: str) -> FrozenSpec:
    """Return the job that each replica of a release is recorded as."""
    return freeze(spec_of_release(spec_json).replica_job())


def probe_of(spec: ServiceSpec, service: Service) -> ProbeSpec:
    readiness = spec.readiness
    return ProbeSpec(
        port=spec.port if isinstance(spec.port, int) else None,
        is_socket=spec.port == "socket",
        has_own_network=spec.network == "private",
        is_public=spec.public,
        service_path=f"/{service.project}/{service.name}",
        path=readiness.path,
        interval_s=readiness.interval,
        timeout_s=readiness.timeout,
        failures=readiness.failures,
        dead_after_s=readiness.dead_after,
        within_s=readiness.within,
        can_sleep=spec.scale.sleep_after is not None,
    )


def begin_replica(
    admission: JobAdmission, tx: Tx, service: Service, release: Release, slot: int, now: float
) -> Replica:
    """Queue one more replica. `LimitReached`, with nothing changed: the project may not have another job."""
    project = tx.people.get_project(service.project)
    if project is None:
        raise NotFound(f"no project `{service.project}`", hint="shoal project list")
    check_quota(project, tx.jobs.count_open(project.name), 1)
    admitted = tx.submissions.admit(service.project, 1)
    frozen = in_one_part(admission.planning.nodes, admission.engine, frozen_replica(release.spec_json))
    job = _job(admission.records.new_id("job"), frozen, service, release, slot, admitted.first, now)
    attempt = admission.records.recorder.new_attempt(job, now)
    tx.submissions.add([(job, attempt)])
    _hand_down_secrets(admission.sealing, tx, release, job.job_id)
    replica = Replica(
        replica_id=job.job_id,
        service_id=service.service_id,
        release=release.number,
        slot=slot,
        created_at=now,
    )
    tx.services.add_replica(replica)
    facts = {"name": job.name, "number": job.number, "priority": job.priority, "spec": job.spec_json}
    facts |= {"service": service.name, "release": release.number, "slot": slot}
    record_event(tx, "job.submitted", now, SHOAL, job=job, attempt=attempt, data=facts)
    return replica


def checkpoint_of(spec: ServiceSpec) -> str:
    """Return the path of the served checkpoint below the directory of checkpoints; empty if it
    serves none.
    """
    model = spec.model
    return f"{model.job}/{model.save}" if isinstance(model, ModelSpec) else ""


def _job(
    job_id: str, frozen: FrozenSpec, service: Service, release: Release, slot: int, number: int, now: float
) -> Job:
    spec = spec_of_release(release.spec_json)
    return Job(
        job_id=job_id,
        project=service.project,
        number=number,
        name=service.name,
        # The owner is the author of the release, not of the service: an engine may give the job that user's
        # own account.
        owner=release.owner or service.owner,
        owner_name=release.owner_name or service.owner_name,
        queue=frozen.spec.queue,
        priority=release.priority,
        request=frozen.request,
        retry=frozen.retry,
        spec_json=frozen.text,
        replica=ReplicaRef(
            service_id=service.service_id,
            service=service.name,
            release=release.number,
            slot=slot,
            probe=probe_of(spec, service),
            model=checkpoint_of(spec),
        ),
        archive_digest=release.archive_digest,
        left_behind=release.left_behind,
        submitted_at=now,
    )


def _hand_down_secrets(sealing: Sealing, tx: Tx, release: Release, job_id: str) -> None:
    sealed = tx.secrets.get(release.secrets_id)
    if sealed is not None:
        opened = open_secrets(sealing.key, release.secrets_id, sealed)
        tx.secrets.put(job_id, seal_secrets(sealing.key, job_id, opened, sealing.random))


async def record_status(
    records: Records,
    running: RunningAttempts,
    services: ServiceState,
    attempt: Attempt,
    status: ReplicaStatus,
) -> None:
    """Record a replica's status as its supervisor reported it. Only changes are written."""
    previous = running.replicas.status(attempt.attempt_id)
    if previous == status:
        return
    is_there = is_address(status.address)
    if services.sidecar_identities is not None:
        # Any other address would be on the control plane's own machine.
        is_there = is_there and status.address.startswith(SCHEME)
    accepted = status if is_there else _unreachable_status(attempt, status)
    await records.store.write(
        lambda tx: _record(records.clock, tx, attempt, accepted), patience_s=REPORT_PATIENCE_S
    )
    running.replicas.note_status(attempt.attempt_id, status)
    services.waker.set()


def _unreachable_status(attempt: Attempt, status: ReplicaStatus) -> ReplicaStatus:
    """Return the status as not ready, because no data plane could reach the address. The service shows the
    reason.
    """
    because = f"its supervisor says that it is at `{status.address[:200]}`, which no data plane can reach"
    log.warning("replica %s: %s", attempt.attempt_id, because)
    return msgspec.structs.replace(status, address="", is_ready=False, because=because)


def _record(clock: Clock, tx: Tx, attempt: Attempt, status: ReplicaStatus) -> None:
    before = tx.services.replica(attempt.job_id)
    if before is None:
        return
    now = clock.now()
    is_first = status.is_ready and before.ready_at is None
    after = msgspec.structs.replace(
        before,
        attempt_id=attempt.attempt_id,
        address=status.address,
        is_ready=status.is_ready,
        is_asleep=status.is_asleep,
        because=status.because,
        ready_at=now if is_first else before.ready_at,
        start=_cold_start(before, attempt, status.at) if is_first else before.start,
    )
    if after == before:
        return
    tx.services.set_replica(after)
    if is_first and after.start is not None:
        _remember_start(tx, after.service_id, after.start)
    if after.is_ready != before.is_ready or (after.is_ready and after.attempt_id != before.attempt_id):
        kind = "replica.ready" if after.is_ready else "replica.unready"
        facts: dict[str, Any] = {"address": after.address, "because": after.because}
        facts |= {"cold_start_s": after.start.total_s} if after.start is not None else {}
        record_event(tx, kind, now, SHOAL, attempt=attempt, data=facts)


def _cold_start(replica: Replica, attempt: Attempt, ready_at: float) -> ReplicaStart:
    """Return how long each part of the start took. The clocks of two machines may be in it, so no part is
    less than 0.
    """
    placed_at = attempt.placed_at or replica.created_at
    started_at = attempt.started_at or placed_at
    return ReplicaStart(
        release=replica.release,
        queued_s=max(0.0, placed_at - replica.created_at),
        starting_s=max(0.0, started_at - placed_at),
        loading_s=max(0.0, ready_at - started_at),
    )


def _remember_start(tx: Tx, service_id: str, start: ReplicaStart) -> None:
    service = tx.services.get(service_id)
    if service is not None:
        starts = (*service.starts, start)[-MAX_STARTS:]
        tx.services.update(msgspec.structs.replace(service, starts=starts, version=service.version + 1))
