"""Replicas as jobs: how one is begun, and what its supervisor says of it."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from shoal.control.actor import SHOAL
from shoal.control.core import NEWS_PATIENCE_S, Core
from shoal.control.frozen import Frozen, freeze
from shoal.control.record import note
from shoal.control.submit import check_quota
from shoal.errors import NotFound
from shoal.identity import open_secrets, seal_secrets
from shoal.model.attempt import Attempt
from shoal.model.job import Job, ReplicaPlace
from shoal.model.service import Release, Replica, Service
from shoal.spec.service import ServiceSpec
from shoal.store import Tx
from shoal.wire import Probe, Serving


@lru_cache(maxsize=512)
def spec_of_release(spec_json: str) -> ServiceSpec:
    return ServiceSpec.model_validate_json(spec_json)


@lru_cache(maxsize=512)
def frozen_replica(spec_json: str) -> Frozen:
    """The job that each replica of a release is, as it is recorded."""
    return freeze(spec_of_release(spec_json).replica_job())


def probe_of(spec: ServiceSpec) -> Probe:
    asked = spec.readiness
    return Probe(
        port=spec.port if isinstance(spec.port, int) else None,
        is_socket=spec.port == "socket",
        has_own_network=spec.network == "private",
        is_public=spec.public,
        path=asked.path,
        interval_s=asked.interval,
        timeout_s=asked.timeout,
        failures=asked.failures,
        dead_after_s=asked.dead_after,
        within_s=asked.within,
    )


def begin(core: Core, tx: Tx, service: Service, release: Release, slot: int, now: float) -> Replica:
    """Queue one more replica. `LimitReached`, with nothing changed: the project may not have another job."""
    project = tx.people.get_project(service.project)
    if project is None:
        raise NotFound(f"no project `{service.project}`", hint="shoal project list")
    check_quota(project, tx.jobs.count_open(project.name), 1)
    admitted = tx.submissions.admit(service.project, 1)
    job = _job(core.new_id("job"), service, release, slot, admitted.first, now)
    attempt = core.recorder.new_attempt(job, now)
    tx.submissions.add([(job, attempt)])
    _hand_down_secrets(core, tx, release, job.job_id)
    replica = Replica(
        replica_id=job.job_id,
        service_id=service.service_id,
        release=release.number,
        slot=slot,
        created_at=now,
    )
    tx.services.add_replica(replica)
    told = {"name": job.name, "number": job.number, "priority": job.priority, "spec": job.spec_json}
    told |= {"service": service.name, "release": release.number, "slot": slot}
    note(tx, "job.submitted", now, SHOAL, job=job, attempt=attempt, data=told)
    return replica


def _job(job_id: str, service: Service, release: Release, slot: int, number: int, now: float) -> Job:
    frozen = frozen_replica(release.spec_json)
    return Job(
        job_id=job_id,
        project=service.project,
        number=number,
        name=service.name,
        owner=service.owner,
        owner_name=service.owner_name,
        queue=frozen.spec.queue,
        priority=release.priority,
        request=frozen.request,
        retry=frozen.retry,
        spec_json=frozen.text,
        replica=ReplicaPlace(
            service_id=service.service_id,
            service=service.name,
            release=release.number,
            slot=slot,
            probe=probe_of(spec_of_release(release.spec_json)),
        ),
        archive_digest=release.archive_digest,
        submitted_at=now,
    )


def _hand_down_secrets(core: Core, tx: Tx, release: Release, job_id: str) -> None:
    sealed = tx.secrets.get(release.secrets_id)
    if sealed is not None:
        opened = open_secrets(core.key, release.secrets_id, sealed)
        tx.secrets.put(job_id, seal_secrets(core.key, job_id, opened, core.random))


async def heard(core: Core, attempt: Attempt, said: Serving) -> None:
    """A supervisor told of its replica; only what changed is written down."""
    book = core.services
    known = book.said.get(attempt.attempt_id)
    if known == said:
        return
    await core.store.write(lambda tx: _record(core, tx, attempt, said), patience_s=NEWS_PATIENCE_S)
    book.said[attempt.attempt_id] = said
    book.waker.set()


def _record(core: Core, tx: Tx, attempt: Attempt, said: Serving) -> None:
    before = tx.services.replica(attempt.job_id)
    if before is None:
        return
    now = core.clock.now()
    is_first = said.is_ready and before.ready_at is None
    began_at = attempt.started_at or attempt.placed_at or now
    after = msgspec.structs.replace(
        before,
        attempt_id=attempt.attempt_id,
        address=said.address,
        is_ready=said.is_ready,
        because=said.because,
        ready_at=now if is_first else before.ready_at,
        cold_start_s=max(0.0, said.at - began_at) if is_first else before.cold_start_s,
    )
    if after == before:
        return
    tx.services.set_replica(after)
    if after.is_ready != before.is_ready or (after.is_ready and after.attempt_id != before.attempt_id):
        kind = "replica.ready" if after.is_ready else "replica.unready"
        told = {"address": after.address, "because": after.because, "cold_start_s": after.cold_start_s}
        note(tx, kind, now, SHOAL, attempt=attempt, data=told)
