"""Replicas as jobs: how one is begun, and what its supervisor says of it."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import msgspec

from shoal.control.actor import SHOAL
from shoal.control.core import NEWS_PATIENCE_S, Core
from shoal.control.frozen import Frozen, freeze
from shoal.control.record import note
from shoal.control.submit import check_quota, in_one_part
from shoal.errors import NotFound
from shoal.identity import open_secrets, seal_secrets
from shoal.model.attempt import Attempt
from shoal.model.job import Job, ReplicaPlace
from shoal.model.service import MAX_STARTS, Release, Replica, Service, Start
from shoal.porch import SCHEME
from shoal.serving.table import is_address
from shoal.spec.service import ServiceSpec
from shoal.spec.service_clauses import ModelSpec
from shoal.store import Tx
from shoal.wire import Probe, Serving

log = logging.getLogger(__name__)


@lru_cache(maxsize=512)
def spec_of_release(spec_json: str) -> ServiceSpec:
    return ServiceSpec.model_validate_json(spec_json)


@lru_cache(maxsize=512)
def frozen_replica(spec_json: str) -> Frozen:
    """The job that each replica of a release is, as it is recorded."""
    return freeze(spec_of_release(spec_json).replica_job())


def probe_of(spec: ServiceSpec, service: Service) -> Probe:
    asked = spec.readiness
    return Probe(
        port=spec.port if isinstance(spec.port, int) else None,
        is_socket=spec.port == "socket",
        has_own_network=spec.network == "private",
        is_public=spec.public,
        service_path=f"/{service.project}/{service.name}",
        path=asked.path,
        interval_s=asked.interval,
        timeout_s=asked.timeout,
        failures=asked.failures,
        dead_after_s=asked.dead_after,
        within_s=asked.within,
        can_sleep=spec.scale.sleep_after is not None,
    )


def begin(core: Core, tx: Tx, service: Service, release: Release, slot: int, now: float) -> Replica:
    """Queue one more replica. `LimitReached`, with nothing changed: the project may not have another job."""
    project = tx.people.get_project(service.project)
    if project is None:
        raise NotFound(f"no project `{service.project}`", hint="shoal project list")
    check_quota(project, tx.jobs.count_open(project.name), 1)
    admitted = tx.submissions.admit(service.project, 1)
    frozen = in_one_part(core, frozen_replica(release.spec_json))
    job = _job(core.new_id("job"), frozen, service, release, slot, admitted.first, now)
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


def checkpoint_of(spec: ServiceSpec) -> str:
    """What it serves of a job, below where checkpoints are kept; empty: nothing."""
    model = spec.model
    return f"{model.job}/{model.save}" if isinstance(model, ModelSpec) else ""


def _job(
    job_id: str, frozen: Frozen, service: Service, release: Release, slot: int, number: int, now: float
) -> Job:
    spec = spec_of_release(release.spec_json)
    return Job(
        job_id=job_id,
        project=service.project,
        number=number,
        name=service.name,
        # What runs is whose code it is, not whose service: an engine may give it that user's own account.
        owner=release.owner or service.owner,
        owner_name=release.owner_name or service.owner_name,
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
            probe=probe_of(spec, service),
            model=checkpoint_of(spec),
        ),
        archive_digest=release.archive_digest,
        left_behind=release.left_behind,
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
    is_there = is_address(said.address)
    if core.porches is not None:  # all else would be an address of the control plane's own machine
        is_there = is_there and said.address.startswith(SCHEME)
    taken = said if is_there else _nowhere(attempt, said)
    await core.store.write(lambda tx: _record(core, tx, attempt, taken), patience_s=NEWS_PATIENCE_S)
    book.said[attempt.attempt_id] = said
    book.waker.set()


def _nowhere(attempt: Attempt, said: Serving) -> Serving:
    """Nobody could reach it there: it is not ready, and its service says why."""
    because = f"its supervisor says that it is at `{said.address[:200]}`, where no data plane can come to it"
    log.warning("replica %s: %s", attempt.attempt_id, because)
    return msgspec.structs.replace(said, address="", is_ready=False, because=because)


def _record(core: Core, tx: Tx, attempt: Attempt, said: Serving) -> None:
    before = tx.services.replica(attempt.job_id)
    if before is None:
        return
    now = core.clock.now()
    is_first = said.is_ready and before.ready_at is None
    after = msgspec.structs.replace(
        before,
        attempt_id=attempt.attempt_id,
        address=said.address,
        is_ready=said.is_ready,
        is_asleep=said.is_asleep,
        because=said.because,
        ready_at=now if is_first else before.ready_at,
        start=_start(before, attempt, said.at) if is_first else before.start,
    )
    if after == before:
        return
    tx.services.set_replica(after)
    if is_first and after.start is not None:
        _remember(tx, after.service_id, after.start)
    if after.is_ready != before.is_ready or (after.is_ready and after.attempt_id != before.attempt_id):
        kind = "replica.ready" if after.is_ready else "replica.unready"
        told: dict[str, Any] = {"address": after.address, "because": after.because}
        told |= {"cold_start_s": after.start.total_s} if after.start is not None else {}
        note(tx, kind, now, SHOAL, attempt=attempt, data=told)


def _start(replica: Replica, attempt: Attempt, ready_at: float) -> Start:
    """Clocks of two machines may be in it: no part is less than nothing."""
    placed_at = attempt.placed_at or replica.created_at
    started_at = attempt.started_at or placed_at
    return Start(
        release=replica.release,
        queued_s=max(0.0, placed_at - replica.created_at),
        starting_s=max(0.0, started_at - placed_at),
        loading_s=max(0.0, ready_at - started_at),
    )


def _remember(tx: Tx, service_id: str, start: Start) -> None:
    service = tx.services.get(service_id)
    if service is not None:
        starts = (*service.starts, start)[-MAX_STARTS:]
        tx.services.update(msgspec.structs.replace(service, starts=starts, version=service.version + 1))
